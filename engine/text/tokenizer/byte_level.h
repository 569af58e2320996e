// The byte-level alphabet of GPT-2: every byte has a printable character that stands for it in
// vocabulary files (0x20 is "Ġ", 'a' is "a").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moeserve {

// The character, in UTF-8, that stands for `byte`. Lives for ever.
std::string_view ByteLevelChar(uint8_t byte);

// Appends to `bytes` what `token` stands for and returns true, or leaves `bytes` as it was and
// returns false when `token` has a character outside the alphabet. `token` must be valid UTF-8.
bool AppendByteLevelBytes(std::string_view token, std::string* bytes);

}  // namespace moeserve
