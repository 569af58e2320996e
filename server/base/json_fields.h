// Typed access to the fields of a JSON request. All functions treat a field with the value `null`
// as absent.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/text/token_id.h"
#include "server/base/json.h"

namespace moeserve::server {

// Returns a pointer to the value of a field; nullptr if the field is absent or JSON null.
const Json* FindField(const Json& object, const char* name);
// Returns a pointer to the text of a field; nullptr if `object` is no object or the field no
// string.
const std::string* FindText(const Json& object, const char* name);

// Each of these functions returns nullopt if the field is absent, and InvalidArgument, naming the
// field, if its value has another type or is outside [min, max]. `min_excluded` excludes `min`
// itself. IntField accepts a floating-point number without a fraction.
Result<std::optional<int64_t>> IntField(const Json& object, const char* name, int64_t min,
                                        int64_t max);
Result<std::optional<double>> NumberField(const Json& object, const char* name, double min,
                                          double max, bool min_excluded = false);
Result<std::optional<bool>> BoolField(const Json& object, const char* name);
Result<std::optional<std::string>> StringField(const Json& object, const char* name);

// Returns the integer value of a JSON number; nullopt if `value` has a fraction or is not a number.
std::optional<int64_t> AsInteger(const Json& value);

// Parses `text` and keeps the order of members, in time proportional to its length. A member that
// stands twice is there twice, so `text` should have been checked. Discarded if `text` is no JSON
// or nested deeper than `max_depth`.
// An integer that 64 bits cannot hold becomes a value of the type binary whose bytes are its
// digits.
OrderedJson ParseOrdered(std::string_view text, int max_depth = 256);
// Returns the value in one line of valid UTF-8, with the digits of such integers.
std::string DumpOrdered(const OrderedJson& value);
// Returns member `name` of `body`, which was parsed from `text`, with the order of `text`; null if
// it is absent. If `text` spells the name with escapes, the members are sorted.
OrderedJson OrderedMember(const Json& body, std::string_view text, const std::string& name);
// Appends a member to `object`, which must be an object without a member of that name. Assignments
// by operator[] search all members first.
void AppendMember(OrderedJson& object, std::string name, OrderedJson value);

// Reads a list of token ids in [0, vocab_size). `param` is the name of the list in error messages.
Result<std::vector<TokenId>> TokenIdList(const Json& list, const std::string& param,
                                         int vocab_size);

}  // namespace moeserve::server
