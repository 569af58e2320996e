#include "server/config/option_sources.h"

#include <absl/algorithm/container.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/ascii.h"
#include "base/error_text.h"
#include "server/base/json.h"
#include "server/config/option_traits.h"
#include "server/config/suggestion.h"

namespace moeserve::server {
namespace {

// Long enough for the text of every value but a hostile one.
constexpr size_t kShownBytes = 200;

bool IsPlain(const std::string& text) {
  // Words to which versions of YAML give a meaning of their own.
  static const std::vector<std::string> kReserved = {"true", "false", "yes", "no", "on",
                                                     "off",  "null",  "y",   "n"};
  if (text.empty() || absl::c_linear_search(kReserved, CLI::detail::to_lower(text))) return false;
  if (text.front() == '-' || (text.front() >= '0' && text.front() <= '9')) return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '/' || c == '.';
  });
}

std::string YamlText(const std::string& text) {
  if (IsPlain(text)) return text;
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string YamlValue(const CLI::Option& option, const std::string& text) {
  return IsNumber(option) ? text : YamlText(text);
}

}  // namespace

OptionSources::OptionSources(CLI::App& command, std::vector<std::string> command_line_only,
                             std::vector<std::string> secret)
    : command_(command),
      command_line_only_(std::move(command_line_only)),
      secret_(std::move(secret)) {
  command_line_only_.push_back("help");
  for (CLI::Option* option : command.get_options()) {
    if (option->get_lnames().empty()) continue;
    const std::string& name = option->get_lnames().front();
    if (option->get_required()) {
      required_.push_back(name);
      option->required(false);
      option->description(option->get_description() + "; required");
    }
    if (!option->get_envname().empty()) {
      variables_[name] = option->get_envname();
      option->description(
          Concat(option->get_description(), "; environment: ", option->get_envname()));
      option->envname("");
    }
    if (!absl::c_linear_search(command_line_only_, name)) names_.push_back(name);
  }
}

bool OptionSources::IsSecret(const std::string& name) const {
  return absl::c_linear_search(secret_, name);
}

std::string OptionSources::Set(CLI::Option& option, const std::string& name,
                               const ConfigEntry& entry) const {
  if (entry.is_list && !IsList(option)) {
    return Concat("expected ", ExpectedValue(option), ", found a list");
  }
  for (const ConfigValue& value : entry.values) {
    const auto refuse = [&] {
      const std::string found = IsSecret(name) ? "another value" : Quoted(value.text, kShownBytes);
      return Concat("expected ", ExpectedValue(option), ", found ", value.quoted ? "the text " : "",
                    found, Suggestion(value.text, Choices(option)));
    };
    if (value.quoted && (IsFlag(option) || IsNumber(option))) return refuse();
    if (IsFlag(option) && value.text != "true" && value.text != "false") return refuse();
    // No comparison finds NaN out of range.
    if (IsNumber(option) && CLI::detail::to_lower(value.text).find("nan") != std::string::npos) {
      return refuse();
    }
    try {
      // One value after the other, so that the error names the one at fault.
      const std::string text =
          IsFlag(option) ? option.get_flag_value(name, value.text) : value.text;
      option.add_result(text);
      option.run_callback();
    } catch (const std::exception&) {
      option.clear();
      return refuse();
    }
  }
  return {};
}

void OptionSources::ReadEnvironment(const Environment& environment, Problems& problems) {
  for (const auto& [name, variable] : variables_) {
    CLI::Option& option = *command_.get_option("--" + name);
    const char* const text = environment(variable.c_str());
    if (text == nullptr || *text == '\0' || option.count() > 0) continue;
    ConfigEntry entry;
    entry.values.push_back({text, false, 0});
    if (const std::string error = Set(option, name, entry); !error.empty()) {
      problems.Add(Concat("environment variable ", variable, ": ", error));
    } else {
      sources_[name] = {SourceKind::kEnvironment, Concat("environment ", variable)};
    }
  }
}

