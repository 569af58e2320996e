#include "engine/text/tokenizer/normalizers/sentence_piece_normalizer.h"

#include "engine/text/tokenizer/utf8.h"

namespace moeserve {

std::pair<std::string_view, size_t> SentencePieceNormalizer::Prefix(std::string_view text) const {
  size_t size = 0;
  user_defined_.ForEachPrefix(text, [&](size_t found, TokenId) { size = found; });
  if (size > 0) return {text.substr(0, size), size};
  std::string_view replacement;
  if (rules_.characters.has_value()) {
    // The tries of files are not trusted: one with a circle would follow the whole text.
    constexpr size_t kLongestRule = 256;
    size = rules_.characters->FindLongest(text.substr(0, kLongestRule), &replacement);
  }
  if (size > 0) return {replacement, size};
  NextCodePoint(text, &size);
  return {text.substr(0, size), size};
}

absl::StatusOr<std::string> SentencePieceNormalizer::Apply(std::string_view text,
                                                           NormalizeContext* context) const {
  SourceCursor cursor(text, context->sources);
  const std::string_view space = rules_.escape_whitespaces ? "▁" : " ";
  if (rules_.remove_extra_whitespaces) {
    while (!text.empty()) {
      const auto [form, size] = Prefix(text);
      if (form != " ") break;
      cursor.Remove(CountCharacters(text.substr(0, size)));
      text.remove_prefix(size);
    }
  }
  std::string out;
  if (text.empty()) return out;
  const bool adds_space = rules_.add_dummy_prefix && !context->continued;
  if (adds_space && !rules_.treat_whitespace_as_suffix) {
    out += space;
    cursor.InsertBefore(space.size());
  }
  bool after_space = rules_.remove_extra_whitespaces;
  while (!text.empty()) {
    auto [form, size] = Prefix(text);
    const size_t begin = out.size();
    while (after_space && form.starts_with(' ')) form.remove_prefix(1);
    for (const char byte : form) {
      if (byte == ' ') {
        out += space;
      } else {
        out.push_back(byte);
      }
    }
    if (!form.empty()) after_space = rules_.remove_extra_whitespaces && form.ends_with(' ');
    const std::string_view replaced = text.substr(0, size);
    if (form.empty()) {
      cursor.Remove(CountCharacters(replaced));
    } else {
      cursor.ReplaceText(replaced, std::string_view(out).substr(begin));
    }
    text.remove_prefix(size);
    if (out.size() > context->max_bytes) return NormalizedTooLong();
  }
  if (rules_.remove_extra_whitespaces) {
    while (out.ends_with(space)) out.resize(out.size() - space.size());
    if (context->sources != nullptr) context->sources->resize(out.size());
  }
  if (adds_space && rules_.treat_whitespace_as_suffix) {
    out += space;
    cursor.Insert(space.size());
  }
  return out;
}

}  // namespace moeserve
