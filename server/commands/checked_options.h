// Options of which the help shows the default, and whose values are checked.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace moeserve::server {

// Returns a check that a number is from `least` to `most`. CLI::Range lets through "nan", which is
// neither below nor above anything, and takes "-1" for the largest number of an unsigned type.
template <typename Bound>
CLI::Validator NumberRange(Bound least, Bound most) {
  CLI::Validator check = CLI::Range(least, most);
  check.operation([least, most](std::string& text) {
    Bound value{};
    const bool negative = std::is_unsigned_v<Bound> && text.starts_with('-');
    if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most && !negative) {
      return std::string();
    }
    return "Value " + text + " not in range " + std::to_string(least) + " to " +
           std::to_string(most);
  });
  return check;
}

// Adds an option for a number from `least` to `most`. `value` must outlive `app`.
template <typename T, typename Bound>
CLI::Option* AddNumberOption(CLI::App& app, const std::string& names, T& value,
                             const std::string& help, Bound least, Bound most) {
  return app.add_option(names, value, help)->check(NumberRange(least, most))->capture_default_str();
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
