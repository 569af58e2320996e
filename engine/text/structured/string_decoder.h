// Decodes a JSON string byte by byte, for the names of properties.
#pragma once

#include <cstdint>
#include <string>

namespace moeserve::structured {

// The spellings of Encoding::kJsonString. Plain data: copied with the state it is part of.
class StringDecoder {
 public:
  enum class Result : uint8_t {
    kError,      // no string continues with this byte
    kPartial,    // inside a character
    kCharacter,  // a character is complete, see character()
  };

  // Takes a byte of the content. The caller handles the closing quote.
  Result Push(uint8_t byte);
  char32_t character() const { return value_; }
  bool at_boundary() const { return phase_ == Phase::kBoundary; }
  // The bytes that complete the unfinished character as `c`, for which CanBecome() is true; none at
  // a boundary.
  std::string Ending(char32_t c) const;
  // Whether the unfinished character can become `c`.
  bool CanBecome(char32_t c) const;

  bool operator==(const StringDecoder&) const = default;

 private:
  enum class Phase : uint8_t { kBoundary, kUtf8, kBackslash, kHex, kLowBackslash, kLowU, kLowHex };

  Result HexDigit(uint8_t byte);

  Phase phase_ = Phase::kBoundary;
  uint8_t count_ = 0;   // kUtf8: bytes left; kHex, kLowHex: digits read
  uint8_t length_ = 0;  // kUtf8: bytes of the character
  uint16_t high_ = 0;   // the first surrogate of a pair
  char32_t value_ = 0;  // the bits so far
};

}  // namespace moeserve::structured
