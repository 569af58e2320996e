// Tokenizers of other files than tokenizer.json: SentencePiece models, tiktoken vocabularies, and
// vocab.json with merges.txt. Random damage must not crash a reader. tests/tokenizer/parity.py
// compares the tokenizers with the programs that define them.
#include "model_loaders/tokenizer/vocab_files.h"

#include <bit>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/escaping.h"
#include "engine/text/tokenizer/models/sentence_piece_model.h"
#include "engine/text/tokenizer/normalizers/character_map.h"
#include "engine/text/tokenizer/utf8.h"
#include "gtest/gtest.h"
#include "model_loaders/tokenizer/protobuf_reader.h"
#include "model_loaders/tokenizer/sentence_piece_file.h"
#include "model_loaders/tokenizer/tokenizer_folder.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

using Ids = std::vector<TokenId>;

std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
  return out;
}

std::string NumberField(int number, uint64_t value) {
  return Varint(static_cast<uint64_t>(number) << 3) + Varint(value);
}

std::string BytesField(int number, std::string_view bytes) {
  return Varint(static_cast<uint64_t>(number) << 3 | 2) + Varint(bytes.size()) + std::string(bytes);
}

std::string Piece(std::string_view text, float score, PieceType type) {
  constexpr uint64_t kTypes[] = {1, 2, 3, 4, 5, 6};  // in the order of PieceType
  std::string out = BytesField(1, text) + Varint(2 << 3 | 5);
  const uint32_t bits = std::bit_cast<uint32_t>(score);
  for (int i = 0; i < 4; ++i) out.push_back(static_cast<char>(bits >> (8 * i)));
  return BytesField(1, out + NumberField(3, kTypes[static_cast<int>(type)]));
}

// Ids: 0 <unk>, 1 <s>, 2 </s>, 3 <u>, 4 to 259 bytes, then "▁", "a", "b", "ab", "▁a".
std::string ModelFile(int model_type, const std::string& more = "") {
  std::string file = Piece("<unk>", 0, PieceType::kUnknown) + Piece("<s>", 0, PieceType::kControl) +
                     Piece("</s>", 0, PieceType::kControl) +
                     Piece("<u>", 0, PieceType::kUserDefined);
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    file += Piece(name, 0, PieceType::kByte);
  }
  file += Piece("▁", -3, PieceType::kNormal) + Piece("a", -2, PieceType::kNormal) +
          Piece("b", -2.5, PieceType::kNormal) + Piece("ab", -4.5, PieceType::kNormal) +
          Piece("▁a", -4, PieceType::kNormal);
  return file + BytesField(2, NumberField(3, model_type) + NumberField(35, 1)) + more;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseVocabulary(std::string_view data,
                                                           const TokenizerDetails& details = {}) {
  return ParseSentencePieceModel(data, "tokenizer.model", details);
}

TEST(SentencePieceFile, Unigram) {
  const auto tokenizer = ParseVocabulary(ModelFile(1));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  // "▁a" scores more than "▁" and "a"; "ab" as much as "a" and "b", and it is found first.
  EXPECT_EQ(*(*tokenizer)->Encode("  a  bab ", true), (Ids{264, 260, 262, 263}));
  EXPECT_EQ(*(*tokenizer)->Encode("<u>é", true), (Ids{260, 3, 4 + 0xC3, 4 + 0xA9}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{1, 264, 260, 263, 0, 2}, true), "a ab \u2047 ");
  EXPECT_EQ((*tokenizer)->vocab_size(), 265);
}

TEST(SentencePieceFile, BytePairs) {
  const auto tokenizer = ParseVocabulary(ModelFile(2));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  // "▁a" has a higher score than "ab".
  EXPECT_EQ(*(*tokenizer)->Encode("ab bab", true), (Ids{264, 262, 260, 262, 263}));
}

