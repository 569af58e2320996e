// The parts of the tokenizer: properties, limits, and cases small enough to be computed by hand.
// tests/tokenizer/parity.py compares the tokenizer with Hugging Face's library.
#include "engine/text/tokenizer/tokenizer.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <random>
#include <thread>

#include "engine/text/tokenizer/added_tokens.h"
#include "engine/text/tokenizer/decoders/decoder.h"
#include "engine/text/tokenizer/decoders/decoder_stages.h"
#include "engine/text/tokenizer/models/bpe_model.h"
#include "engine/text/tokenizer/models/byte_level.h"
#include "engine/text/tokenizer/normalizers/normalizer.h"
#include "engine/text/tokenizer/normalizers/unicode_form.h"
#include "engine/text/tokenizer/pipeline_tokenizer.h"
#include "engine/text/tokenizer/pre_tokenizer.h"
#include "engine/text/tokenizer/regex.h"
#include "engine/text/tokenizer/regex_syntax.h"
#include "engine/text/tokenizer/utf8.h"
#include "gtest/gtest.h"

namespace moeserve {
namespace {

using Strings = std::vector<std::string>;

std::string ByteToken(int byte) { return std::string(ByteLevelChar(static_cast<uint8_t>(byte))); }

// Returns a model whose vocabulary has all bytes, followed by the results of `merges` in order.
BpeConfig ConfigWith(const std::vector<std::pair<std::string, std::string>>& merges) {
  BpeConfig config;
  for (int byte = 0; byte < 256; ++byte) config.vocab.emplace_back(ByteToken(byte), byte);
  TokenId next = 256;
  for (const auto& merge : merges) {
    config.vocab.emplace_back(merge.first + merge.second, next++);
    config.merges.push_back(merge);
  }
  return config;
}

// Merges that overlap, of which some are never used, with letters, spaces and parts of multi-byte
// characters.
std::vector<std::pair<std::string, std::string>> SampleMerges() {
  return {{"t", "h"}, {"th", "e"},  {"Ġ", "the"}, {"a", "a"},       {"aa", "aa"},
          {"Ġ", "Ġ"}, {"ĠĠ", "ĠĠ"}, {"b", "a"},   {"a", "b"},       {"ab", "ab"},
          {"ð", "Ł"}, {"Ã", "©"},   {"ðŁ", "ĺ"},  {"aaaa", "aaaa"}, {"ä", "¸"}};
}

std::unique_ptr<Decoder> ByteLevelChain() {
  std::vector<std::unique_ptr<DecoderStage>> stages;
  stages.push_back(std::make_unique<ByteLevelStage>());
  return std::make_unique<ChainDecoder>(std::move(stages));
}

std::unique_ptr<Tokenizer> MakeTokenizer(std::vector<AddedToken> added = {}) {
  PipelineParts parts;
  parts.model = *BpeModel::Create(ConfigWith(SampleMerges()));
  for (size_t i = 0; i < added.size(); ++i) {
    added[i].id = static_cast<TokenId>(parts.model->token_count() + i);
  }
  parts.added_tokens = *AddedTokens::Create(std::move(added), *parts.model, nullptr);
  parts.pre_tokenizer = *ByteLevelPreTokenizer::Create(false, true);
  parts.decoder = ByteLevelChain();
  return *PipelineTokenizer::Create(std::move(parts));
}

AddedToken Special(std::string content) {
  AddedToken token;
  token.content = std::move(content);
  token.special = true;
  return token;
}

Strings Spell(const Tokenizer& tokenizer, std::string_view text, bool parse_special = true) {
  const auto ids = tokenizer.Encode(text, false, parse_special);
  EXPECT_TRUE(ids.ok()) << ids.status();
  Strings out;
  if (ids.ok()) {
    for (const TokenId id : *ids) out.emplace_back(tokenizer.TokenString(id));
  }
  return out;
}

std::string RandomText(std::mt19937& random, int characters) {
  static constexpr char32_t kTops[] = {0x80, 0x80, 0x800, 0x3000, 0x10000, 0x110000};
  std::string text;
  while (characters > 0) {
    const char32_t c = random() % kTops[random() % 6];
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    AppendUtf8(random() % 4 == 0 ? U' ' : c, &text);
    --characters;
  }
  return text;
}

std::string RandomBytes(std::mt19937& random, int size) {
  // Bytes that begin, continue and break UTF-8 characters, more often than uniform random bytes
  // would.
  static constexpr uint8_t kBytes[] = {0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1,
                                       0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5};
  std::string bytes;
  for (int i = 0; i < size; ++i) {
    bytes.push_back(static_cast<char>(random() % 4 ? kBytes[random() % 20] : random() % 256));
  }
  return bytes;
}

std::string Lossy(std::string_view bytes) {
  Utf8Assembler assembler;
  std::string out;
  assembler.Push(bytes, &out);
  assembler.Finish(&out);
  return out;
}

TEST(Utf8, ValidityAtTheEdges) {
  for (const char* valid : {"", "a", "\x7F", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF",
                            "\xEE\x80\x80", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(IsValidUtf8(valid)) << ::testing::PrintToString(valid);
  }
  for (const char* invalid :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xC2", "\xE0\x9F\x80", "\xED\xA0\x80", "\xE2\x82",
        "\xF0\x8F\x80\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "12345678\xFF", "\xC2\x41"}) {
    EXPECT_FALSE(IsValidUtf8(invalid)) << ::testing::PrintToString(invalid);
  }
}

TEST(Utf8, EveryCodePointGoesAndComes) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    AppendUtf8(c, &text);
    size_t pos = 0;
    ASSERT_EQ(NextCodePoint(text, &pos), c);
    ASSERT_EQ(pos, text.size());
    ASSERT_TRUE(IsValidUtf8(text));
  }
}

TEST(Utf8, AssemblerReplacesMaximalSubparts) {
  // The example of the Unicode standard, table 3-8.
  EXPECT_EQ(Lossy("a\xF1\x80\x80\xE1\x80\xC2"
                  "b\x80"
                  "c\x80\xBF"
                  "d"),
            "a���b�c��d");
  EXPECT_EQ(Lossy("\xED\xA0\x80"), "���");
  EXPECT_EQ(Lossy("\xF0\x90\x80"), "�");
  EXPECT_EQ(Lossy("é中😀"), "é中😀");
}

TEST(Utf8, AssemblerDoesNotDependOnWhereBytesAreCut) {
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    const std::string bytes = RandomBytes(random, 1 + random() % 30);
    Utf8Assembler assembler;
    std::string joined;
    for (size_t i = 0; i < bytes.size();) {
      const size_t size = std::min<size_t>(1 + random() % 3, bytes.size() - i);
      std::string piece;
      assembler.Push(std::string_view(bytes).substr(i, size), &piece);
      ASSERT_TRUE(IsValidUtf8(piece));
      joined += piece;
      i += size;
    }
    assembler.Finish(&joined);
    ASSERT_EQ(joined, Lossy(bytes));
  }
}

