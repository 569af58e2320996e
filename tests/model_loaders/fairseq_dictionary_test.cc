// The dictionaries of fairseq: which files a model uses, and the ids and texts that they make.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/tokenizer/tokenizer_files.h"
#include "model_loaders/write/convert_folder.h"
#include "tests/model_loaders/fairseq_support.h"
#include "tests/model_loaders/support.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<TokenId>;

constexpr char kGerman[] = "haus 9\ndas 8\nklein@@ 3\nes 2\n";
constexpr char kEnglish[] = "the 9\nsmall 5\nhouse 4\nbig@@ 3\nger 2\n";
constexpr DictionaryUse kTranslated = {
    .texts = DictionaryUse::Texts::kTranslated, .source = "de", .target = "en", .source_limit = 8};

Ids Encoded(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.Encode(text, true);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.value_or(Ids());
}

std::string Decoded(const Tokenizer& tokenizer, const Ids& ids) {
  const auto text = tokenizer.Decode(ids, true);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.value_or("");
}

TEST(FairseqDictionary, WordsAreSymbolsAndMarkedOnesAreJoined) {
  TempFolder folder;
  WriteFile(folder.path() / "dict.txt", kEnglish);
  const auto tokenizer = LoadTokenizer(folder.path(), 10, true);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(Encoded(**tokenizer, " the  house\nsmall bird "), (Ids{0, 4, 6, 5, 3}));
  EXPECT_EQ(Encoded(**tokenizer, "big@@ ger house"), (Ids{0, 7, 8, 6}));
  EXPECT_EQ(Decoded(**tokenizer, {0, 4, 7, 8, 6, 2}), "the bigger house");
  EXPECT_EQ(Decoded(**tokenizer, {7}), "big");
  EXPECT_EQ((*tokenizer)->TokenBytes(4), "the ");
  EXPECT_EQ((*tokenizer)->TokenBytes(7), "big");
  IncrementalDecoder stream(tokenizer->get(), true);
  std::string text;
  for (const TokenId id : {7, 8, 6, 2}) text += stream.Push(id);
  EXPECT_EQ(text + stream.Finish(), "bigger house");
  EXPECT_TRUE((*tokenizer)->IsSpecial(2));
  EXPECT_FALSE((*tokenizer)->IsSpecial(4));
}

TEST(FairseqDictionary, MaskedTextsAreEnclosedAndHaveAMask) {
  TempFolder folder;
  WriteFile(folder.path() / "dict.txt", kEnglish);
  const auto tokenizer =
      LoadTokenizer(folder.path(), 10, true, {.texts = DictionaryUse::Texts::kMasked});
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(Encoded(**tokenizer, "the <mask> house"), (Ids{0, 4, 9, 6, 2}));
  EXPECT_EQ(MaskToken({}, **tokenizer), 9);
  EXPECT_EQ((*tokenizer)->vocab_size(), 10);
  // The mask needs a row of the model.
  EXPECT_TRUE(Mentions(
      LoadTokenizer(folder.path(), 9, true, {.texts = DictionaryUse::Texts::kMasked}).status(),
      {"expected token ids in [0, 8]", "found ids up to 9"}));
}

TEST(FairseqDictionary, EachLanguageHasItsOwn) {
  TempFolder folder;
  WriteFile(folder.path() / "dict.de.txt", kGerman);
  WriteFile(folder.path() / "dict.en.txt", kEnglish);
  const auto tokenizer = LoadTokenizer(folder.path(), 9, true, kTranslated);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(Encoded((*tokenizer)->source(), "das klein@@ es haus"), (Ids{5, 6, 7, 4, 2}));
  EXPECT_EQ(Decoded(**tokenizer, {4, 5, 6}), "the small house");
  EXPECT_EQ((*tokenizer)->vocab_size(), 9);
  DictionaryUse small = kTranslated;
  small.source_limit = 7;
  EXPECT_TRUE(Mentions(LoadTokenizer(folder.path(), 9, true, small).status(),
                       {"dict.de.txt: expected token ids in [0, 6]", "has 7 rows"}));
  DictionaryUse unknown = kTranslated;
  unknown.source.clear();
  EXPECT_TRUE(Mentions(LoadTokenizer(folder.path(), 9, true, unknown).status(),
                       {"dict.de.txt, dict.en.txt", "source_lang and target_lang"}));
  unknown.source = "../de";
  EXPECT_FALSE(LoadTokenizer(folder.path(), 9, true, unknown).ok());
  fs::remove(folder.path() / "dict.en.txt");
  EXPECT_TRUE(Mentions(LoadTokenizer(folder.path(), 9, true, kTranslated).status(),
                       {"dict.de.txt and dict.en.txt, or dict.txt, found one of them"}));
  // One dictionary of both languages.
  WriteFile(folder.path() / "dict.txt", kEnglish);
  const auto joined = LoadTokenizer(folder.path(), 9, true, kTranslated);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(Encoded((*joined)->source(), "the house"), (Ids{4, 6, 2}));
}

