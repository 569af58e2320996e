#include "server/commands/command_line/completion.h"

#include <string_view>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/commands/command_line/option_text.h"
#include "server/commands/command_line/unknown_words.h"
#include "server/config/option_traits.h"

namespace moeserve::server {
namespace {

constexpr size_t kMostDescription = 70;

// Returns `text` between single quotes, for all three shells.
std::string ShellQuoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'') {
      out += "'\\''";
    } else {
      out += c;
    }
  }
  return out + "'";
}

// Returns the first clause of a description; menus have room for one line.
std::string Short(std::string_view description) {
  std::string text(description.substr(0, description.find(';')));
  if (text.size() <= kMostDescription) return text;
  text.resize(text.rfind(' ', kMostDescription - 3));
  return text + "...";
}

// All commands, a command before its subcommands.
std::vector<const CLI::App*> AllCommands(const CLI::App& app) {
  std::vector<const CLI::App*> out = {&app};
  for (size_t i = 0; i < out.size(); ++i) {
    for (const CLI::App* sub : Subcommands(*out[i])) out.push_back(sub);
  }
  return out;
}

std::string Joined(const std::vector<std::string>& words, std::string_view separator) {
  std::string out;
  for (const std::string& word : words) out += Concat(out.empty() ? "" : separator, word);
  return out;
}

// A word that may follow a command, and what it means.
struct NextWord {
  std::string word;
  std::string meaning;
};

// Returns the names of subcommands, or the words that the first argument without a name takes.
std::vector<NextWord> NextWords(const CLI::App& command) {
  std::vector<NextWord> words;
  for (const CLI::App* sub : Subcommands(command)) {
    words.push_back({sub->get_name(), Short(sub->get_description())});
  }
  const std::vector<const CLI::Option*> arguments = PositionalArguments(command);
  if (!words.empty() || arguments.empty()) return words;
  for (std::string& choice : Choices(*arguments.front())) {
    words.push_back({std::move(choice), Short(arguments.front()->get_description())});
  }
  return words;
}

// The shell's patterns, separated by '|', of all paths to a command but the program's own name.
std::string PathPatterns(const CLI::App& app) {
  std::vector<std::string> paths;
  for (const CLI::App* command : AllCommands(app)) {
    if (command->get_parent() != nullptr) paths.push_back(ShellQuoted(CommandPath(*command)));
  }
  return Joined(paths, "|");
}

// The patterns "PATH OPTION" of an option's names.
std::string OptionPatterns(const CLI::App& command, const CLI::Option& option) {
  std::vector<std::string> patterns;
  for (const std::string& name : OptionNames(option)) {
    patterns.push_back(ShellQuoted(Concat(CommandPath(command), ' ', name)));
  }
  return Joined(patterns, "|");
}

// Replaces every "@NAME@" that stands for the program's name.
std::string WithName(std::string_view script, const std::string& name) {
  constexpr std::string_view kMark = "@NAME@";
  std::string out;
  while (true) {
    const size_t at = script.find(kMark);
    out += script.substr(0, at);
    if (at == std::string_view::npos) return out;
    out += name;
    script.remove_prefix(at + kMark.size());
  }
}

}  // namespace

std::string BashCompletion(const CLI::App& app) {
  std::string words, values;
  for (const CLI::App* command : AllCommands(app)) {
    std::vector<std::string> options;
    for (const CLI::Option* option : NamedOptions(*command)) {
      options.push_back(OptionNames(*option).back());
      if (IsFlag(*option)) continue;
      const std::vector<std::string> choices = Choices(*option);
      const std::string reply = !choices.empty()
                                    ? Concat("COMPREPLY=($(compgen -W ",
                                             ShellQuoted(Joined(choices, " ")), " -- \"$word\"))")
                                : IsNumber(*option) ? std::string(":")
                                                    : "_@NAME@_files";
      values += Concat("    ", OptionPatterns(*command, *option), ") ", reply, "; return ;;\n");
    }
    std::vector<std::string> next;
    for (const NextWord& word : NextWords(*command)) next.push_back(word.word);
    words += Concat("    ", ShellQuoted(CommandPath(*command)),
                    ")\n      options=", ShellQuoted(Joined(options, " ")),
                    "\n      commands=", ShellQuoted(Joined(next, " ")), " ;;\n");
  }
  return WithName(Concat(R"(# Completion of @NAME@ for bash. Written by "@NAME@ completion bash".
_@NAME@_files() {
  compopt -o filenames
  COMPREPLY=($(compgen -f -- "$word"))
}
_@NAME@() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} path=@NAME@ i options commands
  COMPREPLY=()
  # The shell splits "--option=value" at the equals sign.
  if [[ $word == '=' ]]; then
    word=
  elif [[ $before == '=' ]]; then
    before=${COMP_WORDS[COMP_CWORD-2]}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$path ${COMP_WORDS[i]}" in
      )",
                         PathPatterns(app), R"() path="$path ${COMP_WORDS[i]}" ;;
    esac
  done
  case "$path $before" in
)",
                         values, R"(  esac
  case $path in
)",
                         words, R"(  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  elif [[ -n $commands ]]; then
    COMPREPLY=($(compgen -W "$commands" -- "$word"))
  else
    _@NAME@_files
  fi
}
complete -F _@NAME@ @NAME@
)"),
                  app.get_name());
}

