// Text <-> token ids: the interface of every tokenizer. The implementation is chosen where the
// files are read (model_loaders/tokenizer/tokenizer_json.h).
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

namespace moeserve {

// Bytes [begin, end) of a text.
struct TextSpan {
  size_t begin = 0;
  size_t end = 0;
  bool operator==(const TextSpan&) const = default;
};

// Decoding of one sequence, token by token. Not for use by two threads at the same time.
class DecodeStream {
 public:
  virtual ~DecodeStream() = default;
  // Appends to `out` the text that no later token can change. An unknown id adds nothing.
  virtual void Push(TokenId id, std::string* out) = 0;
  // Appends the rest, with U+FFFD for an unfinished character. Push() must not be called
  // afterwards.
  virtual void Finish(std::string* out) = 0;
};

// Immutable after construction: any number of threads may use one object.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Ids of `text`. `add_special_tokens`: with the ids that the post-processor adds (bos and the
  // like). `parse_special`: text that spells a special token becomes that token; otherwise it is
  // encoded as ordinary text. InvalidArgument: `text` is not UTF-8 or larger than 1 GiB.
  virtual absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text,
                                                      bool add_special_tokens,
                                                      bool parse_special = true) const = 0;

  // As Encode() with `parse_special`, but recognises a special token only where it lies completely
  // in one of the `trusted` spans, which are ascending and disjoint.
  virtual absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view text,
                                                             std::span<const TextSpan> trusted,
                                                             bool add_special_tokens) const = 0;

  // Text of `ids`; bytes that are not UTF-8 become U+FFFD. InvalidArgument: an id that is no token.
  virtual absl::StatusOr<std::string> Decode(std::span<const TokenId> ids,
                                             bool skip_special_tokens) const = 0;

  // The bytes that this token adds to a decoded text, possibly part of a character; of a special
  // token its own text, of an unknown id "".
  virtual std::string TokenBytes(TokenId id) const = 0;

  // The token as its file spells it ("Ġthe"), "" for an unknown id. Lives as long as the tokenizer.
  virtual std::string_view TokenString(TokenId id) const = 0;

  virtual std::optional<TokenId> TokenToId(std::string_view token) const = 0;
  virtual bool IsSpecial(TokenId id) const = 0;

  // Largest id + 1, added tokens included. Ids below it may be unused.
  virtual int vocab_size() const = 0;

  // The stream must not outlive the tokenizer. Its output, joined, equals Decode(). The default
  // implementation joins TokenBytes(), without special tokens if they are skipped.
  virtual std::unique_ptr<DecodeStream> NewDecodeStream(bool skip_special_tokens) const;
};

// Incremental detokenizer of one sequence. Push() returns the text that became final with this
// token, in whole characters; bytes of an unfinished character wait until it is complete. Finish()
// returns the rest. The pieces joined equal Decode() of all ids.
class IncrementalDecoder {
 public:
  // `tokenizer` must outlive this object.
  IncrementalDecoder(const Tokenizer* tokenizer, bool skip_special_tokens);

  std::string Push(TokenId id);
  std::string Finish();

 private:
  std::unique_ptr<DecodeStream> stream_;
};

}  // namespace moeserve
