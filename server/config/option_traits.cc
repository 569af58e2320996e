#include "server/config/option_traits.h"

#include "base/error_text.h"

namespace moeserve::server {
namespace {

// Returns the type without the checks: "INT", "FLOAT", "TEXT" and others.
std::string BaseType(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(':'));
}

}  // namespace

bool IsFlag(const CLI::Option& option) { return option.get_items_expected_max() == 0; }
bool IsList(const CLI::Option& option) { return option.get_items_expected_max() > 1; }

bool IsNumber(const CLI::Option& option) {
  // The type of a function's argument has a check's description in place of a name.
  const std::string type = BaseType(option);
  return type.starts_with("INT") || type.starts_with("UINT") || type.starts_with("FLOAT");
}

std::vector<std::string> Choices(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  std::vector<std::string> out;
  const size_t begin = type.find(":{");
  if (begin == std::string::npos || type.back() != '}') return out;
  return CLI::detail::split(type.substr(begin + 2, type.size() - begin - 3), ',');
}

std::optional<std::pair<std::string, std::string>> NumberRange(const CLI::Option& option) {
  // The parser describes a range as "INT in [1 - 8]".
  const std::string type = option.get_type_name();
  const size_t range = type.find(" in [");
  const size_t dash = type.rfind(" - ");
  if (range == std::string::npos || dash == std::string::npos || type.back() != ']') {
    return std::nullopt;
  }
  return std::pair(type.substr(range + 5, dash - range - 5),
                   type.substr(dash + 3, type.size() - dash - 4));
}

std::string ExpectedValue(const CLI::Option& option) {
  if (IsFlag(option)) return "true or false";
  std::string out;
  if (const std::vector<std::string> choices = Choices(option); !choices.empty()) {
    for (const std::string& choice : choices) out += Concat(out.empty() ? "" : ", ", choice);
    return choices.size() == 1 ? out : Concat("one of ", out);
  }
  out = BaseType(option).starts_with("FLOAT") ? "a number"
        : IsNumber(option)                    ? "a whole number"
                                              : "text";
  if (const auto range = NumberRange(option)) {
    out += Concat(" from ", range->first, " to ", range->second);
  }
  return out;
}

}  // namespace moeserve::server