void OptionSources::ReadEntry(const ConfigEntry& entry, const std::string& file,
                              Problems& problems) {
  const std::string place = Concat(file, ':', entry.line);
  const std::string key = Quoted(entry.key);
  if (absl::c_linear_search(command_line_only_, entry.key)) {
    problems.Add(Concat(place, ": ", key, " can be given on the command line only"));
    return;
  }
  if (!absl::c_linear_search(names_, entry.key)) {
    problems.Add(Concat(place, ": expected the name of an option, found ", key,
                        Suggestion(entry.key, names_)));
    return;
  }
  CLI::Option& option = *command_.get_option("--" + entry.key);
  if (option.count() > 0) return;  // overridden
  if (const std::string error = Set(option, entry.key, entry); !error.empty()) {
    problems.Add(Concat(place, ": ", key, ": ", error));
  } else if (!entry.values.empty()) {
    sources_[entry.key] = {SourceKind::kFile, place};
  }
}

absl::Status OptionSources::Resolve(const std::optional<ConfigFile>& file,
                                    const Environment& environment, bool partial) {
  for (const CLI::Option* option : command_.get_options()) {
    if (option->count() > 0 && !option->get_lnames().empty()) {
      sources_[option->get_lnames().front()] = {SourceKind::kCommandLine, "command line"};
    }
  }
  Problems problems;
  ReadEnvironment(environment, problems);
  if (file) {
    for (const ConfigEntry& entry : file->entries) ReadEntry(entry, file->name, problems);
  }
  for (const std::string& name : required_) {
    if (!partial && problems.empty() && command_.get_option("--" + name)->count() == 0) {
      problems.Add(Concat("--", name,
                          " is required: give it on the command line or in the file of "
                          "--config"));
    }
  }
  return problems.ToStatus("");
}

OptionSource OptionSources::SourceOf(const std::string& name) const {
  const auto found = sources_.find(name);
  return found == sources_.end() ? OptionSource() : found->second;
}

std::string OptionSources::ToYaml() const {
  std::string out;
  for (const std::string& name : names_) {
    const CLI::Option& option = *command_.get_option("--" + name);
    const std::string comment = Concat("  # ", SourceOf(name).text, '\n');
    const std::vector<std::string> values =
        option.count() > 0                 ? option.results()
        : option.get_default_str().empty() ? std::vector<std::string>()
                                           : std::vector<std::string>{option.get_default_str()};
    if (IsSecret(name)) {
      out += Concat("# ", name, ':', values.empty() ? "" : " (not shown)", comment);
    } else if (IsFlag(option)) {
      const bool given = !values.empty() && values.back() == option.get_flag_value(name, "true");
      out += Concat(name, ": ", given ? "true" : "false", comment);
    } else if (values.empty()) {
      out += Concat("# ", name, ':', comment);
    } else if (IsList(option)) {
      std::string list;
      for (const std::string& value : values) {
        list += Concat(list.empty() ? "" : ", ", YamlValue(option, value));
      }
      out += Concat(name, ": [", list, ']', comment);
    } else {
      out += Concat(name, ": ", YamlValue(option, values.back()), comment);
    }
  }
  return out;
}

absl::Status OptionSources::WithSource(const absl::Status& error) const {
  const std::string message(error.message());
  for (const auto& [name, source] : sources_) {
    if (source.kind == SourceKind::kCommandLine) continue;
    const size_t at = message.find("--" + name);
    if (at == std::string::npos) continue;
    const size_t end = at + 2 + name.size();
    // The name of another option can begin with this name.
    if (end < message.size() && (message[end] == '-' || absl::ascii_isalnum(message[end])))
      continue;
    return absl::Status(error.code(), Concat(message, " (set by ", source.text, ')'));
  }
  return error;
}

}  // namespace moeserve::server
