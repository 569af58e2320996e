// The byte-level alphabet of GPT-2: vocabulary files spell every byte as a printable character
// (0x20 is "Ġ", 'a' is "a").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moeserve {

// Returns the character, in UTF-8, that spells `byte`. The view is valid for ever.
std::string_view ByteLevelChar(uint8_t byte);

// Appends the bytes that `token`, which must be valid UTF-8, spells. Returns false, with `bytes`
// unchanged, if `token` has a character outside the alphabet.
bool AppendByteLevelBytes(std::string_view token, std::string* bytes);

}  // namespace moeserve
