// How options are described to users: in --help, in manual pages and in completions of shells.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace moeserve::server {

// Returns the names with their dashes, short ones first: "-m", "--model".
std::vector<std::string> OptionNames(const CLI::Option& option);

// Returns what stands for the option's value: "N", "{f32,bf16}", "TEXT"; empty for a flag.
std::string ValueName(const CLI::Option& option);

// Returns what --help adds to the description: "1 to 8; default: 3", "required". May be empty.
std::string OptionNotes(const CLI::Option& option);

// Returns the options of a command that have names, in the order in which they were added.
std::vector<const CLI::Option*> NamedOptions(const CLI::App& command);
// Returns the positional arguments of a command.
std::vector<const CLI::Option*> PositionalArguments(const CLI::App& command);
// Returns the subcommands of a command, in the order in which they were added.
std::vector<const CLI::App*> Subcommands(const CLI::App& command);

// Returns the line that shows how the command is called: "moeserve serve [OPTIONS] [MODEL...]".
std::string UsageLine(const CLI::App& command);

// Returns the text of --help. Lines have at most `width` columns if words permit.
std::string HelpText(const CLI::App& command, size_t width);

// Lets --help of all commands below `app` print HelpText() as wide as the terminal, at most 100
// columns. Commands that are added later inherit it.
void UseHelpText(CLI::App& app);

}  // namespace moeserve::server
