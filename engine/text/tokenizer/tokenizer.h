// The interface of every tokenizer, which converts between text and token ids. The loader of
// tokenizer files chooses the implementation (model_loaders/tokenizer/tokenizer_json.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/token_id.h"
#include "engine/text/tokenizer/text_span.h"

namespace moeserve {

// The ids of one text or of two, with what is known of each token. All vectors have the same size.
struct EncodedTexts {
  std::vector<TokenId> ids;
  // The type that the post-processor gives the token (`token_type_ids`), 0 or 1 in most files.
  std::vector<uint8_t> types;
  // 1 for a token that the post-processor added, such as [CLS]. 0 for every token of a text, even
  // if the text spells a special token.
  std::vector<uint8_t> special;
  // Which text the token comes from: 0 the first, 1 the second; 0 for added tokens.
  std::vector<uint8_t> texts;
  // The part of that text, in whole characters, that the token stands for; empty for added tokens.
  // Converted to characters, these are the offsets of Hugging Face's library.
  std::vector<TextSpan> spans;
};

// Limits the tokens of EncodeTexts(). As in Hugging Face's library, tokens of the texts are cut off
// and those of the post-processor are kept. Of two texts the longer one is cut until both have the
// same size, and then both ("longest_first"); if the rest is odd, the second text has one token
// more, or the first one if it was longer.
struct TokenLimit {
  size_t most = SIZE_MAX;   // tokens, those of the post-processor included
  bool cuts_begin = false;  // else the end of a text is cut off
};

// Decodes one sequence, token by token. Not thread-safe.
class DecodeStream {
 public:
  virtual ~DecodeStream() = default;
  // Appends to `out` the text that has become final, so that no later token can change it. An
  // unknown id adds nothing.
  virtual void Push(TokenId id, std::string* out) = 0;
  // Appends the remaining text, with U+FFFD for an unfinished character. Push() must not be called
  // afterwards.
  virtual void Finish(std::string* out) = 0;
  // Returns an equal stream of its own.
  virtual std::unique_ptr<DecodeStream> Clone() const = 0;
};

// Immutable after construction; any number of threads may use one object.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Returns the ids of `text`. `add_special_tokens` adds the ids of the post-processor (such as
  // BOS). With `parse_special`, text that spells a special token becomes that token; otherwise it
  // is encoded as ordinary text. InvalidArgument if `text` is not UTF-8 or larger than 1 GiB, or if
  // the tokenizer's patterns need too much work for it (SearchLimit).
  virtual absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text,
                                                      bool add_special_tokens,
                                                      bool parse_special = true) const = 0;

  // Does what Encode() with `parse_special` does, but recognises a special token only if it lies
  // completely within one of the `trusted` spans, which must be ascending and disjoint.
  // Characters that a span splits count as not trusted.
  virtual absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view text,
                                                             std::span<const TextSpan> trusted,
                                                             bool add_special_tokens) const = 0;

  // Encodes `text`, or `text` and `pair` as the post-processor joins two texts. The ids of a single
  // text are those of Encode(). InvalidArgument in the cases of Encode(), for two texts if the
  // tokenizer has no rule for them, and if the added tokens alone exceed the limit. The default
  // implementation returns Unimplemented.
  virtual absl::StatusOr<EncodedTexts> EncodeTexts(std::string_view text,
                                                   std::optional<std::string_view> pair,
                                                   bool add_special_tokens,
                                                   const TokenLimit& limit = {}) const;

  // Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD. InvalidArgument if an id is
  // no token.
  virtual absl::StatusOr<std::string> Decode(std::span<const TokenId> ids,
                                             bool skip_special_tokens) const = 0;

  // Returns the bytes that this token adds to a decoded text, possibly a part of a character; for a
  // special token its own text, for an unknown id "".
  virtual std::string TokenBytes(TokenId id) const = 0;

  // Returns the token as its file spells it ("Ġthe"); "" for an unknown id. Valid as long as the
  // tokenizer.
  virtual std::string_view TokenString(TokenId id) const = 0;

  virtual std::optional<TokenId> TokenToId(std::string_view token) const = 0;
  virtual bool IsSpecial(TokenId id) const = 0;

  // Returns the largest id + 1, added tokens included. Some smaller ids may be unused.
  virtual int vocab_size() const = 0;

  // Returns the tokenizer of the texts that an encoder reads for the decoder whose texts this one
  // is for. Translators can have one for each language. Lives as long as this object.
  virtual const Tokenizer& source() const { return *this; }

  // Returns a stream whose concatenated output equals Decode(), except that it contains the text of
  // the tokens `kept` (in ascending order) even if `skip_special_tokens`. The tokenizer and `kept`
  // must outlive the stream. The default implementation concatenates TokenBytes() and omits special
  // tokens if `skip_special_tokens`.
  virtual std::unique_ptr<DecodeStream> NewDecodeStream(bool skip_special_tokens,
                                                        std::span<const TokenId> kept = {}) const;
};

// Incremental detokenizer for one sequence. Push() returns the text that becomes final with this
// token, in whole characters; the bytes of an unfinished character are held back until the
// character is complete. Finish() returns the remaining text. The returned pieces concatenated
// equal Decode() of all ids. `kept`: see Tokenizer::NewDecodeStream().
class IncrementalDecoder {
 public:
  // `tokenizer` and `kept` must outlive this object.
  IncrementalDecoder(const Tokenizer* tokenizer, bool skip_special_tokens,
                     std::span<const TokenId> kept = {});
  IncrementalDecoder(const IncrementalDecoder& other) : stream_(other.stream_->Clone()) {}
  IncrementalDecoder(IncrementalDecoder&&) = default;
  IncrementalDecoder& operator=(IncrementalDecoder other) {
    stream_ = std::move(other.stream_);
    return *this;
  }

  std::string Push(TokenId id);
  std::string Finish();

 private:
  std::unique_ptr<DecodeStream> stream_;
};

}  // namespace moeserve
