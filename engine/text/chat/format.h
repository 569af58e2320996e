// Converts values to text as Python's str(), repr() and json.dumps() do.
#pragma once

#include <optional>
#include <string>

#include "engine/text/chat/budget.h"
#include "engine/text/chat/value.h"

namespace moeserve::chat {

// Returns Python's repr() of a double: the shortest digits that read back as the same number.
std::string FloatRepr(double value);

// Returns Python's str() of a value; "" for an undefined value.
Text ToText(const Value& value, Budget& budget);
Text Repr(const Value& value, Budget& budget);

struct JsonFormat {
  std::optional<std::string> indent;  // indentation of one level; nullopt: all on one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool ensure_ascii = false;
  bool sort_keys = false;
};
// Returns Python's json.dumps() of a value. Strings from a client stay untrusted; the quotes around
// them are trusted.
Text ToJson(const Value& value, const JsonFormat& format, Budget& budget);

// Returns Python's `format % values` with the conversions s, r, d, i, f and %.
Value PercentFormat(const Text& format, const Value& values, Budget& budget);

}  // namespace moeserve::chat
