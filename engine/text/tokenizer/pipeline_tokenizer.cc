#include "engine/text/tokenizer/pipeline_tokenizer.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// Larger texts are rejected, because positions in a piece are 32 bits wide.
constexpr size_t kMaxTextBytes = size_t{1} << 30;

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
  std::unique_ptr<DecodeStream> Clone() const override { return std::make_unique<Stream>(*this); }

 private:
  const PipelineTokenizer* tokenizer_;
  bool skip_special_tokens_;
  std::span<const TokenId> kept_;
  NextState state_;
};

absl::StatusOr<std::unique_ptr<Tokenizer>> PipelineTokenizer::Create(PipelineParts parts) {
  std::unique_ptr<PipelineTokenizer> tokenizer(new PipelineTokenizer(std::move(parts)));
  for (const std::optional<TokenId>& id : tokenizer->parts_.frame) {
    if (id.has_value() && !tokenizer->DecodedForm(*id).has_value()) {
      return absl::InvalidArgumentError(Concat("expected ids of tokens, found ", *id));
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
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError("the text is larger than 1 GiB");
  }
  if (!IsValidUtf8(text)) return absl::InvalidArgumentError("the text is not valid UTF-8");
  const SearchLimit limit(text.size());
  std::vector<TokenId> ids;
  for (const std::optional<TokenId>& id : parts_.frame) {
    if (!id.has_value()) {
      if (absl::Status s = EncodeText(text, special, &ids); !s.ok()) return s;
      if (absl::Status s = limit.status(); !s.ok()) return s;
    } else if (add_special_tokens) {
      ids.push_back(*id);
    }
  }
  return ids;
}

absl::Status PipelineTokenizer::EncodeText(std::string_view text, const SpecialRule& special,
                                           std::vector<TokenId>* ids) const {
  TextArena arena;
  std::vector<TextPart> raw_parts;
  std::vector<TextPart> parts;
  Pieces pieces;
  parts_.added_tokens->SplitRaw(text, special, &raw_parts);
  for (const TextPart& raw : raw_parts) {
    parts.clear();
    if (raw.id.has_value()) {
      ids->push_back(*raw.id);
      continue;
    }
    std::string_view normalized = raw.text;
    SpecialRule part_special =
        special.Part(static_cast<size_t>(raw.text.data() - text.data()), raw.text.size());
    NormalizeContext context(raw.text);
    if (parts_.normalizer != nullptr && !parts_.normalizer->IsUnchanged(normalized)) {
      absl::StatusOr<std::string> result = parts_.normalizer->Apply(normalized, &context);
      if (!result.ok()) return result.status();
      normalized = arena.Keep(*std::move(result));
      part_special = part_special.Normalized(raw.text, normalized, *parts_.normalizer);
    }
    parts_.added_tokens->SplitNormalized(normalized, part_special, &parts);
    for (const TextPart& part : parts) {
      if (part.id.has_value()) {
        ids->push_back(*part.id);
        continue;
      }
      pieces.texts.assign(1, part.text);
      pieces.at_start = raw.text.data() == text.data() && !context.start_moved &&
                        part.text.data() == normalized.data();
      if (parts_.pre_tokenizer != nullptr) {
        if (absl::Status s = parts_.pre_tokenizer->Apply(&pieces, &arena); !s.ok()) return s;
      }
      for (const std::string_view piece : pieces.texts) {
        if (absl::Status s = parts_.model->Tokenize(piece, ids); !s.ok()) return s;
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