TEST(ByteLevel, AlphabetIsOneToOne) {
  std::map<std::string, int> seen;
  for (int byte = 0; byte < 256; ++byte) {
    std::string back;
    ASSERT_TRUE(AppendByteLevelBytes(ByteToken(byte), &back));
    ASSERT_EQ(back, std::string(1, static_cast<char>(byte)));
    ASSERT_TRUE(seen.emplace(ByteToken(byte), byte).second);
  }
  EXPECT_EQ(ByteToken(' '), "Ġ");
  EXPECT_EQ(ByteToken('\n'), "Ċ");
  EXPECT_EQ(ByteToken(0xAD), "Ń");
  std::string kept = "x";
  EXPECT_FALSE(AppendByteLevelBytes("a中", &kept));
  EXPECT_EQ(kept, "x");
}

Strings Matches(const std::string& pattern, std::string_view text) {
  const auto translated = TranslateRegex(pattern);
  EXPECT_TRUE(translated.ok()) << translated.status();
  if (!translated.ok()) return {};
  const auto regex = Regex::Compile(*translated);
  EXPECT_TRUE(regex.ok()) << regex.status();
  if (!regex.ok()) return {};
  Strings out;
  Regex::Finder finder(&*regex, text);
  for (Regex::Match match; finder.Next(&match);) {
    out.emplace_back(text.substr(match.begin, match.end - match.begin));
  }
  EXPECT_TRUE(finder.status().ok()) << finder.status();
  return out;
}

