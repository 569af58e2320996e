// Values as text: str(), repr(), json.dumps().
#pragma once

#include <optional>
#include <string>

#include "engine/text/chat/budget.h"
#include "engine/text/chat/value.h"

namespace moeserve::chat {

// repr() of a double: the shortest digits that read back as the same number.
std::string FloatRepr(double value);

// The printed form of a value: str(), "" for an undefined one.
Text ToText(const Value& value, Budget& budget);
Text Repr(const Value& value, Budget& budget);

struct JsonFormat {
  std::optional<std::string> indent;  // one level's; absent: one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool ensure_ascii = false;
  bool sort_keys = false;
};
// json.dumps(). Strings of a client stay untrusted; their quotes are trusted.
Text ToJson(const Value& value, const JsonFormat& format, Budget& budget);

// format % values with the conversions s, r, d, i, f and %.
Value PercentFormat(const Text& format, const Value& values, Budget& budget);

}  // namespace moeserve::chat
