#include "server/commands/command_line/unknown_words.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "base/error_text.h"
#include "server/config/option_traits.h"
#include "server/config/suggestion.h"

namespace moeserve::server {
namespace {

struct OtherName {
  std::string_view word;  // as other programs spell it
  std::string_view ours;  // long name without dashes
};

// Options of vLLM and llama.cpp whose names are not similar to those of moeserve.
constexpr OtherName kOtherNames[] = {
    {"--max-num-batched-tokens", "max-step-tokens"},
    {"--speculative-model", "draft-model"},
    {"--num-speculative-tokens", "draft-tokens"},
    {"--speculative-config", "draft-mtp"},
    {"--spec-type", "draft-mtp"},
    {"--quantization", "dtype"},
    {"-q", "dtype"},
    {"--api-key", "api-key-file"},
    {"--ssl-certfile", "tls-cert"},
    {"--ssl-keyfile", "tls-key"},
    {"--ssl-ca-certs", "tls-client-ca"},
    {"--ssl-cert-file", "tls-cert"},
    {"--ssl-key-file", "tls-key"},
    {"--uvicorn-log-level", "log-level"},
    {"--max-seq-len-to-capture", "max-model-len"},
    {"--no-enable-prefix-caching", "no-prefix-cache"},
    {"--disable-hybrid-kv-cache-manager", "no-window-pages"},
    {"--enable-log-requests", "access-log"},
    {"-c", "max-model-len"},
    {"--ctx-size", "max-model-len"},
    {"-t", "threads"},
    {"-n", "max-tokens"},
    {"--predict", "max-tokens"},
    {"--n-predict", "max-tokens"},
    {"-p", "prompt"},
    {"--temp", "temperature"},
    {"-s", "seed"},
    {"-np", "max-num-seqs"},
    {"--parallel", "max-num-seqs"},
    {"-b", "max-step-tokens"},
    {"--batch-size", "max-step-tokens"},
    {"-ctk", "kv-cache-dtype"},
    {"-ctv", "kv-cache-dtype"},
    {"--cache-type-k", "kv-cache-dtype"},
    {"--cache-type-v", "kv-cache-dtype"},
    {"-md", "draft-model"},
    {"--model-draft", "draft-model"},
    {"--draft", "draft-tokens"},
    {"--draft-max", "draft-tokens"},
    {"--repeat-penalty", "repetition-penalty"},
    {"--chat-template-file", "chat-template"},
    {"-a", "served-model-name"},
    {"--alias", "served-model-name"},
    {"-dev", "device"},
    {"-sys", "system"},
    {"--system-prompt", "system"},
    {"--no-webui", "no-dashboard"},
};

// The parser takes what begins like this as an option.
bool IsOption(std::string_view word) {
  if (word.size() < 2 || word[0] != '-') return false;
  const char c = word[1] == '-' ? (word.size() > 2 ? word[2] : '\0') : word[1];
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '?' || c == '@';
}

const CLI::Option* FindOption(const CLI::App& command, std::string_view word) {
  if (word.substr(0, 2) != "--") word = word.substr(0, 2);  // the value may follow at once
  return command.get_option_no_throw(std::string(word));
}

const CLI::App* FindCommand(const CLI::App& command, std::string_view word) {
  const auto found = command.get_subcommands(
      [&](const CLI::App* candidate) { return candidate->get_name() == word; });
  return found.empty() ? nullptr : found.front();
}

// Returns how many positional arguments the command takes; any number beyond 1 << 20.
size_t Positionals(const CLI::App& command) {
  size_t count = 0;
  for (const CLI::Option* option :
       command.get_options([](const CLI::Option* o) { return o->get_positional(); })) {
    count += static_cast<size_t>(std::max(option->get_items_expected_max(), 0));
  }
  return count;
}

std::vector<std::string> OptionNames(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::vector<std::string> CommandNames(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* sub : command.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(sub->get_name());
  }
  return names;
}

// Returns "; did you mean ...?" for a word that is no option of the command; empty if nothing is
// similar.
std::string OptionSuggestion(const CLI::App& command, const std::string& word) {
  for (const OtherName& other : kOtherNames) {
    const std::string ours = Concat("--", other.ours);
    if (other.word == word && command.get_option_no_throw(ours) != nullptr) {
      return Concat("; did you mean ", Quoted(ours), '?');
    }
  }
  return Suggestion(word, OptionNames(command));
}

std::string Unknown(const CLI::App& command, std::string_view kind, const std::string& word,
                    const std::string& suggestion) {
  const std::string path = CommandPath(command);
  return Concat("error: ", path, ": unknown ", kind, ' ', Quoted(word), suggestion, "\nRun ",
                Quoted(path + " --help"), " for a list.");
}

// Walks along the words as the parser does.
class Walk {
 public:
  Walk(const CLI::App& app, std::span<const char* const> words) : command_(&app), words_(words) {}

  std::optional<std::string> Run() {
    while (at_ < words_.size()) {
      const std::string word = words_[at_++];
      if (word == "--") return std::nullopt;  // only positional arguments follow
      const std::optional<std::string> error = IsOption(word) ? TakeOption(word) : TakeWord(word);
      if (error) return error;
    }
    return std::nullopt;
  }

 private:
  std::optional<std::string> TakeOption(const std::string& word) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const CLI::Option* option = FindOption(*command_, name);
    if (option == nullptr) {
      return Unknown(*command_, "option", name, OptionSuggestion(*command_, name));
    }
    const bool attached =
        equals != std::string::npos || (word.substr(0, 2) != "--" && word.size() > 2);
    if (IsFlag(*option) || attached) return std::nullopt;
    ++at_;  // the first value may look like an option
    if (!IsList(*option)) return std::nullopt;
    while (at_ < words_.size() && !IsOption(words_[at_]) && std::string_view(words_[at_]) != "--" &&
           FindCommand(*command_, words_[at_]) == nullptr) {
      ++at_;
    }
    return std::nullopt;
  }

  std::optional<std::string> TakeWord(const std::string& word) {
    if (const CLI::App* sub = FindCommand(*command_, word)) {
      command_ = sub;
      positionals_ = 0;
      return std::nullopt;
    }
    if (++positionals_ <= Positionals(*command_)) return std::nullopt;
    const std::vector<std::string> commands = CommandNames(*command_);
    if (!commands.empty()) return Unknown(*command_, "command", word, Suggestion(word, commands));
    // A value whose option was forgotten.
    return Unknown(*command_, "argument", word, "");
  }

  const CLI::App* command_;
  std::span<const char* const> words_;
  size_t at_ = 0;
  size_t positionals_ = 0;  // that command_ has been given
};

}  // namespace

std::string CommandPath(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name()
                           : Concat(CommandPath(*parent), ' ', command.get_name());
}

std::optional<std::string> FindUnknownWord(const CLI::App& app,
                                           std::span<const char* const> words) {
  return Walk(app, words).Run();
}

}  // namespace moeserve::server