TEST(Regex, WhereThePatternLanguagesDiffer) {
  EXPECT_EQ(Matches("\\s", "a\u180e\u3000b\u0085"), (Strings{"\u3000", "\u0085"}));
  EXPECT_EQ(Matches("a$", "a\nba"), (Strings{"a", "a"}));
  EXPECT_EQ(Matches("^b", "b\nb"), (Strings{"b", "b"}));
  EXPECT_EQ(Matches("\\v", "\n\v"), Strings{"\v"});
  EXPECT_EQ(Matches("a{,2}b", "aaab"), Strings{"aab"});
  EXPECT_EQ(Matches("a{x", "a{x"), Strings{"a{x"});
  EXPECT_EQ(Matches("(?i:'s)", "'S'\u017f's"), (Strings{"'S", "'\u017f", "'s"}));
  EXPECT_EQ(Matches("\\p{L}", "\U000105c0"), Strings{"\U000105c0"});  // Unicode 16
  EXPECT_EQ(Matches("x*", "axxb"), (Strings{"", "xx", ""}));
  EXPECT_EQ(Matches("\\s+$", "a  \n b  "), (Strings{"  ", "  "}));
}

TEST(Regex, RefusesWhatItCannotTranslate) {
  for (const char* pattern :
       {"[a&&b]", "[a[b]]", "[[:alpha:]]", "\\h",         "\\R",         "\\X",      "\\K",
        "\\G",    "\\b",    "\\1",         "(?<n>a)",     "(?m:a)",      "(?x)a",    "a(?i)b",
        "a{2}+",  "a{2}?",  "a**",         "*a",          "(?=a)*",      "^*",       "a)",
        "(a",     "[a",     "[]",          "[b-a]",       "[a-\\d]",     "[\\d-z]",  "\\p{Nope}",
        "\\p{C}", "\\pL",   "\\p{L",       "\\x{110000}", "\\x{D800}",   "\\xFF",    "\\u12",
        "\\",     "[\\b]",  "(?i:é)",      "(?i:ss)",     "(?i:\\p{L})", "[\\P{L}]", "a{99999}",
        "a{3,2}", "(?#c)a"}) {
    const auto translated = TranslateRegex(pattern);
    EXPECT_FALSE(translated.ok()) << pattern << " became " << translated.value_or("");
  }
  EXPECT_FALSE(TranslateRegex(std::string(100000, '(')).ok());
}

TEST(Regex, ExponentialPatternIsAnErrorNotAHang) {
  const auto regex = Regex::Compile(*TranslateRegex("(a+)+b"));
  ASSERT_TRUE(regex.ok());
  const std::string text = std::string(64, 'a') + "cb";
  Regex::Finder finder(&*regex, text);
  Regex::Match match;
  EXPECT_FALSE(finder.Next(&match));
  EXPECT_EQ(finder.status().code(), absl::StatusCode::kInvalidArgument);
}

