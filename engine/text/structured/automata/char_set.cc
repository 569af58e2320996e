#include "engine/text/structured/automata/char_set.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace moeserve::structured {
namespace {

constexpr char32_t kMaxCodePoint = 0x10FFFF;

struct ByteRange {
  uint8_t first;
  uint8_t last;
};
// The bytes that are possible at one position of a byte sequence.
using Place = std::vector<ByteRange>;
using Chain = std::vector<Place>;

void AddChain(const Chain& chain, CharAutomaton* out) {
  int32_t state = 0;
  for (size_t i = 0; i < chain.size(); ++i) {
    int32_t target = CharAutomaton::kDone;
    if (i + 1 < chain.size()) {
      target = static_cast<int32_t>(out->states.size());
      out->states.emplace_back();
    }
    for (const ByteRange& range : chain[i]) {
      out->states[state].push_back({range.first, range.last, target});
    }
    state = target;
  }
}

// Splits [lo, hi], an interval of numbers with `digits` digits in base 2^bits, into products of
// digit ranges.
void SplitDigits(uint32_t lo, uint32_t hi, int digits, int bits,
                 std::vector<std::vector<std::pair<uint32_t, uint32_t>>>* out) {
  if (digits == 1) {
    out->push_back({{lo, hi}});
    return;
  }
  const int shift = bits * (digits - 1);
  const uint32_t mask = (1u << shift) - 1;
  const auto prefixed = [&](uint32_t first, uint32_t last, uint32_t sub_lo, uint32_t sub_hi) {
    std::vector<std::vector<std::pair<uint32_t, uint32_t>>> rest;
    SplitDigits(sub_lo, sub_hi, digits - 1, bits, &rest);
    for (auto& sequence : rest) {
      sequence.insert(sequence.begin(), {first, last});
      out->push_back(std::move(sequence));
    }
  };
  uint32_t top_lo = lo >> shift;
  uint32_t top_hi = hi >> shift;
  if (top_lo == top_hi) return prefixed(top_lo, top_hi, lo & mask, hi & mask);
  if ((lo & mask) != 0) prefixed(top_lo, top_lo, lo & mask, mask), ++top_lo;
  const bool partial = (hi & mask) != mask;
  if (partial) --top_hi;
  if (top_lo <= top_hi) prefixed(top_lo, top_hi, 0, mask);
  if (partial) prefixed(top_hi + 1, top_hi + 1, 0, hi & mask);
}

void AddUtf8(char32_t lo, char32_t hi, CharAutomaton* out) {
  struct Length {
    char32_t first, last;
    int bytes;
    uint8_t lead;
  };
  constexpr std::array<Length, 4> kLengths = {{{0, 0x7F, 1, 0},
                                               {0x80, 0x7FF, 2, 0xC0},
                                               {0x800, 0xFFFF, 3, 0xE0},
                                               {0x10000, kMaxCodePoint, 4, 0xF0}}};
  for (const Length& length : kLengths) {
    const char32_t first = std::max(lo, length.first);
    const char32_t last = std::min(hi, length.last);
    if (first > last) continue;
    if (length.bytes == 1) {
      AddChain({{{static_cast<uint8_t>(first), static_cast<uint8_t>(last)}}}, out);
      continue;
    }
    std::vector<std::vector<std::pair<uint32_t, uint32_t>>> sequences;
    SplitDigits(first, last, length.bytes, 6, &sequences);
    for (const auto& sequence : sequences) {
      Chain chain;
      for (size_t i = 0; i < sequence.size(); ++i) {
        const uint8_t base = i == 0 ? length.lead : 0x80;
        chain.push_back({{static_cast<uint8_t>(base | sequence[i].first),
                          static_cast<uint8_t>(base | sequence[i].second)}});
      }
      AddChain(chain, out);
    }
  }
}

Place HexDigits(uint32_t lo, uint32_t hi) {
  Place place;
  if (lo <= 9) {
    place.push_back({static_cast<uint8_t>('0' + lo), static_cast<uint8_t>('0' + std::min(hi, 9u))});
  }
  if (hi >= 10) {
    place.push_back(
        {static_cast<uint8_t>('a' + std::max(lo, 10u) - 10), static_cast<uint8_t>('a' + hi - 10)});
  }
  return place;
}

// Returns the byte sequences \uxxxx for the code units [lo, hi].
std::vector<Chain> HexEscapes(uint32_t lo, uint32_t hi) {
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> sequences;
  SplitDigits(lo, hi, 4, 4, &sequences);
  std::vector<Chain> chains;
  for (const auto& sequence : sequences) {
    Chain chain = {{{'\\', '\\'}}, {{'u', 'u'}}};
    for (const auto& [first, last] : sequence) chain.push_back(HexDigits(first, last));
    chains.push_back(std::move(chain));
  }
  return chains;
}

void AddSurrogatePairs(char32_t lo, char32_t hi, CharAutomaton* out) {
  const uint32_t from = lo - 0x10000;
  const uint32_t to = hi - 0x10000;
  const auto add = [&](uint32_t high_first, uint32_t high_last, uint32_t low_first,
                       uint32_t low_last) {
    const std::vector<Chain> lows = HexEscapes(0xDC00 + low_first, 0xDC00 + low_last);
    for (const Chain& high : HexEscapes(0xD800 + high_first, 0xD800 + high_last)) {
      for (const Chain& low : lows) {
        Chain chain = high;
        chain.insert(chain.end(), low.begin(), low.end());
        AddChain(chain, out);
      }
    }
  };
  uint32_t high_lo = from >> 10;
  uint32_t high_hi = to >> 10;
  if (high_lo == high_hi) return add(high_lo, high_hi, from & 0x3FF, to & 0x3FF);
  add(high_lo, high_lo, from & 0x3FF, 0x3FF);
  if (high_hi - high_lo > 1) add(high_lo + 1, high_hi - 1, 0, 0x3FF);
  add(high_hi, high_hi, 0, to & 0x3FF);
}

// Calls add(first, last) for the parts of [lo, hi] that JSON strings may contain unescaped.
template <typename Add>
void ForRawParts(char32_t lo, char32_t hi, const Add& add) {
  constexpr CodePointRange kRaw[] = {{0x20, 0x21}, {0x23, 0x5B}, {0x5D, kMaxCodePoint}};
  for (const CodePointRange& raw : kRaw) {
    const char32_t first = std::max(lo, raw.first);
    const char32_t last = std::min(hi, raw.last);
    if (first <= last) add(first, last);
  }
}

}  // namespace

