#include "engine/text/structured/string_decoder.h"

#include <algorithm>

#include "engine/text/structured/automata/char_set.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

struct Interval {
  uint32_t first;
  uint32_t last;
};

// Returns the interval of values that `bits` can become when `more` digits of `width` bits each are
// appended.
Interval Completions(uint32_t bits, int more, int width) {
  const int shift = more * width;
  return {bits << shift, (bits << shift) | ((1u << shift) - 1)};
}

// Returns whether a character may be spelt by \u and some code unit in the interval. A low
// surrogate cannot be the first code unit of a character.
bool AnyEscapable(Interval units) {
  for (uint32_t u = units.first; u <= units.last && u < 0x7F; ++u) {
    if (MayBeHexEscaped(u)) return true;
  }
  const uint32_t first = std::max(units.first, 0x7Fu);
  if (first > units.last) return false;
  return first < 0xDC00 || units.last > 0xDFFF;
}

constexpr int kHexDigits = 4;

std::string HexDigits(uint32_t code_unit) {
  std::string out;
  for (int shift = 12; shift >= 0; shift -= 4) out += "0123456789abcdef"[(code_unit >> shift) & 15];
  return out;
}

}  // namespace

StringDecoder::Result StringDecoder::Push(uint8_t byte) {
  switch (phase_) {
    case Phase::kBoundary:
      if (byte < 0x20 || byte == '"') return Result::kError;
      if (byte == '\\') {
        phase_ = Phase::kBackslash;
        return Result::kPartial;
      }
      if (byte < 0x80) {
        value_ = byte;
        return Result::kCharacter;
      }
      if (byte < 0xC2 || byte > 0xF4) return Result::kError;
      length_ = byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
      count_ = length_ - 1;
      value_ = byte & (0x7F >> length_);
      phase_ = Phase::kUtf8;
      return Result::kPartial;
    case Phase::kUtf8: {
      if ((byte & 0xC0) != 0x80) return Result::kError;
      value_ = (value_ << 6) | (byte & 0x3F);
      --count_;
      // From the second byte on, the possible values reveal overlong forms, surrogates and values
      // above U+10FFFF.
      const Interval c = Completions(value_, count_, 6);
      const uint32_t least = length_ == 2 ? 0x80 : length_ == 3 ? 0x800 : 0x10000;
      if (c.last < least || c.first > 0x10FFFF || (c.first >= 0xD800 && c.last <= 0xDFFF)) {
        return Result::kError;
      }
      if (count_ > 0) return Result::kPartial;
      phase_ = Phase::kBoundary;
      return Result::kCharacter;
    }
    case Phase::kBackslash:
      if (byte == 'u') {
        phase_ = Phase::kHex;
        count_ = 0;
        value_ = 0;
        return Result::kPartial;
      }
      for (const char32_t c : {U'"', U'\\', U'\b', U'\f', U'\n', U'\r', U'\t'}) {
        if (static_cast<uint8_t>(ShortEscape(c)) != byte) continue;
        value_ = c;
        phase_ = Phase::kBoundary;
        return Result::kCharacter;
      }
      return Result::kError;
    case Phase::kHex:
    case Phase::kLowHex:
      return HexDigit(byte);
    case Phase::kLowBackslash:
      if (byte != '\\') return Result::kError;
      phase_ = Phase::kLowU;
      return Result::kPartial;
    case Phase::kLowU:
      if (byte != 'u') return Result::kError;
      phase_ = Phase::kLowHex;
      count_ = 0;
      value_ = 0;
      return Result::kPartial;
  }
  return Result::kError;
}

StringDecoder::Result StringDecoder::HexDigit(uint8_t byte) {
  uint32_t digit;
  if (byte >= '0' && byte <= '9') {
    digit = byte - '0';
  } else if (byte >= 'a' && byte <= 'f') {
    digit = byte - 'a' + 10u;
  } else {
    return Result::kError;
  }
  value_ = value_ * 16 + digit;
  ++count_;
  const Interval units = Completions(value_, kHexDigits - count_, 4);
  if (phase_ == Phase::kLowHex) {
    if (units.last < 0xDC00 || units.first > 0xDFFF) return Result::kError;
    if (count_ < kHexDigits) return Result::kPartial;
    value_ = 0x10000 + ((static_cast<char32_t>(high_) - 0xD800) << 10) + (value_ - 0xDC00);
    high_ = 0;
    phase_ = Phase::kBoundary;
    return Result::kCharacter;
  }
  if (!AnyEscapable(units)) return Result::kError;
  if (count_ < kHexDigits) return Result::kPartial;
  if (value_ >= 0xD800 && value_ <= 0xDBFF) {
    high_ = static_cast<uint16_t>(value_);
    phase_ = Phase::kLowBackslash;
    return Result::kPartial;
  }
  phase_ = Phase::kBoundary;
  return Result::kCharacter;
}

std::string StringDecoder::Ending(char32_t c) const {
  const uint32_t high = c > 0xFFFF ? 0xD800 + ((c - 0x10000) >> 10) : c;
  const std::string low = c > 0xFFFF ? HexDigits(0xDC00 + ((c - 0x10000) & 0x3FF)) : "";
  const std::string second = low.empty() ? "" : "\\u" + low;
  switch (phase_) {
    case Phase::kBoundary:
      return "";
    case Phase::kUtf8: {
      std::string utf8;
      AppendUtf8(c, &utf8);
      return utf8.substr(length_ - count_);
    }
    case Phase::kBackslash:
      if (ShortEscape(c) != 0) return std::string(1, ShortEscape(c));
      return "u" + HexDigits(high) + second;
    case Phase::kHex:
      return HexDigits(high).substr(count_) + second;
    case Phase::kLowBackslash:
      return second;
    case Phase::kLowU:
      return second.substr(1);
    case Phase::kLowHex:
      return low.substr(count_);
  }
  return "";
}

bool StringDecoder::CanBecome(char32_t c) const {
  const auto within = [](Interval interval, uint32_t x) {
    return interval.first <= x && x <= interval.last;
  };
  switch (phase_) {
    case Phase::kBoundary:
      return true;
    case Phase::kUtf8: {
      const int bytes = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
      return bytes == length_ && within(Completions(value_, count_, 6), c);
    }
    case Phase::kBackslash:
      return ShortEscape(c) != 0 || c > 0xFFFF || MayBeHexEscaped(c);
    case Phase::kHex: {
      if (c <= 0xFFFF && !MayBeHexEscaped(c)) return false;
      const uint32_t unit = c > 0xFFFF ? 0xD800 + ((c - 0x10000) >> 10) : c;
      return within(Completions(value_, kHexDigits - count_, 4), unit);
    }
    case Phase::kLowBackslash:
    case Phase::kLowU:
    case Phase::kLowHex: {
      if (c <= 0xFFFF || 0xD800 + ((c - 0x10000) >> 10) != high_) return false;
      if (phase_ != Phase::kLowHex) return true;
      return within(Completions(value_, kHexDigits - count_, 4), 0xDC00 + ((c - 0x10000) & 0x3FF));
    }
  }
  return false;
}

}  // namespace moeserve::structured
