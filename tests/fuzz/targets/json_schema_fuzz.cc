// Constraints of structured output. The first byte says what the constraint is: 's' a JSON schema,
// 'S' a strict one, 'r' a regular expression, 'c' choices, one per line, 'o' any object, 'g' a
// grammar, 't' tags in free text, one per line: begin, pattern and end, with tabs between them.
// Behind the constraint and "\n\n\n" are the bytes by which it is advanced.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "engine/text/structured/compile_constraint.h"
#include "model_loaders/tokenizer/vocab_files.h"
#include "nlohmann/json.hpp"
#include "tests/fuzz/fuzz.h"

namespace moeserve {
namespace {

constexpr TokenId kEos = 300;
constexpr int64_t kNoLimit = int64_t{1} << 40;

// All bytes, token i being byte i, and some longer tokens.
const std::vector<std::string>& Tokens() {
  static const auto* const tokens = [] {
    auto* out = new std::vector<std::string>;
    for (int byte = 0; byte < 256; ++byte) out->emplace_back(1, static_cast<char>(byte));
    for (const char* text : {"te", "xt", "text", "\": ", "\",", "{\"", "[]", "ab", "tr", "ue",
                             "true", "fa", "12", "}}", "\", \"", ":\"", "\xc3\xa9", "\\u"}) {
      out->emplace_back(text);
    }
    return out;
  }();
  return *tokens;
}

std::shared_ptr<const VocabularyIndex> FuzzVocabulary() {
  std::string file;
  for (size_t i = 0; i < Tokens().size(); ++i) {
    file += absl::Base64Escape(Tokens()[i]) + ' ' + std::to_string(i) + '\n';
  }
  TokenizerDetails details;
  details.pattern = R"(\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+)";
  details.added_tokens = {{.id = kEos, .content = "<s>", .special = true}};
  const auto tokenizer = ParseTiktoken(file, "vocabulary", details);
  MOESERVE_CHECK(tokenizer.ok(), "the vocabulary is valid");
  auto index = VocabularyIndex::Build(**tokenizer, {kEos}, kEos + 4);
  MOESERVE_CHECK(index.ok(), "the vocabulary has an index");
  return *index;
}

bool IsSet(const std::vector<uint32_t>& mask, TokenId id) { return (mask[id / 32] >> id % 32) & 1; }

std::vector<uint32_t> MaskOf(ConstraintState& state, size_t words, int64_t left = kNoLimit) {
  std::vector<uint32_t> mask(words, 0xA5A5A5A5);
  state.AllowedTokens(mask, left);
  bool any = false;
  for (const uint32_t word : mask) any = any || word != 0;
  MOESERVE_CHECK(any, "some token is allowed");
  MOESERVE_CHECK(IsSet(mask, kEos) == state.complete(), "only a complete text may end");
  return mask;
}

// Checks that the mask agrees with Accept(), for some tokens.
void CheckMask(ConstraintState& state, const std::vector<uint32_t>& mask, uint8_t hint,
               bool ambiguous) {
  for (const TokenId id : {TokenId{hint}, TokenId{256 + hint % 18}}) {
    const std::unique_ptr<ConstraintState> next = state.Clone();
    MOESERVE_CHECK(next->Accept(id) == IsSet(mask, id), "a token in the mask is accepted");
    // Of very many ways to read a text, those that are given up may differ.
    if (!IsSet(mask, id) || id < 256 || ambiguous) continue;
    // A token means its bytes.
    const std::unique_ptr<ConstraintState> bytes = state.Clone();
    for (const char c : Tokens()[static_cast<size_t>(id)]) {
      MOESERVE_CHECK(bytes->Accept(static_cast<uint8_t>(c)), "the bytes of an allowed token");
    }
    MOESERVE_CHECK(bytes->complete() == next->complete() &&
                       MaskOf(*bytes, mask.size()) == MaskOf(*next, mask.size()),
                   "a token and its bytes lead to the same state");
  }
}

// Generates a text of at most `left` tokens, with choices that `input` makes.
void Generate(std::unique_ptr<ConstraintState> state, size_t words, bool json, std::string text,
              testing::Input input) {
  for (int64_t left = 32; left > 0; --left) {
    const std::vector<uint32_t> mask = MaskOf(*state, words, left);
    std::vector<TokenId> allowed;
    for (TokenId id = 0; id <= kEos; ++id) {
      if (IsSet(mask, id)) allowed.push_back(id);
    }
    const TokenId id = allowed[input.Byte() % allowed.size()];
    if (id == kEos) break;
    MOESERVE_CHECK(state->Accept(id), "an allowed token");
    text += Tokens()[static_cast<size_t>(id)];
  }
  if (!state->complete()) return;
  testing::CountAccepted();
  if (json) MOESERVE_CHECK(nlohmann::json::accept(text), "a complete text is JSON");
}

// Removes the text before the first `end` from `text`, and `end`, and returns the text.
std::string_view TakeUntil(char end, std::string_view* text) {
  const std::string_view out = text->substr(0, text->find(end));
  text->remove_prefix(std::min(text->size(), out.size() + 1));
  return out;
}

ConstraintSpec MakeTags(std::string_view text) {
  StructuralTags tags;
  while (!text.empty()) {
    std::string_view line = TakeUntil('\n', &text);
    StructuralTag tag;
    tag.begin = TakeUntil('\t', &line);
    tag.content.kind = TextFormat::Kind::kRegex;
    tag.content.text = TakeUntil('\t', &line);
    tag.end = line;
    tags.tags.push_back(std::move(tag));
  }
  return TagsConstraint(std::move(tags));
}

ConstraintSpec MakeSpec(char kind, std::string_view text) {
  if (kind == 't') return MakeTags(text);
  ConstraintSpec spec;
  if (kind == 'r') {
    spec.kind = ConstraintSpec::Kind::kRegex;
  } else if (kind == 'c') {
    spec.kind = ConstraintSpec::Kind::kChoice;
    while (!text.empty()) spec.choices.emplace_back(TakeUntil('\n', &text));
  } else if (kind == 'g') {
    spec.kind = ConstraintSpec::Kind::kGrammar;
  } else if (kind != 'o') {
    spec.kind = ConstraintSpec::Kind::kJsonSchema;
    spec.strict = kind == 'S';
  }
  if (kind != 'c') spec.text = text;
  return spec;
}

}  // namespace
}  // namespace moeserve

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  static const auto* const vocabulary =
      new std::shared_ptr<const VocabularyIndex>(FuzzVocabulary());
  testing::Input input(data, size);
  const char kind = static_cast<char>(input.Byte());
  ConstraintLimits limits;
  limits.states = 5000;
  const ConstraintSpec spec = MakeSpec(kind, input.Section());
  const auto compiled = CompileConstraint(spec, *vocabulary, limits);
  if (!compiled.ok()) return 0;
  const bool json = kind != 'r' && kind != 'c' && kind != 'g' && kind != 't';
  const size_t words = (*vocabulary)->mask_words();
  std::unique_ptr<ConstraintState> state = (*compiled)->NewState();
  std::string text;
  for (const char c : input.rest().substr(0, 32)) {
    const auto byte = static_cast<uint8_t>(c);
    CheckMask(*state, MaskOf(*state, words), byte, kind == 'g');
    if (state->Accept(byte)) text += c;
  }
  Generate(state->Clone(), words, json, text, input);
  if (state->complete() && json) {
    MOESERVE_CHECK(nlohmann::json::accept(text), "a complete text is JSON");
  }
  return 0;
}
