// Texts and token ids for tokenizers that loaded well: a bundled one, and small ones of each kind
// of model. The first byte chooses the tokenizer, the second one the trusted part of the text.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/text/tokenizer/utf8.h"
#include "model_loaders/tokenizer/tokenizer_json.h"
#include "model_loaders/tokenizer/vocab_files.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve {
namespace {

struct Subject {
  std::unique_ptr<Tokenizer> tokenizer;
  bool reversible = false;  // whether a text is the decoded text of its ids
};

constexpr std::string_view kUnigram = R"({"version": "1.0", "added_tokens": [
  {"id": 5, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
   "rstrip": false, "normalized": false}],
  "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                    "split": true},
  "decoder": {"type": "Metaspace", "replacement": "▁"},
  "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": [["<unk>", 0.0], ["▁", -2.0], ["t", -3.0], ["te", -3.5], ["▁text", -4.0]]}})";

constexpr std::string_view kWordPiece = R"({"version": "1.0", "added_tokens": [],
  "normalizer": {"type": "BertNormalizer", "clean_text": true, "lowercase": true,
                 "handle_chinese_chars": true, "strip_accents": null},
  "pre_tokenizer": {"type": "BertPreTokenizer"},
  "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
  "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"[UNK]": 0, "text": 1, "te": 2, "##xt": 3, "12": 4, "a": 5, "##a": 6}}})";

std::vector<Subject> MakeSubjects() {
  std::vector<Subject> out;
  auto bundled =
      LoadTokenizerJson(std::filesystem::path(MOESERVE_SOURCE_DIR) / "deploy/models/mh-moe");
  MOESERVE_CHECK(bundled.ok(), "the bundled tokenizer is valid");
  out.push_back({*std::move(bundled), true});
  for (const std::string_view json : {kUnigram, kWordPiece}) {
    auto small = ParseTokenizerJson(json, "tokenizer.json");
    MOESERVE_CHECK(small.ok(), "the small tokenizers are valid");
    out.push_back({*std::move(small), false});
  }
  return out;
}

// Checks that a stream of tokens gives the text of all of them.
void CheckStream(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  for (const bool skip : {false, true}) {
    const auto text = tokenizer.Decode(ids, skip);
    if (!text.ok()) continue;
    MOESERVE_CHECK(IsValidUtf8(*text), "a decoded text is UTF-8");
    IncrementalDecoder decoder(&tokenizer, skip);
    std::string pieces;
    for (const TokenId id : ids) {
      const std::string piece = decoder.Push(id);
      MOESERVE_CHECK(IsValidUtf8(piece), "a piece has whole characters");
      pieces += piece;
    }
    pieces += decoder.Finish();
    MOESERVE_CHECK(pieces == *text, "the pieces are the whole text");
  }
}

void CheckText(const Subject& subject, std::string_view text, size_t trusted) {
  const Tokenizer& tokenizer = *subject.tokenizer;
  const auto plain = tokenizer.Encode(text, false, /*parse_special=*/false);
  if (!IsValidUtf8(text)) {
    MOESERVE_CHECK(!plain.ok(), "only UTF-8 is accepted");
    return;
  }
  if (!plain.ok()) return;
  testing::CountAccepted();
  const auto special = tokenizer.Encode(text, false, /*parse_special=*/true);
  MOESERVE_CHECK(special.ok(), "a text with special tokens is accepted, too");
  for (const auto* ids : {&*plain, &*special}) {
    for (const TokenId id : *ids) {
      MOESERVE_CHECK(id >= 0 && id < tokenizer.vocab_size(), "ids of the vocabulary");
    }
    if (subject.reversible) {
      const auto decoded = tokenizer.Decode(*ids, false);
      MOESERVE_CHECK(decoded.ok() && *decoded == text, "the text comes back");
    }
    CheckStream(tokenizer, *ids);
  }
  for (const TokenId id : *plain) {
    MOESERVE_CHECK(!tokenizer.IsSpecial(id), "plain text makes no special token");
  }
  const auto places = tokenizer.EncodeTexts(text, std::nullopt, false);
  MOESERVE_CHECK(places.ok() && places->ids == *special, "a single text has the ids of Encode()");
  MOESERVE_CHECK(tokenizer.EncodeTexts(text, text, true, {.most = trusted + 9}).ok(), "pairs, cut");
  for (const TextSpan& span : places->spans) {
    MOESERVE_CHECK(span.begin <= span.end && span.end <= text.size(), "a part of the text");
    MOESERVE_CHECK(IsValidUtf8(text.substr(span.begin, span.end - span.begin)), "characters");
  }
  const std::vector<TextSpan> all = {{0, text.size()}};
  const auto none = tokenizer.EncodeTrusted(text, {}, false);
  MOESERVE_CHECK(none.ok() && *none == *plain, "without trust, all is plain text");
  const auto whole = tokenizer.EncodeTrusted(text, all, false);
  MOESERVE_CHECK(whole.ok() && *whole == *special, "with trust, special tokens are found");
  const std::vector<TextSpan> part = {{0, trusted}};
  MOESERVE_CHECK(tokenizer.EncodeTrusted(text, part, true).ok(), "any part can be trusted");
}

}  // namespace
}  // namespace moeserve

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  static const auto* const subjects = new std::vector<Subject>(MakeSubjects());
  testing::Input input(data, size);
  const Subject& subject = (*subjects)[input.Byte() % subjects->size()];
  const size_t trusted = input.Byte();
  CheckText(subject, input.rest(), trusted);
  // The same bytes as ids: any order, also ids that are no tokens.
  std::vector<TokenId> ids;
  for (size_t i = 0; i + 1 < input.rest().size() && i < 512; i += 2) {
    const auto byte = [&](size_t at) { return static_cast<uint8_t>(input.rest()[at]); };
    ids.push_back(static_cast<TokenId>(byte(i) + 256 * (byte(i + 1) % 17)));
  }
  CheckStream(*subject.tokenizer, ids);
  return 0;
}
