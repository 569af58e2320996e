// What an option of the command line takes, read from the parser's own tables, so that help texts,
// manual pages, completions and errors cannot differ from what is parsed.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace moeserve::server {

bool IsFlag(const CLI::Option& option);
// Whether the option takes any number of values.
bool IsList(const CLI::Option& option);
bool IsNumber(const CLI::Option& option);

// Returns the words that the option takes; empty if it takes others, too.
std::vector<std::string> Choices(const CLI::Option& option);

// Returns the least and the largest number that the option takes, as text; nullopt if it has no
// range.
std::optional<std::pair<std::string, std::string>> NumberRange(const CLI::Option& option);

// Describes the values that the option takes, such as "a whole number from 1 to 8".
std::string ExpectedValue(const CLI::Option& option);

}  // namespace moeserve::server