Strings Split(const std::string& pattern, SplitBehavior behavior, bool inverted,
              std::string_view text) {
  SplitPreTokenizer split(*Regex::Compile(*TranslateRegex(pattern)), behavior, inverted);
  Pieces pieces{.texts = {text}};
  TextArena arena;
  EXPECT_TRUE(split.Apply(&pieces, &arena).ok());
  return Strings(pieces.texts.begin(), pieces.texts.end());
}

TEST(PreTokenizer, SplitBehaviors) {
  const char* text = "the-final--countdown";
  EXPECT_EQ(Split("-", SplitBehavior::kRemoved, false, text),
            (Strings{"the", "final", "countdown"}));
  EXPECT_EQ(Split("-", SplitBehavior::kIsolated, false, text),
            (Strings{"the", "-", "final", "-", "-", "countdown"}));
  EXPECT_EQ(Split("-", SplitBehavior::kMergedWithPrevious, false, text),
            (Strings{"the-", "final-", "-", "countdown"}));
  EXPECT_EQ(Split("-", SplitBehavior::kMergedWithNext, false, text),
            (Strings{"the", "-final", "-", "-countdown"}));
  EXPECT_EQ(Split("-", SplitBehavior::kContiguous, false, text),
            (Strings{"the", "-", "final", "--", "countdown"}));
  EXPECT_EQ(Split("[a-z]+", SplitBehavior::kRemoved, true, text),
            (Strings{"the", "final", "countdown"}));
}

TEST(PreTokenizer, Gpt2Pattern) {
  auto made = ByteLevelPreTokenizer::Create(true, true);
  ASSERT_TRUE(made.ok());
  Pieces pieces{.texts = {"How's  it going? 12é\n\n x"}};
  TextArena arena;
  ASSERT_TRUE((*made)->Apply(&pieces, &arena).ok());
  EXPECT_EQ(Strings(pieces.texts.begin(), pieces.texts.end()),
            (Strings{" How", "'s", " ", " it", " going", "?", " 12", "é", "\n\n", " x"}));
}

TEST(Normalizer, FormC) {
  const UnicodeFormNormalizer nfc(/*composes=*/true, /*compatible=*/false);
  EXPECT_EQ(*nfc.Normalize("e\u0301"), "é");
  EXPECT_EQ(*nfc.Normalize("a\u0323\u0307"), "ạ\u0307");
  EXPECT_EQ(*nfc.Normalize("a\u0307\u0323"), "ạ\u0307");
  EXPECT_EQ(*nfc.Normalize("\u212b\u1112\u1161\u11ab"), "Å한");
  EXPECT_EQ(*nfc.Normalize("\u0958"), "\u0915\u093c");  // excluded from composition
  EXPECT_TRUE(nfc.IsUnchanged("naïve ÀÿŁ"));
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    const std::string once = *nfc.Normalize(RandomText(random, 50));
    ASSERT_TRUE(IsValidUtf8(once));
    ASSERT_EQ(*nfc.Normalize(once), once);
  }
}

TEST(BpeModel, LowestRankFirstThenLeftmost) {
  const auto tokenizer = MakeTokenizer();
  EXPECT_EQ(Spell(*tokenizer, "the the aaa"), (Strings{"the", "Ġthe", "Ġ", "aa", "a"}));
  EXPECT_EQ(Spell(*tokenizer, "abab"), (Strings{"a", "ba", "b"}));
  EXPECT_EQ(Spell(*tokenizer, "aaaaaaa"), (Strings{"aaaa", "aa", "a"}));
  EXPECT_EQ(Spell(*tokenizer, ""), Strings{});
}

TEST(BpeModel, IgnoreMergesTakesWholePieces) {
  BpeConfig config = ConfigWith(SampleMerges());
  config.ignore_merges = true;
  const auto model = *BpeModel::Create(std::move(config));
  std::vector<TokenId> ids;
  ASSERT_TRUE(model->Tokenize("abab", &ids).ok());
  EXPECT_EQ(ids, std::vector<TokenId>{*model->TokenToId("abab")});
}