// SentencePiece takes text that spells a control piece for ordinary text. A chat template, whose
// text is trusted, can write control pieces.
TEST(SentencePieceFile, ControlPiecesOnlyInTrustedText) {
  TokenizerDetails details;
  details.config.tokenizer_class = "LlamaTokenizer";
  AddedToken chat;
  chat.id = 300;
  chat.content = "<chat>";
  chat.special = true;
  details.added_tokens = {chat};
  const auto tokenizer = ParseVocabulary(ModelFile(2), details);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const Ids plain = {1, 260, 4 + '<', 4 + 's', 4 + '>', 261};
  EXPECT_EQ(*(*tokenizer)->Encode("<s>a", true), plain);
  EXPECT_EQ(*(*tokenizer)->EncodeTrusted("<s>a", {}, true), plain);
  const std::vector<TextSpan> trusted = {{0, 3}};
  EXPECT_EQ(*(*tokenizer)->EncodeTrusted("<s>a", trusted, false), (Ids{1, 264}));
  EXPECT_EQ(*(*tokenizer)->Encode("a<chat>a", false), (Ids{264, 300, 264}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{1, 264, 300}, false), "<s> a<chat>");
  EXPECT_TRUE((*tokenizer)->IsSpecial(1));
}

TEST(SentencePieceFile, IncrementalDecodingEqualsDecoding) {
  const auto tokenizer = ParseVocabulary(ModelFile(1));
  ASSERT_TRUE(tokenizer.ok());
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    Ids ids(random() % 12);
    constexpr TokenId kChosen[] = {0, 1, 3, 4 + 0xE4, 4 + 0xB8, 4 + 0xAD, 4 + 'x', 260, 264};
    for (TokenId& id : ids) id = kChosen[random() % std::size(kChosen)];
    for (const bool skip : {true, false}) {
      IncrementalDecoder decoder(tokenizer->get(), skip);
      std::string text;
      for (const TokenId id : ids) {
        const std::string part = decoder.Push(id);
        ASSERT_TRUE(IsValidUtf8(part));
        text += part;
      }
      EXPECT_EQ(text + decoder.Finish(), *(*tokenizer)->Decode(ids, skip));
    }
  }
}

TEST(SentencePieceFile, Refusals) {
  const auto message = [](const std::string& data, const TokenizerDetails& details = {}) {
    return std::string(ParseVocabulary(data, details).status().message());
  };
  const auto expect = [](const std::string& found, std::string_view wanted) {
    EXPECT_NE(found.find(wanted), std::string::npos) << found;
    EXPECT_EQ(found.find("tokenizer.model: "), 0u) << found;
  };
  expect(message(""), "expected a SentencePiece model, found damaged data");
  expect(message(ModelFile(3)), "model_type: expected UNIGRAM (1) or BPE (2), found 3");
  expect(message(ModelFile(1, Piece("ab", 0, PieceType::kNormal))), "\"ab\" is listed twice");
  expect(message(ModelFile(1, Piece("", 0, PieceType::kNormal))), "piece 265: expected 1 to 1024");
  expect(message(ModelFile(1, Piece("x", NAN, PieceType::kNormal))), "its score is not finite");
  expect(message(ModelFile(1, Piece("x", 0, PieceType::kUnknown))),
         "expected one piece of type UNKNOWN, found 2");
  expect(message(ModelFile(1, Piece("x", 0, PieceType::kByte))),
         "expected 256 pieces of type BYTE");
  expect(message(ModelFile(1, BytesField(2, NumberField(35, 0)))), "byte_fallback is false");
  expect(message(ModelFile(1, Piece("\xFF", 0, PieceType::kNormal))), "not UTF-8");
  expect(message(ModelFile(1, BytesField(3, BytesField(2, "ab")))),
         "precompiled_charsmap: expected");
  expect(message(ModelFile(1, BytesField(5, BytesField(2, "ab")))), "denormalizer_spec");
  expect(message(ModelFile(1, BytesField(1, NumberField(3, 7)))), "found 7");
  TokenizerDetails details;
  details.config.add_bos_token = true;
  details.config.bos_token = "<bos>";
  expect(message(ModelFile(1), details), "there is no token \"<bos>\"");
  AddedToken token;
  token.id = 1;
  token.content = "<bos>";
  details.added_tokens = {token};
  expect(message(ModelFile(1), details), "has \"<bos>\" as token 1, found \"<s>\"");
}

