#include "engine/text/tokenizer/normalizers/unicode_form.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/text/tokenizer/unicode/code_point_set.h"
#include "engine/text/tokenizer/unicode/library_tables.h"
#include "engine/text/tokenizer/unicode/unicode_tables.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// Hangul syllables are composed and decomposed by arithmetic (Unicode standard, section 3.12).
constexpr char32_t kSyllableBase = 0xAC00;
constexpr char32_t kLeadBase = 0x1100;
constexpr char32_t kVowelBase = 0x1161;
constexpr char32_t kTrailBase = 0x11A7;  // one before the first trailing consonant
constexpr char32_t kLeads = 19;
constexpr char32_t kVowels = 21;
constexpr char32_t kTrails = 28;  // includes "no trailing consonant"
constexpr char32_t kSyllables = kLeads * kVowels * kTrails;

// Characters below this one neither decompose nor combine with others.
constexpr char32_t kFirstInteresting = 0x300;
// The first character with a compatibility decomposition.
constexpr char32_t kFirstCompatible = 0xA0;

// A character of a normal form.
struct FormCharacter {
  char32_t code;
  // How many characters it stands for, less one: 0 for one, -1 for a part of the character before.
  int extra;
};
using FormText = std::vector<FormCharacter>;

class NormalizationData {
 public:
  static const NormalizationData& Get() {
    static const NormalizationData data;
    return data;
  }

  uint8_t CombiningClass(char32_t c) const {
    if (c < kFirstInteresting) return 0;
    const auto it = classes_.find(c);
    return it == classes_.end() ? 0 : it->second;
  }

  // Appends the full decomposition of `c`, canonical or of compatibility.
  void Append(char32_t c, bool compatible, FormText* out) const {
    if (c < kFirstCompatible) return out->push_back({c, 0});
    std::u32string parts;
    Decompose(c, compatible, &parts);
    for (size_t i = 0; i < parts.size(); ++i) out->push_back({parts[i], i == 0 ? 0 : -1});
  }

  // Returns the composition of two characters; 0 if there is none.
  char32_t Compose(char32_t a, char32_t b) const {
    if (a >= kLeadBase && a < kLeadBase + kLeads && b >= kVowelBase && b < kVowelBase + kVowels) {
      return kSyllableBase + ((a - kLeadBase) * kVowels + (b - kVowelBase)) * kTrails;
    }
    if (a >= kSyllableBase && a < kSyllableBase + kSyllables &&
        (a - kSyllableBase) % kTrails == 0 && b > kTrailBase && b < kTrailBase + kTrails) {
      return a + (b - kTrailBase);
    }
    const auto it = compositions_.find(static_cast<uint64_t>(a) << 32 | b);
    return it == compositions_.end() ? 0 : it->second;
  }

 private:
  void Decompose(char32_t c, bool compatible, std::u32string* out) const {
    if (compatible && c >= kFirstCompatible) {
      if (const auto it = compatibility_.find(c); it != compatibility_.end()) {
        out->append(it->second);
        return;
      }
    }
    if (c - kSyllableBase < kSyllables && c >= kSyllableBase) {
      const char32_t index = c - kSyllableBase;
      out->push_back(kLeadBase + index / (kVowels * kTrails));
      out->push_back(kVowelBase + index / kTrails % kVowels);
      if (index % kTrails != 0) out->push_back(kTrailBase + index % kTrails);
      return;
    }
    const auto it = c < 0xC0 ? decompositions_.end() : decompositions_.find(c);
    if (it == decompositions_.end()) {
      out->push_back(c);
      return;
    }
    // In the table, the first character may decompose further; the second one never does.
    Decompose(it->second.front(), compatible, out);
    out->append(it->second.substr(1));
  }

  // The views point into the tables.
  using DecompositionMap = absl::flat_hash_map<char32_t, std::u32string_view>;

  static DecompositionMap MapOf(const Decompositions& table) {
    DecompositionMap map;
    const char32_t* text = table.text.data();
    for (const DecompositionRange& range : table.ranges) {
      for (char32_t c = range.first; c <= range.last; ++c, text += range.size) {
        map[c] = {text, range.size};
      }
    }
    return map;
  }

