// Scripts that let shells complete the words of the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace moeserve::server {

// Each returns a script for one shell, generated from the commands and options below `app`. It
// completes commands, options, the words that an option takes, and names of files.
std::string BashCompletion(const CLI::App& app);
std::string ZshCompletion(const CLI::App& app);
std::string FishCompletion(const CLI::App& app);

}  // namespace moeserve::server