// Flips, cuts and copies bytes of `data`.
std::string Damaged(std::string data, std::mt19937& random) {
  for (int edits = 1 + static_cast<int>(random() % 4); edits > 0 && !data.empty(); --edits) {
    const size_t at = random() % data.size();
    switch (random() % 4) {
      case 0:
        data[at] = static_cast<char>(random());
        break;
      case 1:
        data.erase(at, 1 + random() % 8);
        break;
      case 2:
        data.insert(at, data.substr(random() % data.size(), random() % 32));
        break;
      default:
        if (random() % 8 == 0) data.resize(at);
    }
  }
  return data;
}

void UseVocabulary(const absl::StatusOr<std::unique_ptr<Tokenizer>>& tokenizer) {
  if (!tokenizer.ok()) {
    EXPECT_TRUE(IsValidUtf8(std::string(tokenizer.status().message()))) << "the error message";
    return;
  }
  const auto ids = (*tokenizer)->Encode("ab <u>\u00e9 \U0001F600\n<s>ba", true);
  if (!ids.ok()) return;
  const auto text = (*tokenizer)->Decode(*ids, false);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_TRUE(IsValidUtf8(*text));
}

TEST(SentencePieceFile, DamageDoesNotCrash) {
  std::mt19937 random(11);
  for (int i = 0; i < 3000; ++i) {
    // Most damage is near the end, where fewer pieces hide the other fields.
    std::string data = ModelFile(1 + i % 2, BytesField(3, NumberField(3, 1)));
    const size_t kept = data.size() - random() % 200;
    UseVocabulary(ParseVocabulary(data.substr(0, kept) + Damaged(data.substr(kept), random)));
    UseVocabulary(ParseVocabulary(Damaged(data, random)));
  }
}

// In fairseq's dictionaries, four symbols precede those of the file.
TEST(Fairseq, IdsOfTheDictionary) {
  const auto own = ParseFairseqModel(ModelFile(1), "m", std::nullopt, {});
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(*(*own)->Encode("a bab", true), (Ids{0, 265, 261, 263, 264}));  // piece id + 1
  EXPECT_EQ(*(*own)->Decode(Ids{0, 265, 261, 263, 264, 2}, true), "a bab");
  const auto tokenizer = ParseFairseqModel(ModelFile(1), "m", "▁a 5\nab 3\nmade up 0\n", {});
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("a bab", true), (Ids{0, 4, 3, 3, 5}));
  EXPECT_EQ((*tokenizer)->vocab_size(), 7);
  for (const char* text : {"ab\n", "ab 5 #fairseq:overwrite\n", " 5\n", "\n"}) {
    const auto refused = ParseFairseqModel(ModelFile(1), "m", text, {});
    EXPECT_NE(std::string(refused.status().message()).find("dict.txt: line 1: expected a symbol"),
              std::string::npos)
        << text;
  }
  EXPECT_FALSE(ParseFairseqModel(ModelFile(1), "m", "ab 1\nab 2\n", {}).ok());
  EXPECT_FALSE(ParseFairseqModel(ModelFile(1), "m", "<pad> 1\n", {}).ok());
  std::mt19937 random(13);
  for (int i = 0; i < 500; ++i) {
    UseVocabulary(
        ParseFairseqModel(ModelFile(1), "m", Damaged("▁a 5\nab 3\n<0x41> 0\n", random), {}));
  }
}

// XLM-RoBERTa's last token is <mask>, and CamemBERT's symbols begin in another way.
TEST(Fairseq, RobertaClasses) {
  TokenizerDetails details;
  details.config.tokenizer_class = "XLMRobertaTokenizer";
  const auto xlm = ParseFairseqModel(ModelFile(1), "m", std::nullopt, details);
  ASSERT_TRUE(xlm.ok()) << xlm.status();
  const auto made = (*xlm)->EncodeTexts("a  <mask>", "b", true);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->ids, (Ids{0, 265, 266, 2, 2, 261, 263, 2}));
  EXPECT_EQ(made->types, std::vector<uint8_t>(8, 0));
  EXPECT_EQ(made->spans[2], (TextSpan{1, 9}));
  EXPECT_EQ(MaskToken(details.config, **xlm), 266);
  details.config.tokenizer_class = "CamembertTokenizerFast";
  const auto camembert = ParseFairseqModel(ModelFile(1), "m", std::nullopt, details);
  ASSERT_TRUE(camembert.ok()) << camembert.status();
  EXPECT_EQ(*(*camembert)->Encode("a<mask>", true), (Ids{5, 268, 269, 6}));
}

