// Masks must equal the set of accepted tokens; limits on tokens, and clones of states.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/text/structured/compile_constraint.h"
#include "tests/structured/corpus.h"
#include "tests/structured/hostile.h"

namespace moeserve::testing {
namespace {

constexpr int64_t kUnlimited = int64_t{1} << 40;

// Returns a vocabulary that lacks some single bytes, so that not every text can be spelled.
std::shared_ptr<const VocabularyIndex> PoorVocabulary() {
  std::string bytes;
  for (const char c : AllBytes()) {
    if (std::string_view("7!b\xC3\xA9").find(c) == std::string_view::npos) bytes += c;
  }
  static const auto vocabulary = MakeVocabulary(MakeTokens(900, bytes));
  return vocabulary;
}

// Draws a token. Half of the time prefers tokens with a JSON punctuation mark, because most
// completions would be one long string otherwise.
TokenId DrawFrom(const std::vector<TokenId>& allowed, const VocabularyIndex& vocabulary,
                 Random* random) {
  if (allowed.empty()) {
    ADD_FAILURE() << "an empty mask";
    return -1;
  }
  TokenId id = allowed[random->Below(static_cast<int>(allowed.size()))];
  for (int i = 0; i < 20 && random->Below(2); ++i) {
    if (vocabulary.Bytes(id).find_first_of("\"{}[],:") != std::string_view::npos) break;
    id = allowed[random->Below(static_cast<int>(allowed.size()))];
  }
  return id;
}

void CheckAgainstAccept(ConstraintState* state, const VocabularyIndex& vocabulary) {
  const std::vector<uint32_t> mask = MaskOf(state, vocabulary);
  int tokens = 0;
  for (TokenId id = 0; id < static_cast<TokenId>(32 * mask.size()); ++id) {
    const bool set = IsSet(mask, id);
    ASSERT_EQ(state->Clone()->Accept(id), set) << id << " " << vocabulary.Bytes(id);
    if (vocabulary.IsEos(id)) {
      ASSERT_EQ(set, state->complete());
    } else {
      tokens += set;
    }
  }
  ASSERT_TRUE(tokens > 0 || state->complete());
  if (tokens > 0) {
    ASSERT_TRUE(state->can_continue());
  }
}

TEST(MaskTest, HoldsExactlyWhatIsAccepted) {
  Random random(21);
  int refused = 0;
  for (const auto& vocabulary : {SmallVocabulary(), PoorVocabulary()}) {
    for (const ConstraintSpec& spec : Corpus()) {
      SCOPED_TRACE(spec.text);
      const auto compiled = CompileConstraint(spec, vocabulary);
      // The poor vocabulary cannot spell completions of every constraint.
      if (vocabulary == SmallVocabulary()) {
        ASSERT_TRUE(compiled.ok()) << compiled.status();
      }
      if (!compiled.ok()) {
        ++refused;
        continue;
      }
      for (int walk = 0; walk < 3; ++walk) {
        const auto state = (*compiled)->NewState();
        for (int i = 0; i < 40; ++i) {
          if (i < 6 || random.Below(5) == 0) CheckAgainstAccept(state.get(), *vocabulary);
          if (HasFatalFailure()) return;
          const auto allowed = TokensOf(MaskOf(state.get(), *vocabulary));
          const TokenId id = DrawFrom(allowed, *vocabulary, &random);
          ASSERT_TRUE(state->Accept(id));
          if (vocabulary->IsEos(id)) break;
        }
        CheckAgainstAccept(state.get(), *vocabulary);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_LT(refused, 10);
}

// After EOS, only EOS may follow.
TEST(MaskTest, TheEndStays) {
  for (const ConstraintSpec& spec : {Choices({"a"}), Pattern("a*")}) {
    const auto state = Compile(spec)->NewState();
    ASSERT_TRUE(state->Accept(2 + 'a'));
    ASSERT_TRUE(state->Accept(kEos));
    EXPECT_TRUE(state->complete());
    EXPECT_FALSE(state->can_continue());
    EXPECT_EQ(TokensOf(MaskOf(state.get(), *SmallVocabulary())), std::vector<TokenId>{kEos});
    EXPECT_FALSE(state->Accept(2 + 'a'));
  }
}

TEST(MaskTest, ARefusedTokenChangesNothing) {
  Random random(22);
  const auto& vocabulary = *SmallVocabulary();
  for (const ConstraintSpec& spec : Corpus()) {
    const auto constraint = Compile(spec);
    const auto state = constraint->NewState();
    for (int i = 0; i < 20; ++i) {
      const std::vector<uint32_t> mask = MaskOf(state.get(), vocabulary);
      for (int j = 0; j < 50; ++j) {
        const TokenId id = random.Below(vocabulary.vocab_size() + 3) - 1;
        if (id >= 0 && id < vocabulary.vocab_size() && IsSet(mask, id)) continue;
        ASSERT_FALSE(state->Accept(id));
      }
      ASSERT_EQ(MaskOf(state.get(), vocabulary), mask);
      const TokenId id = DrawFrom(TokensOf(mask), vocabulary, &random);
      ASSERT_TRUE(state->Accept(id));
      if (id == kEos) break;
    }
  }
}

// A mask must not depend on the masks that this or another state computed before.
TEST(MaskTest, TheSameForAFreshConstraint) {
  Random random(23);
  const auto& vocabulary = *SmallVocabulary();
  for (const ConstraintSpec& spec : Corpus()) {
    const auto used = Compile(spec);
    for (int walk = 0; walk < 4; ++walk) {
      const auto state = used->NewState();
      std::vector<TokenId> tokens;
      const int length = random.Below(30);
      for (int i = 0; i < length; ++i) {
        const auto allowed = TokensOf(MaskOf(state.get(), vocabulary, 1 + random.Below(60)));
        const TokenId id = DrawFrom(allowed, vocabulary, &random);
        if (id == kEos) break;
        ASSERT_TRUE(state->Accept(id));
        tokens.push_back(id);
      }
      const auto fresh = Compile(spec)->NewState();
      for (const TokenId id : tokens) ASSERT_TRUE(fresh->Accept(id));
      for (const int64_t left : {int64_t{1}, int64_t{8}, int64_t{25}, kUnlimited}) {
        ASSERT_EQ(MaskOf(state.get(), vocabulary, left), MaskOf(fresh.get(), vocabulary, left))
            << spec.text << " " << left;
      }
    }
  }
}

// Draws a completion as the engine does: without the limit, and again with it only if the token
// leaves no time for the rest. Returns whether the text was complete within the limit.
bool EndsWithin(const CompiledConstraint& constraint, const VocabularyIndex& vocabulary,
                int64_t limit, Random* random) {
  const auto state = constraint.NewState();
  std::string text;
  bool hurries = false;
  for (int64_t left = limit; left > 0; --left) {
    if (state->complete() && !state->can_continue()) return true;
    TokenId id = DrawFrom(TokensOf(MaskOf(state.get(), vocabulary)), vocabulary, random);
    if (hurries || !state->AcceptInTime(id, left - 1)) {
      hurries = true;
      const auto mask = MaskOf(state.get(), vocabulary, left);
      id = DrawFrom(TokensOf(mask), vocabulary, random);
      EXPECT_TRUE(state->Accept(id)) << text << " with " << left << " left";
    }
    if (::testing::Test::HasFailure()) return false;
    text += vocabulary.Bytes(id);
    if (id == kEos) return true;
  }
  return state->complete();
}

TEST(MaskTest, AnswersEndWithinTheLimit) {
  Random random(24);
  // Without longer tokens, no completion is shorter than the estimate.
  const auto bytes = MakeVocabulary(MakeTokens(258, AllBytes()));
  for (const auto& vocabulary : {SmallVocabulary(), PoorVocabulary(), bytes}) {
    for (const ConstraintSpec& spec : Corpus()) {
      const auto compiled = CompileConstraint(spec, vocabulary);
      if (!compiled.ok() || (spec.format != nullptr && HasFreeText(*spec.format))) continue;
      const int64_t shortest = ShortestAnswer(**compiled);
      for (int walk = 0; walk < 30; ++walk) {
        const int64_t limit = shortest + (walk < 10 ? walk / 2 : random.Below(80));
        ASSERT_TRUE(EndsWithin(**compiled, *vocabulary, limit, &random))
            << CanonicalText(spec) << " in " << limit;
      }
    }
  }
}

// Draws a text of at most `most` tokens; empty if there was none.
std::vector<TokenId> DrawWithin(const CompiledConstraint& constraint,
                                const VocabularyIndex& vocabulary, int most, Random* random) {
  const auto state = constraint.NewState();
  std::vector<TokenId> tokens;
  while (static_cast<int>(tokens.size()) < most) {
    if (state->complete() && !state->can_continue()) return tokens;
    const auto mask = MaskOf(state.get(), vocabulary, most - std::ssize(tokens));
    std::vector<TokenId> allowed = TokensOf(mask);
    // Prefers long tokens, so that the text has fewer tokens than bytes.
    TokenId id = DrawFrom(allowed, vocabulary, random);
    for (int i = 0; i < 8; ++i) {
      const TokenId other = DrawFrom(allowed, vocabulary, random);
      if (vocabulary.Bytes(other).size() > vocabulary.Bytes(id).size()) id = other;
    }
    EXPECT_TRUE(state->Accept(id));
    tokens.push_back(id);
    if (id == kEos) return tokens;
  }
  return {};
}

TEST(MaskTest, ALimitThatATextFitsInDoesNotChangeIt) {
  Random random(29);
  const auto& vocabulary = *SmallVocabulary();
  int texts = 0, short_of_bytes = 0;
  for (const ConstraintSpec& spec : Corpus()) {
    const auto constraint = Compile(spec);
    const int64_t shortest = ShortestAnswer(*constraint);
    for (int walk = 0; walk < 12; ++walk) {
      const int most = static_cast<int>(shortest) + 1 + random.Below(20);
      const auto tokens = DrawWithin(*constraint, vocabulary, most, &random);
      if (tokens.empty()) continue;
      ++texts;
      const auto size = std::ssize(tokens);
      for (const int64_t limit : {size, size + 1, size + 2, size + 5, size + 12, size + 40}) {
        short_of_bytes += limit < shortest;
        const auto state = constraint->NewState();
        std::string text;
        for (int64_t i = 0; i < size; ++i) {
          ASSERT_TRUE(state->AcceptInTime(tokens[i], limit - i - 1))
              << spec.text << ": " << text << " + " << vocabulary.Bytes(tokens[i]) << " at " << i
              << " of " << size << ", limit " << limit;
          text += vocabulary.Bytes(tokens[i]);
        }
      }
    }
  }
  EXPECT_GT(texts, 400);
  EXPECT_GT(short_of_bytes, 50);
}

// A constraint of pieces: tokens that the answer has, and single bytes.
TEST(MaskTest, FewLongTokensFitWhereTheirBytesDoNot) {
  std::vector<std::string> tokens = MakeTokens(258, AllBytes());
  const std::vector<std::string> pieces = {"{\"a\": 1, \"o", "pt\": [[2], [\"x", "y\"", "]], \"b",
                                           "\": {\"c\": \"", "long text\"}",     "}"};
  const TokenId first = static_cast<TokenId>(tokens.size());
  tokens.insert(tokens.end(), pieces.begin(), pieces.end());
  const auto vocabulary = MakeVocabulary(tokens);
  const auto constraint = Compile(Schema(R"({"type": "object", "required": ["a", "b"], "properties":
      {"a": {"type": "integer"}, "opt": {}, "b": {"type": "object", "required": ["c"], "properties":
      {"c": {"type": "string", "minLength": 3}}}}})"),
                                  vocabulary);
  const auto count = static_cast<int64_t>(pieces.size());
  for (int64_t limit = count; limit < 60; ++limit) {
    const auto state = constraint->NewState();
    for (int64_t i = 0; i < count; ++i) {
      TokenId id = first + static_cast<TokenId>(i);
      // The last piece has a token of its own.
      if (pieces[i].size() == 1) id = 2 + static_cast<uint8_t>(pieces[i][0]);
      ASSERT_TRUE(state->AcceptInTime(id, limit - i - 1)) << pieces[i] << ", limit " << limit;
    }
    EXPECT_TRUE(state->complete());
  }
  // With fewer tokens than any text needs, the limit is ignored.
  const auto late = constraint->NewState();
  for (int64_t i = 0; i + 1 < count; ++i) {
    EXPECT_TRUE(late->AcceptInTime(first + static_cast<TokenId>(i), 1));
  }
}

TEST(MaskTest, HardAnswersEndWithinTheLimit) {
  Random random(25);
  const auto& vocabulary = *SmallVocabulary();
  for (const NamedSpec& hard : HardSpecs()) {
    SCOPED_TRACE(hard.name);
    const auto constraint = Compile(hard.spec);
    ASSERT_NE(constraint, nullptr);
    const int64_t shortest = ShortestAnswer(*constraint);
    if (shortest > 3000) continue;
    for (int walk = 0; walk < 3; ++walk) {
      ASSERT_TRUE(EndsWithin(*constraint, vocabulary, shortest + 10 * walk, &random));
    }
  }
}

// If computing a mask is cut off, the mask must still contain a token, and only accepted tokens.
TEST(MaskTest, HardMasksHoldOnlyWhatIsAccepted) {
  Random random(26);
  const auto& vocabulary = *SmallVocabulary();
  for (const NamedSpec& hard : HardSpecs()) {
    SCOPED_TRACE(hard.name);
    const auto state = Compile(hard.spec)->NewState();
    for (int i = 0; i < 60; ++i) {
      const auto allowed = TokensOf(MaskOf(state.get(), vocabulary, 60 - i));
      ASSERT_FALSE(allowed.empty());
      for (int j = 0; j < 20; ++j) {
        ASSERT_TRUE(
            state->Clone()->Accept(allowed[random.Below(static_cast<int>(allowed.size()))]));
      }
      const TokenId id = DrawFrom(allowed, vocabulary, &random);
      ASSERT_TRUE(state->Accept(id));
      if (id == kEos) break;
    }
  }
}

TEST(MaskTest, ClonesAreIndependent) {
  Random random(27);
  const auto& vocabulary = *SmallVocabulary();
  for (const ConstraintSpec& spec : Corpus()) {
    const auto constraint = Compile(spec);
    const auto state = constraint->NewState();
    for (int i = 0; i < 25; ++i) {
      const auto mask = MaskOf(state.get(), vocabulary);
      const auto clone = state->Clone();
      for (int j = 0; j < 8; ++j) {
        const auto allowed = TokensOf(MaskOf(clone.get(), vocabulary));
        ASSERT_TRUE(clone->Accept(allowed[random.Below(static_cast<int>(allowed.size()))]));
      }
      ASSERT_EQ(MaskOf(state.get(), vocabulary), mask) << spec.text;
      ASSERT_EQ(MaskOf(state->Clone().get(), vocabulary), mask) << spec.text;
      const TokenId id = DrawFrom(TokensOf(mask), vocabulary, &random);
      ASSERT_TRUE(state->Accept(id));
      if (id == kEos) break;
    }
  }
}

// Threads share a constraint with its cached masks, and use clones of one state.
// A hash is that of the state, not of the text that led to it.
TEST(MaskTest, EqualStatesHaveEqualHashes) {
  const auto constraint = Compile(Schema(R"({"type": "object", "properties": {
      "a": {"type": "integer"}, "b": {"type": "string"}}, "additionalProperties": false})"));
  const auto hash = [&](std::string_view text) {
    const auto state = constraint->NewState();
    for (const char c : text) EXPECT_TRUE(state->Accept(2 + static_cast<uint8_t>(c))) << text;
    const auto clone = state->Clone();
    EXPECT_EQ(clone->StateHash(), state->StateHash());
    return state->StateHash();
  };
  EXPECT_EQ(hash(R"({"a":12,)"), hash(R"({"a":-7,)"));
  EXPECT_EQ(hash(R"({"a":12,"b":"x"})"), hash(R"({"b":"long text"})")) << "both have ended";
  EXPECT_EQ(hash(R"({"b":"one)"), hash(R"({"b":"another)"));
  EXPECT_NE(hash(R"({"a":12,)"), hash(R"({"b":"")"));
  EXPECT_NE(hash("{"), hash(R"({")"));
  EXPECT_NE(hash(R"({"a":1)"), hash(R"({"a":1,)"));
}

TEST(MaskTest, ThreadsDrawTheSameAnswers) {
  const auto& vocabulary = *SmallVocabulary();
  for (const ConstraintSpec& spec :
       {Schema("true"), Corpus()[20], Corpus()[2], Pattern("(a|b.)*")}) {
    const auto constraint = Compile(spec);
    const auto first = constraint->NewState();
    const auto draw = [&](ConstraintState* state) {
      Random random(28);
      std::vector<TokenId> out;
      for (int i = 0; i < 60; ++i) {
        const auto allowed = TokensOf(MaskOf(state, vocabulary, 200 - i));
        out.push_back(DrawFrom(allowed, vocabulary, &random));
        if (!state->Accept(out.back()) || out.back() == kEos) break;
      }
      return out;
    };
    constexpr int kThreads = 4;
    std::vector<std::unique_ptr<ConstraintState>> states;
    for (int i = 0; i < kThreads; ++i) states.push_back(first->Clone());
    std::vector<std::vector<TokenId>> drawn(kThreads);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] { drawn[i] = draw(states[i].get()); });
    }
    for (std::thread& thread : threads) thread.join();
    const auto expected = draw(first.get());
    for (const auto& tokens : drawn) EXPECT_EQ(tokens, expected);
  }
}

}  // namespace
}  // namespace moeserve::testing
