#include "engine/text/tokenizer/pipeline_tokenizer.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/regex_syntax.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// Larger texts are rejected, because positions in a piece are 32 bits wide.
constexpr size_t kMaxTextBytes = size_t{1} << 30;

absl::Status CheckText(std::string_view text) {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError("the text is larger than 1 GiB");
  }
  if (!IsValidUtf8(text)) return absl::InvalidArgumentError("the text is not valid UTF-8");
  return absl::OkStatus();
}

// Returns how many tokens of two texts are kept, of at most `most` in total (see TokenLimit).
std::pair<size_t, size_t> CutSizes(size_t first, size_t second, size_t most) {
  if (first + second <= most) return {first, second};
  const size_t half = most / 2;
  if (first <= second) {
    return first <= half ? std::pair(first, most - first) : std::pair(half, most - half);
  }
  return second <= half ? std::pair(most - second, second) : std::pair(most - half, half);
}

// Keeps `size` values, those at the end if `cuts_begin`.
template <typename Value>
void Cut(size_t size, bool cuts_begin, std::vector<Value>* values) {
  const auto extra = static_cast<ptrdiff_t>(values->size() - size);
  values->erase(cuts_begin ? values->begin() : values->end() - extra,
                cuts_begin ? values->begin() + extra : values->end());
}

// Returns how many characters at the begin and at the end of a byte-level token are white space.
std::pair<size_t, size_t> SpacesAtEnds(std::string_view token) {
  size_t leading = 0;
  size_t trailing = 0;
  bool only_spaces = true;
  for (size_t pos = 0; pos < token.size();) {
    const char32_t c = NextCodePoint(token, &pos);
    const bool space = c == U'Ġ' || IsWhiteSpace(c);
    only_spaces = only_spaces && space;
    if (only_spaces) ++leading;
    trailing = space ? trailing + 1 : 0;
  }
  return {leading, trailing};
}

// Appends the tokens of a part of a frame, without spans.
void AppendTokens(std::span<const TokenId> ids, const FramePart& part, EncodedTexts* out) {
  out->ids.insert(out->ids.end(), ids.begin(), ids.end());
  const size_t size = out->ids.size();
  out->types.resize(size, part.type);
  out->special.resize(size, part.token.has_value() ? 1 : 0);
  out->texts.resize(size, part.second ? 1 : 0);
}

}  // namespace

class PipelineTokenizer::Stream : public DecodeStream {
 public:
  Stream(const PipelineTokenizer* tokenizer, bool skip_special_tokens,
         std::span<const TokenId> kept)
      : tokenizer_(tokenizer),
        skip_special_tokens_(skip_special_tokens),
        kept_(kept),
        state_(tokenizer->parts_.decoder->Start()) {}

  void Push(TokenId id, std::string* out) override {
    const std::optional<std::string_view> form = tokenizer_->DecodedForm(id);
    if (!form.has_value()) return;
    if (skip_special_tokens_ && tokenizer_->parts_.added_tokens->IsSkipped(*form) &&
        !std::binary_search(kept_.begin(), kept_.end(), id)) {
      state_->Skip(out);
    } else {
      state_->Push(*form, out);
    }
  }

  void Finish(std::string* out) override { state_->Finish(out); }

 private:
  const PipelineTokenizer* tokenizer_;
  bool skip_special_tokens_;
  std::span<const TokenId> kept_;
  std::unique_ptr<DecoderState> state_;
};

absl::StatusOr<std::unique_ptr<Tokenizer>> PipelineTokenizer::Create(PipelineParts parts) {
  std::unique_ptr<PipelineTokenizer> tokenizer(new PipelineTokenizer(std::move(parts)));
  const Frames& frames = tokenizer->parts_.frames;
  for (const Frame& frame : {frames.single, frames.pair.value_or(Frame())}) {
    for (const FramePart& part : frame) {
      if (part.token.has_value() && !tokenizer->DecodedForm(*part.token).has_value()) {
        return absl::InvalidArgumentError(Concat("expected ids of tokens, found ", *part.token));
      }
    }
  }
  return tokenizer;
}

absl::StatusOr<std::vector<TokenId>> PipelineTokenizer::Encode(std::string_view text,
                                                               bool add_special_tokens,
                                                               bool parse_special) const {
  return EncodeInFrame(text, SpecialRule::All(parse_special), add_special_tokens);
}