// What encloses a text of pieces follows from the kind of the model, and each language of a
// translator may have a dictionary.
TEST(Fairseq, PiecesOfMaskedAndTranslatedTexts) {
  testing::TempFolder folder;
  testing::WriteFile(folder.path() / "sentencepiece.bpe.model", ModelFile(1));
  testing::WriteFile(folder.path() / "dict.txt", "▁a 5\nab 3\n");
  const auto masked =
      LoadTokenizerFolder(folder.path(), 100, {.texts = DictionaryUse::Texts::kMasked});
  ASSERT_TRUE(masked.ok()) << masked.status();
  EXPECT_EQ(*(*masked)->Encode("a<mask>", true), (Ids{0, 4, 6, 2}));
  testing::WriteFile(folder.path() / "dict.de.txt", "ab 5\n▁a 3\n");
  testing::WriteFile(folder.path() / "dict.en.txt", "▁a 3\n");
  const DictionaryUse use{.texts = DictionaryUse::Texts::kTranslated,
                          .source = "de",
                          .target = "en",
                          .source_limit = 6};
  const auto translated = LoadTokenizerFolder(folder.path(), 100, use);
  ASSERT_TRUE(translated.ok()) << translated.status();
  EXPECT_EQ(*(*translated)->source().Encode("a", true), (Ids{5, 2}));
  EXPECT_EQ(*(*translated)->Encode("a", true), (Ids{4, 2}));
  EXPECT_EQ(*(*translated)->Decode(Ids{4, 4, 2}, true), "a a");
  testing::WriteFile(folder.path() / "dict.de.txt", "ab\n");
  EXPECT_NE(std::string(LoadTokenizerFolder(folder.path(), 100, use).status().message())
                .find("dict.de.txt: line 1"),
            std::string::npos);
}

TEST(CharacterMapTest, DamageDoesNotCrash) {
  // A trie of one rule: "a" becomes "é".
  std::string trie(4 * 256, '\0');
  const auto set = [&](size_t unit, uint32_t value) {
    for (int i = 0; i < 4; ++i) trie[4 * unit + i] = static_cast<char>(value >> (8 * i));
  };
  set(0, 1 << 10);                       // the root's children start at 0 ^ 1
  set(1 ^ 'a', 'a' | 1 << 8 | 2 << 10);  // has a leaf at its own index ^ 2
  set(1 ^ 'a' ^ 2, 0x80000000u);         // refers to byte 0
  const std::string data = std::string("\x00\x04\x00\x00", 4) + trie + "\u00e9" + '\0';
  const auto map = CharacterMap::Create(data);
  ASSERT_TRUE(map.ok()) << map.status();
  std::string_view replacement;
  EXPECT_EQ(map->FindLongest("ab", &replacement), 1u);
  EXPECT_EQ(replacement, "\u00e9");
  EXPECT_EQ(map->FindLongest("b", &replacement), 0u);
  std::mt19937 random(3);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string changed = data;
    for (int edits = 0; edits < 3; ++edits) {
      const size_t units[] = {0, 1 ^ 'a', 1 ^ 'a' ^ 2, 256};
      changed[4 + 4 * units[random() % 4] + random() % 4] = static_cast<char>(random());
    }
    const auto read = CharacterMap::Create(changed);
    if (!read.ok()) continue;
    ++accepted;
    const PrecompiledNormalizer normalizer(*read);
    for (const char* text : {"a", "ab\u0301", "\u00e9a\U0001F600"}) {
      EXPECT_TRUE(IsValidUtf8(*normalizer.Normalize(text)));
    }
  }
  EXPECT_GT(accepted, 100);
}

std::string TiktokenFile() {
  std::string file;
  int id = 0;
  const auto add = [&](std::string_view bytes) {
    file += absl::Base64Escape(absl::string_view(bytes.data(), bytes.size())) + " " +
            std::to_string(id++) + "\n";
  };
  for (int byte = 0; byte < 256; ++byte) add(std::string(1, static_cast<char>(byte)));
  for (const char* token : {"th", "he", "the", " the"}) add(token);
  return file;
}

