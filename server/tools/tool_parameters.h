// How models that write every parameter of a call as an element of its own write the values.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/json.h"
#include "server/tools/tool_definitions.h"

namespace moeserve::server {

// Which types of JSON the schema of a parameter allows, as far as it says so. A string is written
// without quotes and escapes, all other values are written as JSON.
class ParameterKind {
 public:
  enum Type : unsigned {
    kNull = 1,
    kBoolean = 2,
    kInteger = 4,
    kFraction = 8,  // a number that is no integer
    kString = 16,
    kArray = 32,
    kObject = 64,
    kAll = 127,
  };
  constexpr ParameterKind(unsigned types = kAll) : types_(types) {}  // NOLINT: a set of types

  constexpr bool only_string() const { return types_ == kString; }
  constexpr bool may_be_string() const { return (types_ & kString) != 0; }
  constexpr bool Allows(unsigned type) const { return (types_ & type) != 0; }
  constexpr ParameterKind operator|(ParameterKind other) const { return types_ | other.types_; }
  constexpr bool operator==(const ParameterKind&) const = default;

 private:
  unsigned types_;
};

// A tool whose calls are recognised in answers.
struct OfferedTool {
  std::string name;
  std::map<std::string, ParameterKind> parameters;  // of others, any type is allowed
};
using OfferedTools = std::vector<OfferedTool>;

// Returns the types that a schema allows. `root` is the schema that references point into.
ParameterKind KindOf(const OrderedJson& schema, const OrderedJson& root);

// Returns what an AnswerSplitter needs to know about tools.
std::shared_ptr<const OfferedTools> Offered(const std::vector<Tool>& tools);

// Returns the JSON value of a parameter that the model wrote as `text`: the text itself if it is a
// value of an allowed type other than a string, or if no string is allowed and it is JSON; else a
// string.
std::string ParameterJson(ParameterKind kind, std::string_view text);

// Returns `text` as a part of a JSON string, without quotes. Works for parts of characters, too.
std::string EscapedPart(std::string_view text);

}  // namespace moeserve::server
