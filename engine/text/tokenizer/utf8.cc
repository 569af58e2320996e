#include "engine/text/tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

namespace moeserve {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// Returns the length of a character that starts with `lead`; 0 if no character starts with it.
int SequenceSize(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  if (lead >= 0xF0 && lead <= 0xF4) return 4;
  return 0;
}

// Returns whether `byte` may be at `position` of a character. The range of the second byte depends
// on the first one, which excludes overlong forms, surrogates and values above U+10FFFF. All later
// bytes have the range 80 to BF.
bool ContinuesAt(uint8_t lead, int position, uint8_t byte) {
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  if (position == 1) {
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  }
  return byte >= low && byte <= high;
}

// Returns the number of leading bytes below 0x80.
size_t AsciiPrefix(std::string_view text) {
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + i, 8);
    if (word & 0x8080808080808080u) break;
  }
  while (i < text.size() && static_cast<uint8_t>(text[i]) < 0x80) ++i;
  return i;
}

}  // namespace

bool IsValidUtf8(std::string_view text) {
  size_t i = 0;
  while (true) {
    i += AsciiPrefix(text.substr(i));
    if (i == text.size()) return true;
    const uint8_t lead = static_cast<uint8_t>(text[i]);
    const int size = SequenceSize(lead);
    if (size == 0 || text.size() - i < static_cast<size_t>(size)) return false;
    for (int k = 1; k < size; ++k) {
      if (!ContinuesAt(lead, k, static_cast<uint8_t>(text[i + k]))) return false;
    }
    i += size;
  }
}

char32_t NextCodePoint(std::string_view text, size_t* pos) {
  const uint8_t lead = static_cast<uint8_t>(text[*pos]);
  const int size = SequenceSize(lead);
  char32_t value = size == 1 ? lead : lead & (0xFF >> (size + 1));
  for (int k = 1; k < size; ++k) {
    value = value << 6 | (static_cast<uint8_t>(text[*pos + k]) & 0x3F);
  }
  *pos += size;
  return value;
}

void AppendUtf8(char32_t code_point, std::string* out) {
  const auto trail = [&](int shift) {
    out->push_back(static_cast<char>(0x80 | ((code_point >> shift) & 0x3F)));
  };
  if (code_point < 0x80) {
    out->push_back(static_cast<char>(code_point));
  } else if (code_point < 0x800) {
    out->push_back(static_cast<char>(0xC0 | code_point >> 6));
    trail(0);
  } else if (code_point < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | code_point >> 12));
    trail(6);
    trail(0);
  } else {
    out->push_back(static_cast<char>(0xF0 | code_point >> 18));
    trail(12);
    trail(6);
    trail(0);
  }
}

void Utf8Assembler::Push(std::string_view bytes, std::string* out) {
  size_t i = 0;
  while (i < bytes.size()) {
    const uint8_t byte = static_cast<uint8_t>(bytes[i]);
    if (pending_size_ > 0) {
      if (!ContinuesAt(static_cast<uint8_t>(pending_[0]), pending_size_, byte)) {
        out->append(kReplacement);
        pending_size_ = 0;
        continue;
      }
      pending_[pending_size_++] = bytes[i++];
      if (pending_size_ == expected_size_) {
        out->append(pending_, pending_size_);
        pending_size_ = 0;
      }
      continue;
    }
    if (byte < 0x80) {
      const size_t run = AsciiPrefix(bytes.substr(i));
      out->append(bytes.substr(i, run));
      i += run;
      continue;
    }
    expected_size_ = SequenceSize(byte);
    if (expected_size_ == 0) {
      out->append(kReplacement);
    } else {
      pending_[pending_size_++] = bytes[i];
    }
    ++i;
  }
}

void Utf8Assembler::Finish(std::string* out) {
  if (pending_size_ > 0) out->append(kReplacement);
  pending_size_ = 0;
}

}  // namespace moeserve