TokenizerDetails TiktokenDetails() {
  TokenizerDetails details;
  AddedToken end;
  end.id = 400;
  end.content = "<|end|>";
  end.special = true;
  details.added_tokens = {end};
  details.pattern = R"( ?\p{L}+|\p{N}{1,3}+|\s++$|\s)";
  return details;
}

TEST(Tiktoken, LowestIdMergesFirst) {
  ASSERT_TRUE(LooksLikeTiktoken(TiktokenFile()));
  EXPECT_FALSE(LooksLikeTiktoken(ModelFile(1)));
  const auto tokenizer = ParseTiktoken(TiktokenFile(), "x.tiktoken", TiktokenDetails());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("the the<|end|>thhe", false), (Ids{258, 259, 400, 256, 257}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{258, 259, 400}, true), "the the");
}

TEST(Tiktoken, Refusals) {
  const auto message = [](const std::string& file, const TokenizerDetails& details) {
    return std::string(ParseTiktoken(file, "x.tiktoken", details).status().message());
  };
  TokenizerDetails details = TiktokenDetails();
  EXPECT_NE(message(TiktokenFile() + "!! 5\n", details).find("line 261: expected 1 to 512 bytes"),
            std::string::npos);
  EXPECT_NE(message("YQ== 0\n", details).find("a token for each of 256 bytes, found 1"),
            std::string::npos);
  EXPECT_NE(message(TiktokenFile() + "YWI= 5\n", details).find("id 5 belongs to both"),
            std::string::npos);
  details.pattern = "[a&&b]";
  EXPECT_NE(message(TiktokenFile(), details).find("'&' inside brackets"), std::string::npos);
  details.pattern.reset();
  EXPECT_NE(message(TiktokenFile(), details).find("\"pat_str\""), std::string::npos);
  details = TiktokenDetails();
  details.added_tokens.clear();
  EXPECT_NE(message(TiktokenFile(), details).find("added_tokens_decoder"), std::string::npos);
}

TEST(Tiktoken, PatternsAreRewritten) {
  EXPECT_EQ(*RubyPattern(R"(\s++$|^a\$[$^])"), R"(\s++\z|\Aa\$[$^])");
  EXPECT_EQ(*RubyPattern(R"(\p{N}{1,3}+|[^\]a]{2}+)"), R"((?>\p{N}{1,3})|(?>[^\]a]{2}))");
  EXPECT_EQ(*RubyPattern("(?i:a|(?:b)){2}+"), "(?>(?i:a|(?:b)){2})");
  EXPECT_EQ(*RubyPattern("é{3}+x{2}"), "(?>é{3})x{2}");
  EXPECT_FALSE(RubyPattern("(?m:a)").ok());
  EXPECT_FALSE(RubyPattern("[a[b]]").ok());
  EXPECT_FALSE(RubyPattern("a{2").ok());
}

TEST(Tiktoken, DamageDoesNotCrash) {
  std::mt19937 random(7);
  for (int i = 0; i < 500; ++i) {
    UseVocabulary(ParseTiktoken(Damaged(TiktokenFile(), random), "x", TiktokenDetails()));
    TokenizerDetails details = TiktokenDetails();
    details.pattern = Damaged(*details.pattern, random);
    if (IsValidUtf8(*details.pattern)) UseVocabulary(ParseTiktoken(TiktokenFile(), "x", details));
  }
}

constexpr char kVocab[] = R"({"a": 0, "b": 1, "ab": 2, "Ġ": 3, "<|end|>": 4})";
constexpr char kMerges[] = "#version: 0.2\na b\n";

