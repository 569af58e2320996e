#include "engine/text/tokenizer/normalizers/character_map.h"

#include <utility>

#include "base/error_text.h"
#include "engine/text/tokenizer/unicode/graphemes.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// Real maps have less than 1 MiB.
constexpr size_t kMaxMapBytes = size_t{16} << 20;
// As in Hugging Face's library: larger clusters are replaced character by character.
constexpr size_t kMaxClusterBytes = 5;

// The fields of a trie node.
bool HasLeaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t Label(uint32_t unit) { return unit & 0x800000FF; }
uint32_t Value(uint32_t unit) { return unit & 0x7FFFFFFF; }
size_t Offset(uint32_t unit) { return size_t{unit >> 10} << ((unit & 0x200) >> 6); }

uint32_t ReadU32(std::string_view data, size_t at) {
  uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(data[at + i]);
  return value;
}

}  // namespace

absl::StatusOr<CharacterMap> CharacterMap::Create(std::string_view data) {
  if (data.size() < 4 || data.size() > kMaxMapBytes) {
    return absl::InvalidArgumentError(
        Concat("expected 4 to ", kMaxMapBytes, " bytes, found ", data.size()));
  }
  const size_t trie_bytes = ReadU32(data, 0);
  if (trie_bytes % 4 != 0 || trie_bytes == 0 || trie_bytes > data.size() - 4) {
    return absl::InvalidArgumentError(Concat("expected a trie of 4 to ", data.size() - 4,
                                             " bytes, a multiple of 4, found ", trie_bytes,
                                             " bytes"));
  }
  CharacterMap map;
  map.units_.reserve(trie_bytes / 4);
  for (size_t i = 0; i < trie_bytes; i += 4) map.units_.push_back(ReadU32(data, 4 + i));
  map.replacements_ = data.substr(4 + trie_bytes);
  if (!IsValidUtf8(map.replacements_)) {
    return absl::InvalidArgumentError("its replacements are not UTF-8");
  }
  // A rule may point to the start of a character only; otherwise its replacement is not UTF-8.
  for (size_t i = 0; i < map.units_.size(); ++i) {
    if (!HasLeaf(map.units_[i]) || (map.units_[i] & 0x80000000) != 0) continue;
    const size_t leaf = i ^ Offset(map.units_[i]);
    if (leaf >= map.units_.size()) continue;
    const size_t at = Value(map.units_[leaf]);
    if (at > map.replacements_.size() ||
        (at < map.replacements_.size() && (map.replacements_[at] & 0xC0) == 0x80)) {
      return absl::InvalidArgumentError(
          Concat("a rule refers to byte ", at, ", where no replacement starts"));
    }
  }
  return map;
}

size_t CharacterMap::Find(std::string_view text, bool longest,
                          std::string_view* replacement) const {
  size_t found = 0;
  size_t node = Offset(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\0') break;  // ends a key
    node ^= static_cast<uint8_t>(text[i]);
    if (node >= units_.size() || Label(units_[node]) != static_cast<uint8_t>(text[i])) break;
    const uint32_t unit = units_[node];
    node ^= Offset(unit);
    if (!HasLeaf(unit) || node >= units_.size()) continue;
    const size_t at = Value(units_[node]);
    if (at > replacements_.size()) continue;
    const std::string_view rest = std::string_view(replacements_).substr(at);
    *replacement = rest.substr(0, rest.find('\0'));
    found = i + 1;
    if (!longest) break;
  }
  return found;
}

absl::StatusOr<std::string> PrecompiledNormalizer::Apply(std::string_view text,
                                                         NormalizeContext* context) const {
  std::string out;
  out.reserve(text.size());
  SourceCursor cursor(text, context->sources);
  std::string_view replacement;
  for (size_t begin = 0; begin < text.size();) {
    if (out.size() > context->max_bytes) return NormalizedTooLong();
    const size_t end = GraphemeEnd(text, begin);
    const std::string_view cluster = text.substr(begin, end - begin);
    begin = end;
    if (cluster.size() <= kMaxClusterBytes && map_.FindShortest(cluster, &replacement) > 0) {
      out.append(replacement);
      cursor.ReplaceText(cluster, replacement);
      continue;
    }
    for (size_t pos = 0; pos < cluster.size();) {
      const size_t start = pos;
      NextCodePoint(cluster, &pos);
      const std::string_view character = cluster.substr(start, pos - start);
      if (map_.FindShortest(character, &replacement) == 0) replacement = character;
      out.append(replacement);
      cursor.ReplaceText(character, replacement);
    }
  }
  return out;
}

}  // namespace moeserve
