// Operators of expressions, with Python's semantics.
#pragma once

#include <string>
#include <vector>

#include "engine/text/chat/budget.h"
#include "engine/text/chat/value.h"

namespace moeserve::chat {

bool Truthy(const Value& value);
// A string, list or tuple.
bool IsSequence(const Value& value);

// Equality of values that can be dictionary keys, except containers.
bool SimpleEqual(const Value& a, const Value& b);
bool Equal(const Value& a, const Value& b, Budget& budget);
// Fails for values that Python does not order.
bool Less(const Value& a, const Value& b, Budget& budget);
// `item in container`.
bool Contains(const Value& container, const Value& item, Budget& budget);

enum class BinaryOp { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
Value Binary(BinaryOp op, const Value& a, const Value& b, Budget& budget);
Value Negate(const Value& value);

// The first occurrence of `needle` at or after `from`, or the last in the text; npos if none. Takes
// linear time and charges for it.
size_t FindBytes(std::string_view text, std::string_view needle, size_t from, Budget& budget);
size_t FindLastBytes(std::string_view text, std::string_view needle, Budget& budget);

// The items of a `for`: elements, keys, characters. Fails for a value that is not iterable.
std::vector<Value> Iterate(const Value& value, Budget& budget);
int64_t Length(const Value& value);

// value[index]; Undefined if it is not there. No attributes.
Value Item(const Value& value, const Value& index, Budget& budget);
// value[begin:end:step]; absent parts are None.
Value Slice(const Value& value, const Value& begin, const Value& end, const Value& step,
            Budget& budget);

Value MakeList(std::vector<Value> items, bool is_tuple, Budget& budget);

}  // namespace moeserve::chat