TEST(VocabAndMerges, ClassDecidesThePipeline) {
  TokenizerDetails details;
  details.config.tokenizer_class = "GPT2TokenizerFast";
  details.config.eos_token = "<|end|>";
  details.config.add_eos_token = true;
  const auto tokenizer = ParseVocabAndMerges(kVocab, kMerges, details);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("ab a<|end|>", true), (Ids{2, 3, 0, 4, 4}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{2, 3, 0, 4}, true), "ab a");
  details.config.tokenizer_class.reset();
  EXPECT_NE(std::string(ParseVocabAndMerges(kVocab, kMerges, details).status().message())
                .find("expected tokenizer_class GPT2Tokenizer, Qwen2Tokenizer"),
            std::string::npos);
}

// The special tokens have their usual names, and the mask takes the spaces in front of it.
TEST(VocabAndMerges, Roberta) {
  constexpr char kRobertaVocab[] =
      R"({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5, "ab": 6, "Ġ": 7,
          "<mask>": 8})";
  for (const char* name : {"RobertaTokenizer", "BartTokenizerFast"}) {
    TokenizerDetails details;
    details.config.tokenizer_class = name;
    const auto tokenizer = ParseVocabAndMerges(kRobertaVocab, kMerges, details);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ(*(*tokenizer)->Encode("ab  <mask> a", true), (Ids{0, 6, 8, 7, 4, 2}));
    const auto pair = (*tokenizer)->EncodeTexts("a", "b", true);
    EXPECT_EQ(pair->ids, (Ids{0, 4, 2, 2, 5, 2}));
    EXPECT_EQ(pair->types, (std::vector<uint8_t>(6, 0)));
    EXPECT_NE(std::string(ParseVocabAndMerges(kVocab, kMerges, details).status().message())
                  .find("expected the special token \"<s>\", found none"),
              std::string::npos);
  }
}

// ModelFile(1) is the model of the source; "b" is no token of either language.
TEST(Marian, IdsOfTheVocabulary) {
  const std::vector<std::string> symbols = {"</s>",    "▁a", "▁cible", "<unk>", "▁",
                                            ">>fra<<", "ab", "a",      "<pad>"};
  const auto tokenizer = ParseMarianModel(ModelFile(1), "source.spm", symbols, {});
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("a ab", true), (Ids{1, 1, 3, 0}));
  EXPECT_EQ(*(*tokenizer)->Encode(">>fra<< a", true), (Ids{5, 1, 0}));
  EXPECT_EQ(*(*tokenizer)->Encode("", true), (Ids{0}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{2, 1, 6, 0, 8}, true), "cible aab");
  EXPECT_EQ((*tokenizer)->vocab_size(), 9);
  // Text that spells the end of text is ordinary text.
  const Ids spelled = *(*tokenizer)->Encode("</s>", false);
  EXPECT_EQ(std::count(spelled.begin(), spelled.end(), 0), 0);
  EXPECT_NE(std::string(
                ParseMarianModel(ModelFile(1), "source.spm", {"a", "</s>"}, {}).status().message())
                .find("vocab.json: expected the token \"<unk>\", found none"),
            std::string::npos);
  EXPECT_NE(std::string(ParseMarianModel("x", "source.spm", symbols, {}).status().message())
                .find("source.spm: "),
            std::string::npos);
}

TEST(Marian, DamagedVocabularies) {
  for (const auto& [text, message] : std::vector<std::pair<const char*, const char*>>{
           {"[]", "vocab.json: expected an object"},
           {R"({"a": -1})", "expected an id from 0"},
           {R"({"a": 1})", "vocab.json: expected each id in [0, 0] once, found 1 for \"a\""},
           {R"({"a": 0, "b": 0})", "expected each id in [0, 1] once, found 0 for \"b\""}}) {
    EXPECT_NE(std::string(ParseVocabJson(text, "vocab.json").status().message()).find(message),
              std::string::npos)
        << text;
  }
  EXPECT_EQ(*ParseVocabJson(R"({"b": 1, "a": 0})", "x"), (std::vector<std::string>{"a", "b"}));
}