TEST(FairseqDictionary, CodesOfSubwordNmtCutWords) {
  TempFolder folder;
  WriteFile(folder.path() / "dict.txt",
            "low@@ 9\ner</w> 1\ner 8\nl@@ 5\no@@ 4\nw 3\nlow 2\nü@@ 1\n");
  WriteFile(folder.path() / "bpe.codes", "#version: 0.2\nl o\nlo w\ne r</w>\nlo w</w>\n");
  const auto tokenizer = LoadTokenizer(folder.path(), 20, true, kTranslated);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(Encoded(**tokenizer, "lower low"), (Ids{4, 6, 10, 2}));
  // "lo@@" is no symbol of the dictionary, and neither is "x".
  EXPECT_EQ(Encoded(**tokenizer, "lox ül"), (Ids{3, 3, 11, 3, 2}));
  EXPECT_EQ(Encoded(**tokenizer, std::string(300, 'l')), (Ids{3, 2}));
  EXPECT_EQ(Decoded(**tokenizer, {4, 6, 10}), "lower low");
  const auto texts = (*tokenizer)->EncodeTexts("a lower", std::nullopt, true);
  ASSERT_TRUE(texts.ok()) << texts.status();
  ASSERT_EQ(texts->ids, (Ids{3, 4, 6, 2}));
  EXPECT_EQ(texts->spans[1].begin, 2u);
  EXPECT_EQ(texts->spans[1].end, 5u);
  EXPECT_EQ(texts->spans[2].end, 7u);
  WriteFile(folder.path() / "bpe.codes", "#version: 0.1\nl o\n");
  EXPECT_TRUE(Mentions(LoadTokenizer(folder.path(), 20, true, kTranslated).status(),
                       {"bpe.codes: line 1: expected \"#version: 0.2\""}));
  WriteFile(folder.path() / "bpe.codes", "#version: 0.2\nl o\nlow\n");
  EXPECT_TRUE(Mentions(LoadTokenizer(folder.path(), 20, true, kTranslated).status(),
                       {"bpe.codes: line 3: expected two symbols"}));
}

TEST(FairseqDictionary, WrongLinesAreNamed) {
  const auto status = [](const std::string& text) {
    TempFolder folder;
    WriteFile(folder.path() / "dict.txt", text);
    return LoadTokenizer(folder.path(), 100, true).status();
  };
  EXPECT_TRUE(Mentions(status("the 4\nhouse\n"), {"dict.txt: line 2: expected a symbol, a space"}));
  EXPECT_TRUE(Mentions(status("the 4 #fairseq:overwrite\n"), {"dict.txt: line 1"}));
  EXPECT_TRUE(Mentions(status("the 4\nthe 5\n"), {"dict.txt: "}));
  EXPECT_TRUE(Mentions(status("<s> 4\n"), {"dict.txt: "}));
  EXPECT_TRUE(Mentions(status("\xff 4\n"), {"dict.txt: "}));
  EXPECT_TRUE(status("").ok());
}

// A translator's checkpoint says which dictionary is which; so does what is made of it.
TEST(FairseqDictionary, ConvertedTranslatorsKeepTheirLanguages) {
  TempFolder folder;
  const fs::path source = folder.path() / "mt";
  fs::create_directory(source);
  for (const auto& entry :
       fs::directory_iterator(SourcePath("tests/golden/pairs/fairseq-xmoe-mt"))) {
    if (entry.path().extension() == ".pt") fs::copy(entry.path(), source);
  }
  WriteFile(source / "dict.de.txt", kGerman);
  WriteFile(source / "dict.en.txt", kEnglish);
  ASSERT_TRUE(ConvertFolder(source, folder.path() / "native").ok());
  for (const fs::path& path : {source, folder.path() / "native"}) {
    const auto checkpoint = LoadCheckpoint(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(Encoded(checkpoint->tokenizer->source(), "das haus"), (Ids{5, 4, 2}));
    EXPECT_EQ(Decoded(*checkpoint->tokenizer, {4, 6}), "the house");
  }
}

}  // namespace
}  // namespace moeserve::testing
