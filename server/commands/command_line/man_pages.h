// Manual pages, generated from the commands and options.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace moeserve::server {

struct ManPage {
  std::string file;  // such as "moeserve-serve.1"
  std::string text;  // in the language of man(7)
};

// Returns one page for `app` and one for each command below it. `date` is that of the program, as
// YYYY-MM-DD; it may be empty.
std::vector<ManPage> ManPages(const CLI::App& app, const std::string& version,
                              const std::string& date);

}  // namespace moeserve::server