absl::StatusOr<std::vector<TokenId>> PipelineTokenizer::EncodeTrusted(
    std::string_view text, std::span<const TextSpan> trusted, bool add_special_tokens) const {
  const auto splits_character = [&](size_t at) {
    return at < text.size() && (text[at] & 0xC0) == 0x80;
  };
  std::vector<TextSpan> spans;
  for (TextSpan span : trusted) {
    span.end = std::min(span.end, text.size());
    while (span.begin < span.end && splits_character(span.begin)) ++span.begin;
    while (span.begin < span.end && splits_character(span.end)) --span.end;
    if (span.begin < span.end) spans.push_back(span);
  }
  return EncodeInFrame(text, SpecialRule::Within(spans), add_special_tokens);
}

absl::StatusOr<std::vector<TokenId>> PipelineTokenizer::EncodeInFrame(
    std::string_view text, const SpecialRule& special, bool add_special_tokens) const {
  MOESERVE_RETURN_IF_ERROR(CheckText(text));
  const SearchLimit limit(text.size());
  std::vector<TokenId> ids;
  for (const FramePart& part : parts_.frames.single) {
    if (!part.token.has_value()) {
      MOESERVE_RETURN_IF_ERROR(EncodeText(text, special, &ids, nullptr));
      MOESERVE_RETURN_IF_ERROR(limit.status());
    } else if (add_special_tokens) {
      ids.push_back(*part.token);
    }
  }
  return ids;
}

absl::StatusOr<EncodedTexts> PipelineTokenizer::EncodeTexts(std::string_view text,
                                                            std::optional<std::string_view> pair,
                                                            bool add_special_tokens,
                                                            const TokenLimit& limit) const {
  if (pair.has_value() && !parts_.frames.pair.has_value()) {
    return absl::InvalidArgumentError("the tokenizer has no rule that joins two texts");
  }
  const Frame& frame = pair.has_value() ? *parts_.frames.pair : parts_.frames.single;
  const std::string_view texts[2] = {text, pair.value_or("")};
  std::vector<TokenId> ids[2];
  std::vector<Place> places[2];
  for (int i = 0; i < (pair.has_value() ? 2 : 1); ++i) {
    MOESERVE_RETURN_IF_ERROR(CheckText(texts[i]));
    const SearchLimit search_limit(texts[i].size());
    MOESERVE_RETURN_IF_ERROR(EncodeText(texts[i], SpecialRule::All(true), &ids[i], &places[i]));
    MOESERVE_RETURN_IF_ERROR(search_limit.status());
  }
  const auto added = static_cast<size_t>(
      add_special_tokens
          ? std::count_if(frame.begin(), frame.end(),
                          [](const FramePart& part) { return part.token.has_value(); })
          : 0);
  if (limit.most < added) {
    return absl::InvalidArgumentError(Concat("expected a limit of at least ", added,
                                             " tokens, which the tokenizer adds to a text, found ",
                                             limit.most));
  }
  const auto [first, second] = CutSizes(ids[0].size(), ids[1].size(), limit.most - added);
  for (int i = 0; i < 2; ++i) {
    const size_t size = i == 0 ? first : second;
    Cut(size, limit.cuts_begin, &ids[i]);
    Cut(size, limit.cuts_begin, &places[i]);
    TrimSpans(texts[i], ids[i], &places[i]);
  }
  EncodedTexts out;
  for (const FramePart& part : frame) {
    if (part.token.has_value()) {
      if (add_special_tokens) AppendTokens({&*part.token, 1}, part, &out);
    } else {
      AppendTokens(ids[part.second ? 1 : 0], part, &out);
      for (const Place& place : places[part.second ? 1 : 0]) out.spans.push_back(place.span);
    }
    out.spans.resize(out.ids.size());
  }
  return out;
}

void PipelineTokenizer::TrimSpans(std::string_view text, const std::vector<TokenId>& ids,
                                  std::vector<Place>* places) const {
  for (const SpanTrim& trim : parts_.trims) {
    for (size_t i = 0; i < ids.size(); ++i) {
      TextSpan& span = (*places)[i].span;
      // An added token can include the spaces around it.
      auto [leading, trailing] =
          SpacesAtEnds((*places)[i].added ? text.substr(span.begin, span.end - span.begin)
                                          : TokenString(ids[i]));
      // One space at the start was added to the text, more of them were not.
      if (leading == 1 && trim.added_first_space && (i == 0 || span.begin == 0)) leading = 0;
      for (; leading > 0 && span.begin < span.end; --leading) NextCodePoint(text, &span.begin);
      size_t end = span.end;
      for (; trailing > 0 && end > 0; --trailing) end = CharacterBefore(text, end);
      // As in Hugging Face's library: more spaces than the text has are not left out.
      if (trailing == 0) span.end = std::max(span.begin, end);
    }
  }
}