  NormalizationData() {
    for (const CombiningClassRange& range : CombiningClassRanges()) {
      for (char32_t c = range.first; c <= range.last; ++c) classes_[c] = range.value;
    }
    const CodePointSet excluded(CompositionExclusions());
    for (const auto& [c, parts] : decompositions_) {
      if (parts.size() != 2 || excluded.Contains(c)) continue;
      compositions_[static_cast<uint64_t>(parts[0]) << 32 | parts[1]] = c;
    }
  }

  absl::flat_hash_map<char32_t, uint8_t> classes_;
  const DecompositionMap decompositions_ = MapOf(CanonicalDecompositions());
  const DecompositionMap compatibility_ = MapOf(CompatibilityDecompositions());
  absl::flat_hash_map<uint64_t, char32_t> compositions_;
};

// Sorts each run of combining marks by combining class; marks of equal class keep their order.
void ReorderMarks(const NormalizationData& data, FormText* text) {
  size_t i = 0;
  while (i < text->size()) {
    if (data.CombiningClass((*text)[i].code) == 0) {
      ++i;
      continue;
    }
    size_t end = i + 1;
    while (end < text->size() && data.CombiningClass((*text)[end].code) != 0) ++end;
    if (end - i > 1) {
      std::stable_sort(text->begin() + i, text->begin() + end, [&](const auto& a, const auto& b) {
        return data.CombiningClass(a.code) < data.CombiningClass(b.code);
      });
    }
    i = end;
  }
}

FormText ComposeAll(const NormalizationData& data, const FormText& text) {
  constexpr size_t kNone = SIZE_MAX;
  FormText out;
  out.reserve(text.size());
  size_t starter = kNone;  // index in `out` of the last character of class 0
  uint8_t last_class = 0;
  for (const FormCharacter& c : text) {
    const uint8_t combining_class = data.CombiningClass(c.code);
    if (starter != kNone) {
      const bool adjacent = starter + 1 == out.size();
      // A mark is blocked if a mark of the same or a higher class is between it and the starter.
      if (adjacent || (last_class != 0 && last_class < combining_class)) {
        if (const char32_t composed = data.Compose(out[starter].code, c.code); composed != 0) {
          out[starter].code = composed;
          out[starter].extra += c.extra + 1;
          continue;
        }
      }
    }
    if (combining_class == 0) starter = out.size();
    last_class = combining_class;
    out.push_back(c);
  }
  return out;
}

}  // namespace

bool UnicodeFormNormalizer::IsUnchanged(std::string_view text) const {
  // A lead byte below CC starts a character below U+0300, which form C does not change; one below
  // C3 starts a character below U+00C0, which has no canonical decomposition.
  const uint8_t first_changed = compatible_ ? 0x80 : composes_ ? 0xCC : 0xC3;
  return std::all_of(text.begin(), text.end(),
                     [&](char byte) { return static_cast<uint8_t>(byte) < first_changed; });
}

absl::StatusOr<std::string> UnicodeFormNormalizer::Apply(std::string_view text,
                                                         NormalizeContext* context) const {
  const NormalizationData& data = NormalizationData::Get();
  FormText form;
  form.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    data.Append(NextCodePoint(text, &pos), compatible_, &form);
  }
  ReorderMarks(data, &form);
  if (composes_) form = ComposeAll(data, form);
  std::string out;
  out.reserve(text.size());
  SourceCursor cursor(text, context->sources);
  for (const FormCharacter& c : form) {
    const size_t old_size = out.size();
    AppendUtf8(c.code, &out);
    // Hugging Face's library counts along the new text, also where marks have changed places.
    if (c.extra < 0) {
      cursor.Insert(out.size() - old_size);
    } else {
      cursor.Replace(out.size() - old_size);
      cursor.Remove(static_cast<size_t>(c.extra));
    }
  }
  return out;
}

}  // namespace moeserve
