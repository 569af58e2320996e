// Decodes a JSON string byte by byte, to compare keys with the names of properties.
#pragma once

#include <cstdint>
#include <string>

namespace moeserve::structured {

// Accepts the spellings of Encoding::kJsonString. Plain data that is copied with the frame that
// contains it.
class StringDecoder {
 public:
  enum class Result : uint8_t {
    kError,      // no valid string continues with this byte
    kPartial,    // inside a character
    kCharacter,  // a character is complete and available from character()
  };

  // Reads one byte of the string's content. The caller handles the closing quote.
  Result Push(uint8_t byte);
  char32_t character() const { return value_; }
  bool at_boundary() const { return phase_ == Phase::kBoundary; }
  // Returns the bytes that complete the unfinished character as `c`; requires CanBecome(c). Empty
  // at a character boundary.
  std::string Ending(char32_t c) const;
  // Whether the unfinished character can become `c`.
  bool CanBecome(char32_t c) const;

  bool operator==(const StringDecoder&) const = default;

 private:
  enum class Phase : uint8_t { kBoundary, kUtf8, kBackslash, kHex, kLowBackslash, kLowU, kLowHex };

  Result HexDigit(uint8_t byte);

  Phase phase_ = Phase::kBoundary;
  uint8_t count_ = 0;   // kUtf8: bytes still to come; kHex, kLowHex: digits read
  uint8_t length_ = 0;  // kUtf8: number of bytes of the character
  uint16_t high_ = 0;   // the high surrogate of a pair
  char32_t value_ = 0;  // the bits of the character read so far
};

}  // namespace moeserve::structured
