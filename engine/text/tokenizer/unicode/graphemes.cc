#include "engine/text/tokenizer/unicode/graphemes.h"

#include <cstdint>
#include <vector>

#include "engine/text/tokenizer/unicode/library_tables.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

constexpr char32_t kJoiner = 0x200D;

bool Within(char32_t c, char32_t first, char32_t last) { return c >= first && c <= last; }

// The class of each code point below U+20000 and of the range U+E0000 to U+E0FFF; higher ones have
// no other class than kOther.
class Classes {
 public:
  Classes() : classes_(kTable + kTags, GraphemeClass::kOther) {
    for (const GraphemeMembers& members : GraphemeClasses()) {
      for (const CodePointRange& range : members.ranges) {
        for (char32_t c = range.first; c <= range.last; ++c) {
          if (const size_t i = Index(c); i < classes_.size()) classes_[i] = members.value;
        }
      }
    }
  }
  GraphemeClass Of(char32_t c) const {
    const size_t index = Index(c);
    return index < classes_.size() ? classes_[index] : GraphemeClass::kOther;
  }

 private:
  static constexpr size_t kTable = 0x20000;
  static constexpr size_t kTags = 0x1000;
  static size_t Index(char32_t c) {
    if (c < kTable) return c;
    return Within(c, 0xE0000, 0xE0FFF) ? c - 0xE0000 + kTable : SIZE_MAX;
  }
  std::vector<GraphemeClass> classes_;
};

// Parts of Hangul syllables; a syllable ends with its vowel (LV) or with a trailing consonant
// (LVT).
enum class Hangul { kNone, kLead, kVowel, kTrail, kLv, kLvt };

Hangul HangulOf(char32_t c) {
  if (c < 0x1100) return Hangul::kNone;
  if (c <= 0x115F || Within(c, 0xA960, 0xA97C)) return Hangul::kLead;
  if (c <= 0x11A7 || Within(c, 0xD7B0, 0xD7C6)) return Hangul::kVowel;
  if (c <= 0x11FF || Within(c, 0xD7CB, 0xD7FB)) return Hangul::kTrail;
  if (Within(c, 0xAC00, 0xD7A3)) return (c - 0xAC00) % 28 == 0 ? Hangul::kLv : Hangul::kLvt;
  return Hangul::kNone;
}

bool HangulContinues(Hangul before, Hangul after) {
  switch (before) {
    case Hangul::kLead:
      return after != Hangul::kNone && after != Hangul::kTrail;
    case Hangul::kVowel:
    case Hangul::kLv:
      return after == Hangul::kVowel || after == Hangul::kTrail;
    case Hangul::kTrail:
    case Hangul::kLvt:
      return after == Hangul::kTrail;
    case Hangul::kNone:
      return false;
  }
  return false;
}

// What the rules need to know about the cluster so far.
class Cluster {
 public:
  // Returns whether the cluster goes on with `c`, and if so, adds it. The first character always
  // starts the cluster.
  bool Add(char32_t c) {
    static const Classes classes;
    const GraphemeClass kind = classes.Of(c);
    const Hangul hangul = HangulOf(c);
    const bool regional = Within(c, 0x1F1E6, 0x1F1FF);
    const bool control = kind == GraphemeClass::kControl || c == '\r' || c == '\n';
    if (size_ > 0 && !Joins(c, kind, hangul, regional, control)) return false;
    Update(c, kind, regional);
    hangul_ = hangul;
    control_ = control;
    before_ = c;
    before_kind_ = kind;
    ++size_;
    return true;
  }

 private:
  static bool IsExtend(GraphemeClass kind) {
    return kind == GraphemeClass::kExtend || kind == GraphemeClass::kExtendNoConjunct ||
           kind == GraphemeClass::kLinker;
  }

  bool Joins(char32_t c, GraphemeClass kind, Hangul hangul, bool regional, bool control) const {
    if (before_ == '\r' && c == '\n') return true;
    if (control_ || control) return false;
    if (HangulContinues(hangul_, hangul)) return true;
    if (IsExtend(kind) || c == kJoiner || kind == GraphemeClass::kSpacingMark) return true;
    if (before_kind_ == GraphemeClass::kPrepend) return true;
    if (kind == GraphemeClass::kConsonant) return conjunct_ && linked_;
    if (kind == GraphemeClass::kPictographic) return before_ == kJoiner && joins_pictograph_;
    return regional && regional_count_ % 2 == 1;
  }

  void Update(char32_t c, GraphemeClass kind, bool regional) {
    // A pictograph, characters that extend it, and a joiner.
    if (c == kJoiner) {
      joins_pictograph_ = pictograph_;
    } else {
      joins_pictograph_ = false;
    }
    pictograph_ = kind == GraphemeClass::kPictographic || (pictograph_ && IsExtend(kind));
    // A consonant, followed by linkers and characters that extend it.
    if (kind == GraphemeClass::kConsonant) {
      conjunct_ = true;
      linked_ = false;
    } else if (kind == GraphemeClass::kLinker) {
      linked_ = conjunct_;
    } else if (kind != GraphemeClass::kExtend && c != kJoiner) {
      conjunct_ = linked_ = false;
    }
    regional_count_ = regional ? regional_count_ + 1 : 0;
  }

  size_t size_ = 0;
  char32_t before_ = 0;
  GraphemeClass before_kind_ = GraphemeClass::kOther;
  Hangul hangul_ = Hangul::kNone;
  bool control_ = false;
  bool pictograph_ = false;
  bool joins_pictograph_ = false;
  bool conjunct_ = false;
  bool linked_ = false;
  int regional_count_ = 0;
};

}  // namespace

size_t GraphemeEnd(std::string_view text, size_t begin) {
  // Nearly all clusters of ASCII have one character.
  const auto ascii = [&](size_t at) {
    return at >= text.size() || (static_cast<uint8_t>(text[at]) < 0x80 && text[at] != '\n');
  };
  if (ascii(begin) && ascii(begin + 1)) return begin + 1;
  Cluster cluster;
  size_t end = begin;
  while (end < text.size()) {
    size_t next = end;
    if (!cluster.Add(NextCodePoint(text, &next))) break;
    end = next;
  }
  return end;
}

}  // namespace moeserve
