#include "server/commands/command_line/man_pages.h"

#include <string_view>

#include "base/error_text.h"
#include "server/commands/command_line/option_text.h"
#include "server/commands/command_line/unknown_words.h"

namespace moeserve::server {
namespace {

// Returns text that stands for itself in the language of man(7), also at the start of a line.
std::string Escaped(std::string_view text) {
  std::string out;
  if (!text.empty() && (text.front() == '.' || text.front() == '\'')) out = "\\&";
  for (const char c : text) {
    switch (c) {
      case '\\':
        out += "\\e";
        break;
      case '-':
        out += "\\-";
        break;
      case '"':
        out += "\\(dq";
        break;
      case '^':
        out += "\\(ha";
        break;
      case '~':
        out += "\\(ti";
        break;
      case '\n':
        out += ' ';
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string Bold(std::string_view text) { return Concat("\\fB", Escaped(text), "\\fR"); }
std::string Italic(std::string_view text) { return Concat("\\fI", Escaped(text), "\\fR"); }

std::string Sentence(const std::string& text) {
  const bool ended = !text.empty() && (text.back() == '.' || text.back() == '!');
  return Escaped(text) + (ended ? "\n" : ".\n");
}

std::string PageName(const CLI::App& command) {
  std::string name = CommandPath(command);
  for (char& c : name) c = c == ' ' ? '-' : c;
  return name;
}

std::string Reference(const CLI::App& command) { return Concat(Bold(PageName(command)), "(1)"); }

std::string Entry(const std::string& head, const CLI::Option& option) {
  std::string text = Concat(".TP\n", head, '\n', Sentence(option.get_description()));
  if (const std::string notes = OptionNotes(option); !notes.empty()) {
    text += Concat(".br\n(", Escaped(notes), ")\n");
  }
  return text;
}

std::string OptionEntry(const CLI::Option& option) {
  std::string head;
  for (const std::string& name : OptionNames(option)) {
    head += Concat(head.empty() ? "" : ", ", Bold(name));
  }
  // A list of words may be broken after a comma.
  std::string value;
  for (const char c : Italic(ValueName(option))) {
    value += c;
    if (c == ',') value += "\\:";
  }
  if (!ValueName(option).empty()) head += Concat(' ', value);
  return Entry(head, option);
}

ManPage PageOf(const CLI::App& command, const std::string& version, const std::string& date) {
  const std::string name = PageName(command);
  std::string upper = name;
  for (char& c : upper) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  std::string description = command.get_description();
  // The description of the program begins with its name.
  if (const std::string start = name + ": "; description.starts_with(start)) {
    description = description.substr(start.size());
  }
  std::string text = Concat(".TH ", Escaped(upper), " 1 \"", date, "\" \"moeserve ",
                            Escaped(version), "\" \"User Commands\"\n");
  text += Concat(".SH NAME\n", Escaped(name), " \\- ", Escaped(description), '\n');
  const std::string path = CommandPath(command);
  text +=
      Concat(".SH SYNOPSIS\n", Bold(path), Escaped(UsageLine(command).substr(path.size())), '\n');
  text += Concat(".SH DESCRIPTION\n", Sentence(command.get_description()));
  if (const std::string footer = command.get_footer(); !footer.empty()) {
    text += Concat(".PP\n", Sentence(footer));
  }
  std::string arguments, options, commands;
  for (const CLI::Option* option : PositionalArguments(command)) {
    const std::string head = Italic(option->get_name(true, false));
    if (!option->nonpositional()) {
      arguments += Entry(head, *option);
    } else {
      arguments +=
          Concat(".TP\n", head, "\nThe same as ", Bold(OptionNames(*option).back()), ".\n");
    }
  }
  for (const CLI::Option* option : NamedOptions(command)) options += OptionEntry(*option);
  for (const CLI::App* sub : Subcommands(command)) {
    commands += Concat(".TP\n", Reference(*sub), '\n', Sentence(sub->get_description()));
  }
  if (!arguments.empty()) text += ".SH ARGUMENTS\n" + arguments;
  // A line of a long list of values has no spaces by which it could be adjusted.
  if (!options.empty()) text += ".SH OPTIONS\n.ad l\n" + options;
  if (!commands.empty()) text += ".SH COMMANDS\n" + commands;
  text +=
      ".SH EXIT STATUS\n.TP\n.B 0\nSuccess.\n.TP\n.B 1\nAn error, which is described on standard "
      "error.\n.TP\n.B 2\nAn error in the command line.\n";
  if (const CLI::App* parent = command.get_parent()) {
    text += Concat(".SH SEE ALSO\n", Reference(*parent), '\n');
  }
  return {name + ".1", text};
}

void AddPages(const CLI::App& command, const std::string& version, const std::string& date,
              std::vector<ManPage>& pages) {
  pages.push_back(PageOf(command, version, date));
  for (const CLI::App* sub : Subcommands(command)) AddPages(*sub, version, date, pages);
}

}  // namespace

std::vector<ManPage> ManPages(const CLI::App& app, const std::string& version,
                              const std::string& date) {
  std::vector<ManPage> pages;
  AddPages(app, version, date, pages);
  return pages;
}

}  // namespace moeserve::server