TEST(VocabAndMerges, Refusals) {
  TokenizerDetails details;
  details.config.tokenizer_class = "Qwen2Tokenizer";
  const auto message = [&](const char* vocab, const char* merges) {
    return std::string(ParseVocabAndMerges(vocab, merges, details).status().message());
  };
  EXPECT_NE(message("[]", kMerges).find("vocab.json: expected an object"), std::string::npos);
  EXPECT_NE(message(R"({"a": -1})", kMerges).find("expected an id from 0"), std::string::npos);
  EXPECT_NE(message(kVocab, "a b c\n").find("merges.txt: line 1: expected two tokens"),
            std::string::npos);
  EXPECT_NE(message(kVocab, "a c\n").find("expected tokens of the vocabulary, found \"c\""),
            std::string::npos);
  std::mt19937 random(9);
  for (int i = 0; i < 2000; ++i) {
    UseVocabulary(ParseVocabAndMerges(Damaged(kVocab, random), kMerges, details));
    UseVocabulary(ParseVocabAndMerges(kVocab, Damaged(kMerges, random), details));
  }
}

TEST(TokenizerFolder, ChoosesTheReader) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / "tokenizer_folder_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto write = [&](const char* name, std::string_view data) {
    std::ofstream(folder / name, std::ios::binary).write(data.data(), data.size());
  };
  EXPECT_EQ(LoadTokenizerFolder(folder).status().code(), absl::StatusCode::kNotFound);
  constexpr char kConfig[] =
      R"({"tokenizer_class": "GPT2Tokenizer", "pat_str": "\\p{L}+| ", "add_bos_token": false,
          "added_tokens_decoder": {"500": {"content": "<x>", "special": true}}})";
  write("tokenizer_config.json", kConfig);
  write("vocab.json", kVocab);
  write("merges.txt", kMerges);
  EXPECT_EQ(*(*LoadTokenizerFolder(folder))->Encode("ab<x>", true), (Ids{2, 500}));
  write("tokenizer_config.json", "{}");
  write("config.json", R"({"model_type": "roberta"})");
  EXPECT_NE(std::string(LoadTokenizerFolder(folder).status().message()).find("\"<s>\""),
            std::string::npos);
  write("source.spm", ModelFile(1));
  write("vocab.json", R"({"</s>": 0, "<unk>": 1, "▁a": 2})");
  EXPECT_EQ(*(*LoadTokenizerFolder(folder))->Encode("a", true), (Ids{2, 0}));
  write("target_vocab.json", "{}");
  EXPECT_NE(std::string(LoadTokenizerFolder(folder).status().message())
                .find("target_vocab.json: expected one vocabulary for both languages"),
            std::string::npos);
  std::filesystem::remove(folder / "source.spm");
  write("tokenizer_config.json", kConfig);
  write("y.tiktoken", TiktokenFile());
  EXPECT_EQ(*(*LoadTokenizerFolder(folder))->Encode("the<x>", true), (Ids{258, 500}));
  write("tokenizer.model", TiktokenFile());
  EXPECT_EQ(*(*LoadTokenizerFolder(folder))->Encode("the<x>", true), (Ids{258, 500}));
  write("tokenizer.model", ModelFile(1));
  EXPECT_EQ(*(*LoadTokenizerFolder(folder))->Encode("ab<x>", true), (Ids{264, 262, 500}));
  write("tokenizer.json", "{}");
  EXPECT_FALSE(LoadTokenizerFolder(folder).ok());
  EXPECT_EQ(TokenizerFiles(folder),
            (std::vector<std::string>{"y.tiktoken", "tokenizer.model", "tokenizer.json",
                                      "vocab.json", "merges.txt"}));
  std::filesystem::remove_all(folder);
}

// With quadratic work, eight times the text takes 64 times as long.
TEST(SentencePieceFile, TimeGrowsLinearly) {
  for (const int model_type : {1, 2}) {
    const auto tokenizer = ParseVocabulary(
        ModelFile(model_type, Piece(std::string(1000, 'a'), -1, PieceType::kNormal)));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const auto seconds = [&](size_t size) {
      double best = 1e9;
      for (int i = 0; i < 3; ++i) {
        // CPU time, which other programs on the machine hardly change.
        const std::clock_t start = std::clock();
        EXPECT_TRUE((*tokenizer)->Encode(std::string(size, 'a'), false).ok());
        best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
      }
      return best;
    };
    const double small = seconds(50'000);
    EXPECT_LT(seconds(400'000), 40 * small + 0.01) << "model type " << model_type;
  }
}

}  // namespace
}  // namespace moeserve
