// A branch: plain conditions on a JSON value that all hold.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/number_dfa.h"

namespace moeserve::structured {

// Schemas that all hold. Sorted, each once. An empty one allows every value.
using Conjunction = std::vector<const nlohmann::json*>;

enum TypeBits : uint32_t {
  kNullType = 1,
  kBooleanType = 2,
  kIntegerType = 4,   // numbers with an integer value
  kFractionType = 8,  // all other numbers
  kStringType = 16,
  kArrayType = 32,
  kObjectType = 64,
  kNumberTypes = kIntegerType | kFractionType,
  kAllTypes = 127,
};

struct ArrayPart {
  std::vector<const nlohmann::json*> prefix;
  const nlohmann::json* items = nullptr;  // after the prefix; null: any
};

struct ObjectPart {
  const nlohmann::json* properties = nullptr;  // name to schema; null: none
  const nlohmann::json* additional = nullptr;  // of all other names; null: any
};

// Conditions that all hold. Conditions on a type that is not in `types` have no effect.
struct Branch {
  uint32_t types = kAllTypes;
  std::optional<std::vector<const nlohmann::json*>> values;  // one of these
  NumberRange number;                                        // `types` decides about `integer`
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
  std::set<std::string> patterns;  // each found anywhere in the string
  std::set<std::string> formats;
  int64_t min_items = 0;
  int64_t max_items = kNoLimit;
  bool unique_items = false;
  std::vector<ArrayPart> arrays;
  int64_t min_properties = 0;
  int64_t max_properties = kNoLimit;
  std::set<std::string> required;
  std::vector<ObjectPart> objects;

  Conjunction ItemAt(size_t i) const;
  Conjunction PropertyNamed(const std::string& name) const;
  Conjunction Additional() const;
};

using Branches = std::vector<Branch>;

// The values that both allow; nullopt if no type is left.
std::optional<Branch> Meet(const Branch& a, const Branch& b);

// The tighter one of two upper (or lower) bounds; nullopt is no bound.
std::optional<NumberBound> Tighter(const std::optional<NumberBound>& a,
                                   const std::optional<NumberBound>& b, bool upper);

// The exact value of a JSON number, by its shortest decimal spelling.
Decimal DecimalOf(const nlohmann::json& number);
// The type bit of a value.
uint32_t TypeOf(const nlohmann::json& value);
int64_t CountCharacters(const std::string& text);

}  // namespace moeserve::structured