TEST(BpeModel, ShortAndLongPiecesAgree) {
  // Tokenizes the same text twice: as one piece, longer than the limit of the simple merging
  // algorithm, and as shorter pieces with a separator that merges with nothing.
  const auto model = *BpeModel::Create(ConfigWith(SampleMerges()));
  std::mt19937 random(9);
  for (int round = 0; round < 500; ++round) {
    std::string joined;
    std::vector<TokenId> expected;
    for (int i = 0; i < 12; ++i) {
      std::string piece;
      for (int k = random() % 20; k >= 0; --k) piece += "ab the"[random() % 6];
      ASSERT_TRUE(model->Tokenize(piece, &expected).ok());
      ASSERT_TRUE(model->Tokenize("#", &expected).ok());
      joined += piece + "#";
    }
    std::vector<TokenId> ids;
    ASSERT_TRUE(model->Tokenize(joined, &ids).ok());
    ASSERT_EQ(ids, expected);
  }
}

TEST(BpeModel, UnknownSymbols) {
  BpeConfig config;
  config.byte_level = false;
  config.vocab = {{"<unk>", 0}, {"a", 1}, {"<0xC3>", 2}, {"<0xA9>", 3}};
  const auto encode = [&](std::string_view text) {
    std::vector<TokenId> ids;
    EXPECT_TRUE((*BpeModel::Create(config))->Tokenize(text, &ids).ok());
    return ids;
  };
  using Ids = std::vector<TokenId>;
  EXPECT_EQ(encode("axxéa"), (Ids{1, 1}));
  config.unk_token = "<unk>";
  EXPECT_EQ(encode("axxéa"), (Ids{1, 0, 0, 0, 1}));
  config.fuse_unk = true;
  EXPECT_EQ(encode("axxéa"), (Ids{1, 0, 1}));
  config.byte_fallback = true;
  EXPECT_EQ(encode("aéa"), (Ids{1, 2, 3, 1}));
}

TEST(AddedTokens, LeftmostLongestAndFlags) {
  AddedToken stripped = Special("<x>");
  stripped.lstrip = stripped.rstrip = true;
  AddedToken word = Special("cat");
  word.single_word = true;
  word.special = false;
  const auto tokenizer = MakeTokenizer({Special("<s>"), Special("<s>>"), stripped, word});
  EXPECT_EQ(Spell(*tokenizer, "a<s>>b<s>"), (Strings{"a", "<s>>", "b", "<s>"}));
  EXPECT_EQ(Spell(*tokenizer, "a \n<x>\u3000b"), (Strings{"a", "<x>", "b"}));
  EXPECT_EQ(Spell(*tokenizer, "cat"), Strings{"cat"});
  EXPECT_EQ(Spell(*tokenizer, "cats")[0], "c");
  EXPECT_EQ(Spell(*tokenizer, "écat")[0], "Ã©");
  EXPECT_EQ(Spell(*tokenizer, "<s>", /*parse_special=*/false), (Strings{"<", "s", ">"}));
  EXPECT_EQ(Spell(*tokenizer, "cat", /*parse_special=*/false), Strings{"cat"});
}

TEST(Tokenizer, SpecialTokensInDecoding) {
  const auto tokenizer = MakeTokenizer({Special("<s>")});
  const auto ids = *tokenizer->Encode("<s>the", false);
  EXPECT_EQ(*tokenizer->Decode(ids, false), "<s>the");
  EXPECT_EQ(*tokenizer->Decode(ids, true), "the");
  EXPECT_TRUE(tokenizer->IsSpecial(ids[0]));
  EXPECT_FALSE(tokenizer->IsSpecial(ids[1]));
  EXPECT_EQ(tokenizer->TokenBytes(ids[0]), "<s>");
  EXPECT_EQ(tokenizer->TokenBytes(*tokenizer->TokenToId("Ġthe")), " the");
  EXPECT_EQ(tokenizer->vocab_size(), ids[0] + 1);
}