CharSet AllCharacters() { return {{0, 0xD7FF}, {0xE000, kMaxCodePoint}}; }

CharSet Normalized(CharSet set) {
  std::sort(set.begin(), set.end());
  CharSet joined;
  for (const CodePointRange& range : set) {
    if (!joined.empty() && range.first <= joined.back().last + 1) {
      joined.back().last = std::max(joined.back().last, range.last);
    } else {
      joined.push_back(range);
    }
  }
  CharSet out;
  for (const CodePointRange& range : joined) {
    for (const CodePointRange& valid : AllCharacters()) {
      const char32_t first = std::max(range.first, valid.first);
      const char32_t last = std::min(range.last, valid.last);
      if (first <= last) out.push_back({first, last});
    }
  }
  return out;
}

CharSet Complement(const CharSet& set) {
  CharSet out;
  char32_t next = 0;
  for (const CodePointRange& range : set) {
    if (range.first > next) out.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kMaxCodePoint) out.push_back({next, kMaxCodePoint});
  return Normalized(std::move(out));
}

CharSet WithBothCases(const CharSet& set) {
  CharSet out = set;
  for (const CodePointRange& range : set) {
    for (const auto& [a, z, shift] : {std::array<int, 3>{'a', 'z', -32}, {'A', 'Z', 32}}) {
      const int first = std::max(static_cast<int>(range.first), a);
      const int last = std::min(static_cast<int>(range.last), z);
      if (first <= last) {
        out.push_back({static_cast<char32_t>(first + shift), static_cast<char32_t>(last + shift)});
      }
    }
  }
  return Normalized(std::move(out));
}

char ShortEscape(char32_t c) {
  switch (c) {
    case '"':
      return '"';
    case '\\':
      return '\\';
    case '\b':
      return 'b';
    case '\f':
      return 'f';
    case '\n':
      return 'n';
    case '\r':
      return 'r';
    case '\t':
      return 't';
    default:
      return 0;
  }
}

bool MayBeHexEscaped(uint32_t code_unit) {
  if (code_unit < 0x20) return ShortEscape(code_unit) == 0;
  return code_unit >= 0x7F && code_unit <= 0xFFFF;
}

CharAutomaton BuildCharAutomaton(const CharSet& set, Encoding encoding) {
  CharAutomaton out;
  out.states.emplace_back();
  for (const CodePointRange& range : set) {
    if (encoding == Encoding::kUtf8) {
      AddUtf8(range.first, range.last, &out);
      continue;
    }
    ForRawParts(range.first, range.last,
                [&](char32_t first, char32_t last) { AddUtf8(first, last, &out); });
    // Adds the escaped spellings of the characters below DEL one by one.
    for (char32_t c = range.first; c <= range.last && c < 0x7F; ++c) {
      if (const char escape = ShortEscape(c); escape != 0) {
        const uint8_t e = static_cast<uint8_t>(escape);
        AddChain({{{'\\', '\\'}}, {{e, e}}}, &out);
      } else if (MayBeHexEscaped(c)) {
        for (const Chain& chain : HexEscapes(c, c)) AddChain(chain, &out);
      }
    }
    const char32_t first = std::max<char32_t>(range.first, 0x7F);
    if (first <= std::min<char32_t>(range.last, 0xFFFF)) {
      for (const Chain& chain : HexEscapes(first, std::min<char32_t>(range.last, 0xFFFF))) {
        AddChain(chain, &out);
      }
    }
    if (range.last >= 0x10000) {
      AddSurrogatePairs(std::max<char32_t>(range.first, 0x10000), range.last, &out);
    }
  }
  return out;
}

}  // namespace moeserve::structured
