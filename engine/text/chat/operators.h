// The operators of template expressions, with Python's semantics.
#pragma once

#include <string>
#include <vector>

#include "engine/text/chat/budget.h"
#include "engine/text/chat/value.h"

namespace moeserve::chat {

bool Truthy(const Value& value);
// Returns whether the value is a string, list or tuple.
bool IsSequence(const Value& value);

// Returns whether two values that can be dictionary keys are equal; always false for containers.
bool SimpleEqual(const Value& a, const Value& b);
bool Equal(const Value& a, const Value& b, Budget& budget);
// Returns whether a < b. Fails for values that Python cannot compare.
bool Less(const Value& a, const Value& b, Budget& budget);
// Returns the result of `item in container`.
bool Contains(const Value& container, const Value& item, Budget& budget);

enum class BinaryOp { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
Value Binary(BinaryOp op, const Value& a, const Value& b, Budget& budget);
Value Negate(const Value& value);

// FindBytes() returns the position of the first occurrence of `needle` at or after `from`,
// FindLastBytes() that of the last occurrence in the text; npos if there is none. Both take linear
// time, which is charged to the budget.
size_t FindBytes(std::string_view text, std::string_view needle, size_t from, Budget& budget);
size_t FindLastBytes(std::string_view text, std::string_view needle, Budget& budget);

// Returns the items that a `for` loop visits: elements of a list, keys of a dictionary, characters
// of a string. Fails for a value that is not iterable.
std::vector<Value> Iterate(const Value& value, Budget& budget);
int64_t Length(const Value& value, Budget& budget);

// Returns the element value[index], or Undefined if there is no such element. Ignores attributes.
Value Item(const Value& value, const Value& index, Budget& budget);
// Returns value[begin:end:step]; an omitted part is passed as None.
Value Slice(const Value& value, const Value& begin, const Value& end, const Value& step,
            Budget& budget);

Value MakeList(std::vector<Value> items, bool is_tuple, Budget& budget);

}  // namespace moeserve::chat
