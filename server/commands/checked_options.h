// Options of which the help shows the default, and whose values are checked.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

namespace moeserve::server {

// Adds an option for a number from `least` to `most`. `value` must outlive `app`.
template <typename T, typename Bound>
CLI::Option* AddNumberOption(CLI::App& app, const std::string& names, T& value,
                             const std::string& help, Bound least, Bound most) {
  return app.add_option(names, value, help)->check(CLI::Range(least, most))->capture_default_str();
}

// Adds an option for one of the texts `choices`. `value` must outlive `app`.
template <typename T>
CLI::Option* AddChoiceOption(CLI::App& app, const std::string& names, T& value,
                             const std::string& help, std::vector<std::string> choices) {
  return app.add_option(names, value, help)
      ->check(CLI::IsMember(std::move(choices)))
      ->capture_default_str();
}

}  // namespace moeserve::server
