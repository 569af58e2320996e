#include "server/commands/command_line/option_text.h"

#include <algorithm>
#include <memory>
#include <string_view>

#include "base/error_text.h"
#include "server/commands/command_line/unknown_words.h"
#include "server/commands/progress/terminal.h"
#include "server/config/option_traits.h"

namespace moeserve::server {
namespace {

constexpr size_t kColumn = 30;  // where descriptions begin
constexpr size_t kMostColumns = 100;
constexpr size_t kFewestColumns = 50;

// Appends `text`, broken at spaces, in columns from `indent` up to `width`. The current line ends
// at `column`.
void AppendWrapped(std::string_view text, size_t indent, size_t column, size_t width,
                   std::string& out) {
  bool first = true;
  while (!text.empty()) {
    const size_t space = text.find(' ');
    const std::string_view word = text.substr(0, space);
    text.remove_prefix(space == std::string_view::npos ? text.size() : space + 1);
    if (!first && column + 1 + word.size() > width) {
      out += Concat('\n', std::string(indent, ' '));
      column = indent;
      first = true;
    }
    if (!first) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
    first = false;
  }
}

// Appends an entry of a list: a name, and what it means in a column of its own.
void AppendEntry(const std::string& name, const std::string& meaning, size_t width,
                 std::string& out) {
  std::string line = Concat("  ", name);
  if (!meaning.empty()) {
    if (line.size() + 2 > kColumn) line += Concat('\n', std::string(kColumn, ' '));
    if (line.size() < kColumn) line.resize(kColumn, ' ');
    AppendWrapped(meaning, kColumn, kColumn, width, line);
  }
  out += line + "\n";
}

std::string Meaning(const CLI::Option& option) {
  const std::string notes = OptionNotes(option);
  return notes.empty() ? option.get_description()
                       : Concat(option.get_description(), " (", notes, ')');
}

class HelpFormatter final : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    const size_t columns = TerminalColumns(stdout).value_or(kMostColumns);
    return HelpText(*app, std::clamp(columns, kFewestColumns, kMostColumns));
  }
};

}  // namespace

std::vector<std::string> OptionNames(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names;
}

std::string ValueName(const CLI::Option& option) {
  if (IsFlag(option)) return "";
  std::string choices;
  for (const std::string& choice : Choices(option)) {
    choices += Concat(choices.empty() ? "" : ",", choice);
  }
  if (!choices.empty()) return Concat('{', choices, '}');
  return IsNumber(option) ? "N" : "TEXT";
}

std::string OptionNotes(const CLI::Option& option) {
  std::string notes;
  const auto add = [&](const std::string& note) {
    notes += notes.empty() ? note : Concat("; ", note);
  };
  if (option.get_required()) add("required");
  if (const auto range = NumberRange(option)) add(Concat(range->first, " to ", range->second));
  if (!IsFlag(option) && !option.get_default_str().empty()) {
    add(Concat("default: ", option.get_default_str()));
  }
  if (!option.get_envname().empty()) add(Concat("environment: ", option.get_envname()));
  for (const CLI::Option* needed : option.get_needs()) add(Concat("needs ", needed->get_name()));
  for (const CLI::Option* other : option.get_excludes())
    add(Concat("not with ", other->get_name()));
  return notes;
}

std::vector<const CLI::Option*> NamedOptions(const CLI::App& command) {
  return command.get_options([](const CLI::Option* option) { return option->nonpositional(); });
}

std::vector<const CLI::Option*> PositionalArguments(const CLI::App& command) {
  return command.get_options([](const CLI::Option* option) { return option->get_positional(); });
}

std::vector<const CLI::App*> Subcommands(const CLI::App& command) {
  return command.get_subcommands([](const CLI::App*) { return true; });
}

std::string UsageLine(const CLI::App& command) {
  std::string line = CommandPath(command);
  if (!NamedOptions(command).empty()) line += " [OPTIONS]";
  for (const CLI::Option* option : PositionalArguments(command)) {
    // What also has a name may be given by that name.
    const bool optional = !option->get_required() || option->nonpositional();
    line += Concat(optional ? " [" : " ", option->get_name(true, false),
                   IsList(*option) ? "..." : "", optional ? "]" : "");
  }
  if (!Subcommands(command).empty()) {
    line += command.get_require_subcommand_min() > 0 ? " COMMAND" : " [COMMAND]";
  }
  return line;
}

std::string HelpText(const CLI::App& command, size_t width) {
  std::string out;
  AppendWrapped(command.get_description(), 0, 0, width, out);
  out += "\nUsage: ";
  AppendWrapped(UsageLine(command), 7, 7, width, out);
  out += '\n';
  std::string arguments;
  for (const CLI::Option* option : PositionalArguments(command)) {
    if (option->nonpositional()) {
      AppendEntry(option->get_name(true, false),
                  Concat("The same as ", OptionNames(*option).back()), width, arguments);
    } else {
      AppendEntry(option->get_name(true, false), Meaning(*option), width, arguments);
    }
  }
  if (!arguments.empty()) out += "\nArguments:\n" + arguments;
  std::string options;
  for (const CLI::Option* option : NamedOptions(command)) {
    std::string names;
    for (const std::string& name : OptionNames(*option)) {
      names += Concat(names.empty() ? "" : ", ", name);
    }
    const std::string value = ValueName(*option);
    AppendEntry(value.empty() ? names : Concat(names, ' ', value), Meaning(*option), width,
                options);
  }
  if (!options.empty()) out += "\nOptions:\n" + options;
  std::string commands;
  for (const CLI::App* sub : Subcommands(command)) {
    AppendEntry(sub->get_name(), sub->get_description(), width, commands);
  }
  if (!commands.empty()) out += "\nCommands:\n" + commands;
  if (const std::string footer = command.get_footer(); !footer.empty()) {
    out += '\n';
    AppendWrapped(footer, 0, 0, width, out);
    out += '\n';
  }
  return out;
}

void UseHelpText(CLI::App& app) { app.formatter(std::make_shared<HelpFormatter>()); }

}  // namespace moeserve::server