TEST(Tokenizer, RefusesWhatIsNoTextOrNoToken) {
  const auto tokenizer = MakeTokenizer();
  EXPECT_EQ(tokenizer->Encode("\xFF", false).status().code(), absl::StatusCode::kInvalidArgument);
  for (const TokenId id : {-1, tokenizer->vocab_size(), INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(tokenizer->Decode(std::vector<TokenId>{id}, false).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(tokenizer->TokenBytes(id), "");
    EXPECT_EQ(tokenizer->TokenString(id), "");
    EXPECT_FALSE(tokenizer->IsSpecial(id));
  }
}

TEST(Tokenizer, RoundTripOfAnyText) {
  const auto tokenizer = MakeTokenizer({Special("<s>")});
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const std::string text = RandomText(random, random() % 120);
    const auto ids = tokenizer->Encode(text, false);
    ASSERT_TRUE(ids.ok());
    ASSERT_EQ(*tokenizer->Decode(*ids, false), text);
  }
}

TEST(IncrementalDecoder, PiecesAreWholeCharactersAndJoinToDecode) {
  const auto tokenizer = MakeTokenizer({Special("<s>"), Special("中")});
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::vector<TokenId> ids;
    if (round % 2 == 0) {
      for (int i = random() % 40; i >= 0; --i) ids.push_back(random() % tokenizer->vocab_size());
    } else {
      ids = *tokenizer->Encode(RandomText(random, 20), false);
    }
    for (const bool skip : {false, true}) {
      IncrementalDecoder decoder(tokenizer.get(), skip);
      std::string joined;
      for (const TokenId id : ids) {
        const std::string piece = decoder.Push(id);
        ASSERT_TRUE(IsValidUtf8(piece));
        joined += piece;
      }
      joined += decoder.Finish();
      ASSERT_EQ(joined, *tokenizer->Decode(ids, skip));
    }
  }
}

TEST(IncrementalDecoder, HoldsBackHalfACharacter) {
  const auto tokenizer = MakeTokenizer();
  IncrementalDecoder decoder(tokenizer.get(), true);
  EXPECT_EQ(decoder.Push(0xF0), "");
  EXPECT_EQ(decoder.Push(0x9F), "");
  EXPECT_EQ(decoder.Push(0x98), "");
  EXPECT_EQ(decoder.Push(0x80), "😀");
  EXPECT_EQ(decoder.Push(0xE4), "");
  EXPECT_EQ(decoder.Push('x'), "\uFFFDx");
  EXPECT_EQ(decoder.Push(0xC3), "");
  EXPECT_EQ(decoder.Finish(), "\uFFFD");
}

// Special tokens that are to be kept are decoded although the others are left out.
TEST(IncrementalDecoder, KeepsTheGivenSpecialTokens) {
  const auto tokenizer = MakeTokenizer({Special("<s>"), Special("[CALL]")});
  const TokenId call = *tokenizer->TokenToId("[CALL]");
  const TokenId start = *tokenizer->TokenToId("<s>");
  const std::vector<TokenId> ids = {start, 'a', call, 'b', start};
  for (const bool keep : {false, true}) {
    const std::vector<TokenId> kept = {call};
    IncrementalDecoder decoder(tokenizer.get(), /*skip_special_tokens=*/true,
                               keep ? std::span<const TokenId>(kept) : std::span<const TokenId>());
    std::string text;
    for (const TokenId id : ids) text += decoder.Push(id);
    EXPECT_EQ(text + decoder.Finish(), keep ? "a[CALL]b" : "ab");
  }
}

TEST(IncrementalDecoder, JoinedSpellings) {
  ChainDecoder decoder({}, " ");
  const auto state = decoder.Start();
  std::string out;
  for (const char* token : {"a", "b", "c"}) state->Push(token, &out);
  state->Finish(&out);
  EXPECT_EQ(out, "a b c");
}

