// The built-in filters, tests and methods of templates.
#pragma once

#include <string>
#include <string_view>

#include "engine/text/chat/budget.h"
#include "engine/text/chat/value.h"

namespace moeserve::chat {

// All functions in this file throw TemplateError for an unknown name, for wrong arguments, and
// wherever Python raises an exception.
Value ApplyFilter(const std::string& name, const Value& value, const Arguments& args,
                  Budget& budget);
bool ApplyTest(const std::string& name, const Value& value, const Arguments& args, Budget& budget);

// Returns whether values of `self`'s type have a method of this name.
bool HasMethod(const Value& self, std::string_view name);
Value CallMethod(const Value& self, const std::string& name, const Arguments& args, Budget& budget);

// Returns what value.name means in a template: the method of this name, or else the element;
// Undefined if there is neither.
Value Attribute(const Value& value, const std::string& name, Budget& budget);
// Returns value[index]: the element, or else the method of this name.
Value Subscript(const Value& value, const Value& index, Budget& budget);

// Splits as Python's str.split() does, at `separator`, or at white space if `separator` is null.
std::vector<Value> SplitText(const Text& text, const Text* separator, int64_t max_splits,
                             bool from_right, Budget& budget);
std::vector<Text> SplitLines(const Text& text, bool keep_ends, Budget& budget);
Text ReplaceText(const Text& text, const Text& from, const Text& to, int64_t count, Budget& budget);
Text JoinTexts(const Text& separator, const std::vector<Value>& items, bool only_strings,
               Budget& budget);

}  // namespace moeserve::chat
