// A branch: a set of plain conditions on a JSON value, all of which must hold.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/number_dfa.h"

namespace moeserve::structured {

// Schemas that must all hold; sorted, without duplicates. An empty list allows
// every value.
using Conjunction = std::vector<const nlohmann::json*>;

enum TypeBits : uint32_t {
  kNullType = 1,
  kBooleanType = 2,
  kIntegerType = 4,   // numbers with an integer value
  kFractionType = 8,  // all numbers that are no integers
  kStringType = 16,
  kArrayType = 32,
  kObjectType = 64,
  kNumberTypes = kIntegerType | kFractionType,
  kAllTypes = 127,
};

struct ArrayPart {
  std::vector<const nlohmann::json*> prefix;
  // Schema of the items after the prefix; null: any value is allowed.
  const nlohmann::json* items = nullptr;
};

struct ObjectPart {
  const nlohmann::json* properties = nullptr;  // maps names to schemas; null: names no properties
  // Further named properties, as in `properties`.
  std::vector<std::pair<std::string, const nlohmann::json*>> more;
  // Maps patterns to the schemas of the properties whose names they match;
  // null: no patterns.
  const nlohmann::json* patterns = nullptr;
  // Schema of the properties that are neither named nor matched by a pattern;
  // null: any value is allowed.
  const nlohmann::json* additional = nullptr;

  // Returns the schema of a named property; null: the part does not name it.
  const nlohmann::json* Named(const std::string& name) const;
};

// `min` to `max` items of an array must match `schema`.
struct ContainsPart {
  const nlohmann::json* schema = nullptr;
  int64_t min = 1;
  int64_t max = kNoLimit;
};

// Conditions that must all hold. Conditions on a type that is not in `types`
// have no effect.
struct Branch {
  uint32_t types = kAllTypes;
  // If set: the value must be one of these.
  std::optional<std::vector<const nlohmann::json*>> values;
  // If not empty: the value must not be one of these, which are numbers and
  // strings.
  std::vector<const nlohmann::json*> excluded;
  NumberRange number;               // NumberRange::integer is ignored; `types` decides
  std::set<Decimal> multiples;      // the number must be a multiple of each of these,
  std::set<Decimal> not_multiples;  // and of none of these
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
  std::set<std::string> patterns;      // each must match somewhere in the string
  std::set<std::string> not_patterns;  // none may match
  std::set<std::string> formats;
  int64_t min_items = 0;
  int64_t max_items = kNoLimit;
  bool unique_items = false;
  std::vector<ArrayPart> arrays;
  std::vector<ContainsPart> contains;
  int64_t min_properties = 0;
  int64_t max_properties = kNoLimit;
  std::set<std::string> required;
  std::vector<ObjectPart> objects;
  Conjunction names;  // schemas that all names of properties, as strings, must match

  Conjunction ItemAt(size_t i) const;
  // Returns the patterns of all parts.
  std::set<std::string> NamePatterns() const;
  // Returns the schemas of a property with this name, which matches exactly the
  // patterns `matched`.
  Conjunction PropertyNamed(const std::string& name, const std::set<std::string>& matched) const;
  // Returns the schemas of a property that no part names and that matches
  // exactly the patterns `matched`.
  Conjunction Unnamed(const std::set<std::string>& matched) const;
};

// Sorts, and removes duplicates and schemas that allow every value.
void Tidy(Conjunction* schemas);

using Branches = std::vector<Branch>;

// Limit on NumberRange::multiple_of of a branch. The least common multiple of several values of
// multipleOf can exceed it; then it is kMaxMultiple + 1.
inline constexpr int64_t kMaxMultiple = 1'000'000'000;

// Returns the branch whose values both `a` and `b` allow; nullopt if no type is
// left.
std::optional<Branch> Meet(const Branch& a, const Branch& b);

// Returns the tighter of two upper (or two lower) bounds; nullopt means no
// bound.
std::optional<NumberBound> Tighter(const std::optional<NumberBound>& a,
                                   const std::optional<NumberBound>& b, bool upper);

// Returns the exact value of a JSON number's shortest decimal spelling.
Decimal DecimalOf(const nlohmann::json& number);
// Returns the type bit of a value.
uint32_t TypeOf(const nlohmann::json& value);
// Returns whether JSON Schema calls the values equal: numbers by their exact values, objects
// without regard to the order of properties. The JSON library compares numbers of different C++
// types after a conversion.
bool SameValue(const nlohmann::json& a, const nlohmann::json& b);
int64_t CountCharacters(const std::string& text);

}  // namespace moeserve::structured