// A tokenizer that overrides only the required functions, as other tokenizers and test doubles do.
TEST(IncrementalDecoder, WorksOnAnyTokenizer) {
  class OneByteTokenizer : public Tokenizer {
   public:
    absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, bool, bool) const override {
      return std::vector<TokenId>(text.begin(), text.end());
    }
    absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view text,
                                                       std::span<const TextSpan>,
                                                       bool) const override {
      return Encode(text, false, false);
    }
    absl::StatusOr<std::string> Decode(std::span<const TokenId>, bool) const override { return ""; }
    std::string TokenBytes(TokenId id) const override {
      return std::string(1, static_cast<char>(id));
    }
    std::string_view TokenString(TokenId) const override { return ""; }
    std::optional<TokenId> TokenToId(std::string_view) const override { return std::nullopt; }
    bool IsSpecial(TokenId id) const override { return id == 0; }
    int vocab_size() const override { return 256; }
  };
  const OneByteTokenizer tokenizer;
  IncrementalDecoder decoder(&tokenizer, true);
  EXPECT_EQ(decoder.Push(0xC3), "");
  EXPECT_EQ(decoder.Push(0), "");
  EXPECT_EQ(decoder.Push(0xA9), "é");
  EXPECT_EQ(decoder.Finish(), "");
}

std::vector<AddedToken> SpecialTokens() {
  const auto special = [](std::string content) {
    AddedToken token;
    token.content = std::move(content);
    token.special = true;
    return token;
  };
  AddedToken plain;
  plain.content = "<think>";
  AddedToken normalized = special("<e>");
  normalized.normalized = true;
  return {special("<|end|>"), special("<|"), special("ab<"), plain, normalized};
}

TEST(TrustedEncoding, IsEncodingWhereAllOrNothingIsTrusted) {
  const auto tokenizer = MakeTokenizer(SpecialTokens());
  std::mt19937 random(7);
  const Strings pieces = {"<|end|>", "<|", "end|>", "<think>", "ab", "<", " ", "é", "<e>", "xyz"};
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 8; ++i) text += pieces[random() % pieces.size()];
    const std::vector<TextSpan> all = {{0, text.size()}};
    EXPECT_EQ(*tokenizer->EncodeTrusted(text, all, true), *tokenizer->Encode(text, true));
    const auto untrusted = tokenizer->EncodeTrusted(text, {}, true);
    for (const TokenId id : *untrusted) {
      EXPECT_FALSE(tokenizer->IsSpecial(id)) << text;
    }
    // Trusted and untrusted spans alternate. Special tokens may come from trusted spans only.
    std::vector<TextSpan> spans;
    for (size_t at = random() % 4; at < text.size(); at += 1 + random() % 6) {
      const size_t end = std::min(text.size(), at + 1 + random() % 9);
      spans.push_back({at, end});
      at = end;
    }
    const auto ids = *tokenizer->EncodeTrusted(text, spans, true);
    EXPECT_EQ(*tokenizer->Decode(ids, false), text);
    size_t at = 0;
    for (const TokenId id : ids) {
      const size_t size = tokenizer->TokenBytes(id).size();
      if (tokenizer->IsSpecial(id)) {
        EXPECT_TRUE(std::any_of(spans.begin(), spans.end(), [&](const TextSpan& span) {
          return span.begin <= at && at + size <= span.end;
        })) << text;
      }
      at += size;
    }
  }
}

