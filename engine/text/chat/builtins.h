// Filters, tests and methods.
#pragma once

#include <string>
#include <string_view>

#include "engine/text/chat/budget.h"
#include "engine/text/chat/value.h"

namespace moeserve::chat {

// These throw TemplateError for an unknown name, wrong arguments, and where Python raises.
Value ApplyFilter(const std::string& name, const Value& value, const Arguments& args,
                  Budget& budget);
bool ApplyTest(const std::string& name, const Value& value, const Arguments& args, Budget& budget);

// Whether values of this type have such a method.
bool HasMethod(const Value& self, std::string_view name);
Value CallMethod(const Value& self, const std::string& name, const Arguments& args, Budget& budget);

// value.name as templates write it: a method, else an element; Undefined if there is neither.
Value Attribute(const Value& value, const std::string& name, Budget& budget);
// value[index]: an element, else a method.
Value Subscript(const Value& value, const Value& index, Budget& budget);

// str.split() for a separator, or for white space if it is null.
std::vector<Value> SplitText(const Text& text, const Text* separator, int64_t max_splits,
                             bool from_right, Budget& budget);
std::vector<Text> SplitLines(const Text& text, bool keep_ends, Budget& budget);
Text ReplaceText(const Text& text, const Text& from, const Text& to, int64_t count, Budget& budget);
Text JoinTexts(const Text& separator, const std::vector<Value>& items, bool only_strings,
               Budget& budget);

}  // namespace moeserve::chat