std::string ZshCompletion(const CLI::App& app) {
  // In the lists of _describe, a colon separates a word from its description.
  const auto entry = [](const std::string& word, const std::string& description) {
    std::string escaped;
    for (const char c : word) escaped += c == ':' ? std::string("\\:") : std::string(1, c);
    return ShellQuoted(Concat(escaped, ':', Short(description)));
  };
  std::string words, values;
  for (const CLI::App* command : AllCommands(app)) {
    std::string options, commands;
    for (const CLI::Option* option : NamedOptions(*command)) {
      options +=
          Concat("\n        ", entry(OptionNames(*option).back(), option->get_description()));
      if (IsFlag(*option)) continue;
      const std::vector<std::string> choices = Choices(*option);
      const std::string reply = !choices.empty()    ? Concat("compadd -- ", Joined(choices, " "))
                                : IsNumber(*option) ? std::string("_message number")
                                                    : "_files";
      values += Concat("    ", OptionPatterns(*command, *option), ") ", reply, "; return ;;\n");
    }
    for (const NextWord& word : NextWords(*command)) {
      commands += Concat("\n        ", entry(word.word, word.meaning));
    }
    words += Concat("    ", ShellQuoted(CommandPath(*command)), ")\n      options=(", options,
                    ")\n      commands=(", commands, ") ;;\n");
  }
  return WithName(Concat(R"(#compdef @NAME@
# Completion of @NAME@ for zsh. Written by "@NAME@ completion zsh".
_@NAME@() {
  local line=@NAME@ i
  local -a options commands
  for ((i = 2; i < CURRENT; ++i)); do
    case "$line $words[i]" in
      )",
                         PathPatterns(app), R"() line="$line $words[i]" ;;
    esac
  done
  case "$line $words[CURRENT-1]" in
)",
                         values, R"(  esac
  case $line in
)",
                         words, R"(  esac
  if [[ $words[CURRENT] == -* ]]; then
    _describe option options
  elif (( $#commands )); then
    _describe command commands
  else
    _files
  fi
}
if [[ $funcstack[1] == _@NAME@ ]]; then
  _@NAME@ "$@"
else
  compdef _@NAME@ @NAME@
fi
)"),
                  app.get_name());
}

std::string FishCompletion(const CLI::App& app) {
  std::string lines;
  for (const CLI::App* command : AllCommands(app)) {
    const std::string at =
        Concat("complete -c @NAME@ -n ",
               ShellQuoted(Concat("__@NAME@_at \"", CommandPath(*command), '"')));
    for (const NextWord& word : NextWords(*command)) {
      lines += Concat(at, " -f -a ", word.word, " -d ", ShellQuoted(word.meaning), '\n');
    }
    for (const CLI::Option* option : NamedOptions(*command)) {
      lines += at;
      for (const std::string& name : option->get_snames()) lines += Concat(" -s ", name);
      for (const std::string& name : option->get_lnames()) lines += Concat(" -l ", name);
      const std::vector<std::string> choices = Choices(*option);
      if (!choices.empty()) {
        lines += Concat(" -x -a ", ShellQuoted(Joined(choices, " ")));
      } else if (!IsFlag(*option)) {
        lines += IsNumber(*option) ? " -x" : " -r -F";
      }
      lines += Concat(" -d ", ShellQuoted(Short(option->get_description())), '\n');
    }
  }
  return WithName(Concat(R"(# Completion of @NAME@ for fish. Written by "@NAME@ completion fish".
function __@NAME@_at
  set -l path @NAME@
  set -l given (commandline -opc)
  for word in $given[2..-1]
    switch "$path $word"
      case )",
                         [&] {
                           std::string paths = PathPatterns(app);
                           for (char& c : paths) c = c == '|' ? ' ' : c;
                           return paths;
                         }(),
                         R"(
        set path "$path $word"
    end
  end
  test "$path" = "$argv[1]"
end
)",
                         lines),
                  app.get_name());
}

}  // namespace moeserve::server