TEST(TrustedEncoding, OtherTextCannotHideATokenOfTheTemplate) {
  const auto tokenizer = MakeTokenizer(SpecialTokens());
  // The token "ab<" begins before the trusted "<|end|>" and would consume its first character.
  const std::vector<TextSpan> end = {{2, 9}};
  const TokenId id = *tokenizer->TokenToId("<|end|>");
  EXPECT_EQ(tokenizer->EncodeTrusted("ab<|end|>", end, false)->back(), id);
  // Only the "<|" of "<|end|>" is trusted.
  const std::vector<TextSpan> start = {{0, 2}};
  EXPECT_EQ(tokenizer->EncodeTrusted("<|end|>", start, false)->front(),
            *tokenizer->TokenToId("<|"));
  // A token that is not special is found in untrusted text, too.
  EXPECT_EQ(tokenizer->EncodeTrusted("<think>", {}, false)->size(), 1u);
}

// Returns the CPU time, which other programs on the machine hardly change.
double SecondsToEncode(const Tokenizer& tokenizer, const std::string& text) {
  double best = 1e9;
  for (int i = 0; i < 2; ++i) {
    const std::clock_t start = std::clock();
    EXPECT_TRUE(tokenizer.Encode(text, false).ok());
    best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  return best;
}

std::unique_ptr<Tokenizer> WithSplit(const std::string& pattern) {
  PipelineParts parts;
  parts.model = *BpeModel::Create(ConfigWith(SampleMerges()));
  parts.added_tokens = *AddedTokens::Create({}, *parts.model, nullptr);
  parts.pre_tokenizer = std::make_unique<SplitPreTokenizer>(
      *Regex::Compile(*TranslateRegex(pattern)), SplitBehavior::kIsolated, false);
  parts.decoder = ByteLevelChain();
  return *PipelineTokenizer::Create(std::move(parts));
}

// With quadratic work, eight times the text takes 64 times as long. With linear work, a logarithmic
// factor and a noisy machine, it stays far below 40 times.
TEST(Tokenizer, TimeGrowsLinearlyOnRuns) {
  const auto gpt2 = MakeTokenizer();
  const auto end_of_line = WithSplit("\\s+$");
  const auto llama = WithSplit(
      "(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
      "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+");
  const std::pair<const Tokenizer*, Strings> cases[] = {
      {gpt2.get(), {"a", " ", "\n", "!", "é", "ab"}},
      {end_of_line.get(), {" ", "\n"}},
      {llama.get(), {"a", " ", "\n", "7"}}};
  for (const auto& [tokenizer, units] : cases) {
    for (const std::string& unit : units) {
      std::string small;
      while (small.size() < (128 << 10)) small += unit;
      std::string large;
      while (large.size() < (1 << 20)) large += unit;
      // The character after a run decides whether a pattern that searches for the run's end must
      // backtrack.
      small += "x";
      large += "x";
      const double small_seconds = SecondsToEncode(*tokenizer, small);
      EXPECT_LT(SecondsToEncode(*tokenizer, large), 40 * small_seconds + 0.05)
          << "unit \"" << unit << "\"";
    }
  }
}

// The searches of all pieces count together.
TEST(Tokenizer, ATextThatNeedsTooMuchWorkIsRefused) {
  const auto tokenizer = WithSplit("(a|a){0,20}b|a| ");
  EXPECT_TRUE(tokenizer->Encode("b aab", false).ok());
  std::string text;
  for (int i = 0; i < 200; ++i) text += "aaaaaaaaaaaaaaaaaaaaaaaa ";
  const auto ids = tokenizer->Encode(text, false);
  EXPECT_TRUE(absl::IsInvalidArgument(ids.status())) << ids.status();
  EXPECT_TRUE(tokenizer->Encode("b aab", false).ok());  // the next text has its own limit
}

TEST(Tokenizer, ManyThreadsShareOne) {
  const auto tokenizer = MakeTokenizer({Special("<s>")});
  const std::string text = "the cat <s> aaaa abab é中😀  the";
  const auto expected = *tokenizer->Encode(text, false);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        const auto ids = tokenizer->Encode(text, false);
        if (!ids.ok() || *ids != expected || *tokenizer->Decode(*ids, false) != text) ++wrong[t];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace moeserve
