// Finds the parts of a JSON text, for what parsing loses: the order of members and the digits of
// numbers. The texts must be valid JSON.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace moeserve::server {

// Returns the text of the value of member `name` of the object that `text` consists of; nullopt if
// there is none. Keys with escapes are not found.
std::optional<std::string_view> MemberText(std::string_view text, std::string_view name);

// Returns the texts of the elements of the list that `text` consists of; nothing if it is no list.
std::vector<std::string_view> ElementTexts(std::string_view text);

}  // namespace moeserve::server