absl::Status PipelineTokenizer::EncodeText(std::string_view text, const SpecialRule& special,
                                           std::vector<TokenId>* ids,
                                           std::vector<Place>* places) const {
  TextArena arena = places == nullptr ? TextArena() : TextArena(text);
  const auto add_token = [&](const TextPart& part) {
    ids->push_back(*part.id);
    if (places != nullptr) places->push_back({arena.Origin(part.text), true});
  };
  std::vector<TextSpan> piece_spans;
  std::vector<TextPart> raw_parts;
  std::vector<TextPart> parts;
  Pieces pieces;
  parts_.added_tokens->SplitRaw(text, special, &raw_parts);
  for (const TextPart& raw : raw_parts) {
    parts.clear();
    if (raw.id.has_value()) {
      add_token(raw);
      continue;
    }
    std::string_view normalized = raw.text;
    SpecialRule part_special =
        special.Part(static_cast<size_t>(raw.text.data() - text.data()), raw.text.size());
    NormalizeContext context(raw.text);
    ByteSources sources;
    if (places != nullptr) context.sources = &sources;
    if (parts_.normalizer != nullptr && !parts_.normalizer->IsUnchanged(normalized)) {
      absl::StatusOr<std::string> result = parts_.normalizer->Apply(normalized, &context);
      if (!result.ok()) return result.status();
      normalized = arena.Keep(*std::move(result), raw.text, sources);
      part_special = part_special.Normalized(raw.text, normalized, *parts_.normalizer);
    }
    parts_.added_tokens->SplitNormalized(normalized, part_special, &parts);
    for (const TextPart& part : parts) {
      if (part.id.has_value()) {
        add_token(part);
        continue;
      }
      pieces.texts.assign(1, part.text);
      pieces.at_start = raw.text.data() == text.data() && !context.start_moved &&
                        part.text.data() == normalized.data();
      if (parts_.pre_tokenizer != nullptr) {
        if (absl::Status s = parts_.pre_tokenizer->Apply(&pieces, &arena); !s.ok()) return s;
      }
      for (const std::string_view piece : pieces.texts) {
        if (places == nullptr) {
          if (absl::Status s = parts_.model->Tokenize(piece, ids); !s.ok()) return s;
          continue;
        }
        piece_spans.clear();
        MOESERVE_RETURN_IF_ERROR(parts_.model->Tokenize(piece, ids, &piece_spans));
        for (const TextSpan& span : piece_spans) {
          const std::string_view token = piece.substr(span.begin, span.end - span.begin);
          places->push_back({arena.Origin(token), false});
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> PipelineTokenizer::Decode(std::span<const TokenId> ids,
                                                      bool skip_special_tokens) const {
  std::string out;
  Stream stream(this, skip_special_tokens, /*kept=*/{});
  for (const TokenId id : ids) {
    if (!DecodedForm(id).has_value()) {
      return absl::InvalidArgumentError(Concat("id ", id, " is no token"));
    }
    stream.Push(id, &out);
  }
  stream.Finish(&out);
  return out;
}

std::optional<std::string_view> PipelineTokenizer::DecodedForm(TokenId id) const {
  if (const AddedToken* added = parts_.added_tokens->Find(id); added != nullptr) {
    return parts_.added_tokens->DecodedForm(*added);
  }
  return parts_.model->TokenString(id);
}

std::string PipelineTokenizer::TokenBytes(TokenId id) const {
  const std::optional<std::string_view> form = DecodedForm(id);
  return form.has_value() ? parts_.decoder->TokenBytes(*form) : "";
}

std::string_view PipelineTokenizer::TokenString(TokenId id) const {
  if (const AddedToken* added = parts_.added_tokens->Find(id); added != nullptr) {
    return added->content;
  }
  return parts_.model->TokenString(id).value_or("");
}

std::optional<TokenId> PipelineTokenizer::TokenToId(std::string_view token) const {
  const std::optional<TokenId> id = parts_.added_tokens->TokenToId(token);
  return id.has_value() ? id : parts_.model->TokenToId(token);
}

bool PipelineTokenizer::IsSpecial(TokenId id) const {
  const AddedToken* added = parts_.added_tokens->Find(id);
  return added != nullptr && added->special;
}

int PipelineTokenizer::vocab_size() const {
  return std::max(parts_.model->id_bound(), parts_.added_tokens->id_bound());
}

std::unique_ptr<DecodeStream> PipelineTokenizer::NewDecodeStream(
    bool skip_special_tokens, std::span<const TokenId> kept) const {
  return std::make_unique<Stream>(this, skip_special_tokens, kept);
}

}  // namespace moeserve
