// The byte-level alphabet of GPT-2: every byte has a printable character that stands for it in
// vocabulary files (0x20 is "Ġ", 'a' is "a").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moeserve {

// The character, in UTF-8, that stands for `byte`. The view is always valid.
std::string_view ByteLevelChar(uint8_t byte);

// Appends the bytes that `token`, valid UTF-8, stands for. False, with `bytes` unchanged, if
// `token` has a character outside the alphabet.
bool AppendByteLevelBytes(std::string_view token, std::string* bytes);

}  // namespace moeserve
