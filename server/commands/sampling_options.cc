#include "server/commands/sampling_options.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

std::string OptionName(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

void AddNumber(CLI::App& app, const SamplingField& field, SamplingOptions& options) {
  const auto set = [&options, &field](double value) {
    options.given.push_back([&field, value](SamplingParams& params) { field.Set(params, value); });
  };
  const std::string name = Concat("--", OptionName(field.name));
  CLI::Option* const option = field.is_integer()
                                  ? app.add_option_function<int>(
                                        name, [set](int value) { set(value); }, field.meaning)
                                  : app.add_option_function<double>(name, set, field.meaning);
  option->check(
      [&field](const std::string& text) {
        double value = 0.0;
        const bool number = CLI::detail::lexical_cast(text, value);
        if (number && field.Accepts(value)) return std::string();
        return Concat("expected ", RangeText(field), ", found ", Printable(text, 32));
      },
      RangeText(field));
}

void AddFlag(CLI::App& app, const SamplingFlag& flag, SamplingOptions& options) {
  std::string names = Concat("--", OptionName(flag.name));
  if (SamplingParams().*flag.member) names += Concat(",!--no-", OptionName(flag.name));
  app.add_flag_function(
      names,
      [&options, &flag](int64_t count) {
        options.given.push_back(
            [&flag, on = count > 0](SamplingParams& params) { params.*flag.member = on; });
      },
      flag.meaning);
}

}  // namespace

void AddSamplingOptions(CLI::App& app, SamplingOptions& options) {
  for (const SamplingField& field : kDrawFields) AddNumber(app, field, options);
  for (const SamplingField& field : kPenaltyFields) AddNumber(app, field, options);
  for (const SamplingFlag& flag : kSamplingFlags) AddFlag(app, flag, options);
  app.add_option_function<int64_t>(
      "--seed",
      [&options](int64_t seed) {
        options.given.push_back([seed](SamplingParams& params) { params.seed = seed; });
      },
      "Seed that makes sampling repeatable");
  app.add_option_function<std::vector<std::string>>(
      "--stop",
      [&options](const std::vector<std::string>& stop) {
        options.given.push_back([stop](SamplingParams& params) { params.stop = stop; });
      },
      "Text that ends the completion; can be repeated");
}

}  // namespace moeserve::server
