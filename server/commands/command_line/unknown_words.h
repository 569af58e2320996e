// Finds words of the command line that name nothing, before anything else is checked or run.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <span>
#include <string>

namespace moeserve::server {

// Returns the names that lead to `command`, such as "moeserve experts save".
std::string CommandPath(const CLI::App& command);

// Goes through `words`, which are the arguments of the process without the program's name, as the
// parser of `app` will. Returns an error about the first one that is neither a command, an option,
// the value of an option nor a positional argument. The error names the most similar word that
// exists, or the option that has the meaning which the word has in other programs, if there is one.
// It ends without a line break. Returns nullopt if there is no such word.
std::optional<std::string> FindUnknownWord(const CLI::App& app, std::span<const char* const> words);

}  // namespace moeserve::server
