// Texts with tagged regions.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/structured/compile_constraint.h"
#include "tests/structured/support.h"

namespace moeserve::testing {
namespace {

using Kind = TextFormat::Kind;

TextFormat Content(Kind kind, std::string text = "") {
  TextFormat out;
  out.kind = kind;
  out.text = std::move(text);
  return out;
}

StructuralTag Tag(std::string begin, TextFormat content, std::string end) {
  return {std::move(begin), std::move(content), std::move(end)};
}

ConstraintSpec FormatSpec(TextFormat format) {
  ConstraintSpec spec;
  spec.kind = ConstraintSpec::Kind::kFormat;
  spec.format = std::make_shared<const TextFormat>(std::move(format));
  return spec;
}

// Expects that compiling fails with a message that contains `text`.
void ExpectRefusal(const ConstraintSpec& spec, const std::string& text) {
  const auto compiled = CompileConstraint(spec, SmallVocabulary());
  ASSERT_FALSE(compiled.ok());
  const std::string message(compiled.status().message());
  EXPECT_NE(message.find(text), std::string::npos) << message;
}

// Calls of two tools, as Qwen's models write them.
StructuralTags Calls() {
  StructuralTags tags;
  for (const std::string name : {"time", "weather"}) {
    tags.tags.push_back(
        Tag("<tool_call>\n{\"name\": \"" + name + "\", \"arguments\": ",
            Content(Kind::kJsonSchema, R"({"type": "object", "properties": {"at": {"type":
                "string"}}, "required": ["at"], "additionalProperties": false})"),
            "}\n</tool_call>"));
  }
  tags.triggers = {"<tool_call>"};
  return tags;
}

std::string Call(std::string_view name, std::string_view arguments = "{\"at\": \"x\"}") {
  return "<tool_call>\n{\"name\": \"" + std::string(name) +
         "\", \"arguments\": " + std::string(arguments) + "}\n</tool_call>";
}

TEST(TagsTest, FreeTextAndCalls) {
  const auto compiled = Compile(TagsConstraint(Calls()));
  for (const std::string& text :
       {std::string(), std::string("Hello, wörld."), std::string("a < b <tool_call"), Call("time"),
        "Let me see. " + Call("weather"), Call("time") + "\n" + Call("weather"),
        Call("time") + Call("time") + " done", "<tool" + Call("time")}) {
    EXPECT_TRUE(Accepts(*compiled, text)) << text;
  }
  for (const std::string& text :
       {std::string("<tool_call>"), Call("other"), "x" + Call("time", "{}"),
        Call("time", "{\"at\": 1}"), Call("time") + "<tool_call>", std::string("\xFF")}) {
    EXPECT_FALSE(Accepts(*compiled, text)) << text;
  }
}

TEST(TagsTest, NumberOfCalls) {
  const std::string one = Call("time");
  const auto accepts = [&](const StructuralTags& tags, const std::string& text) {
    return Accepts(*Compile(TagsConstraint(tags)), text);
  };
  StructuralTags tags = Calls();
  tags.at_least_one = true;
  EXPECT_FALSE(accepts(tags, "no call"));
  EXPECT_TRUE(accepts(tags, "a call " + one + one));
  tags.stop_after_first = true;
  EXPECT_TRUE(accepts(tags, "a call " + one));
  EXPECT_FALSE(accepts(tags, one + " and text"));
  tags.stop_after_first = false;
  tags.max_tags = 2;
  EXPECT_TRUE(accepts(tags, one + " " + one + " text"));
  EXPECT_FALSE(accepts(tags, one + one + one));
  EXPECT_FALSE(accepts(tags, one + one + "<tool_call>"));
  tags.free_text = false;
  tags.triggers.clear();
  tags.separator = "\n";
  EXPECT_TRUE(accepts(tags, one));
  EXPECT_TRUE(accepts(tags, one + "\n" + one));
  EXPECT_FALSE(accepts(tags, one + one));
  EXPECT_FALSE(accepts(tags, one + "\n" + one + "\n" + one));
  EXPECT_FALSE(accepts(tags, ""));
  EXPECT_FALSE(accepts(tags, " " + one));
  tags.at_least_one = false;
  EXPECT_TRUE(accepts(tags, ""));
}

TEST(TagsTest, JsonArrays) {
  StructuralTags tags;
  for (const std::string name : {"f", "g"}) {
    tags.tags.push_back(Tag("", Content(Kind::kJsonSchema, R"({"type": "object", "properties":
        {"name": {"const": ")" + name + R"("}, "arguments": {"type": "object"}}, "required":
        ["name", "arguments"], "additionalProperties": false})"),
                            ""));
  }
  tags.json_array = true;
  tags.prefix = "[TOOL_CALLS] ";
  const std::string f = R"({"name": "f", "arguments": {}})";
  const std::string g = R"({"name":"g","arguments":{"x":[1]}})";
  for (const bool free_text : {false, true}) {
    tags.free_text = free_text;
    tags.at_least_one = true;
    const auto compiled = Compile(TagsConstraint(tags));
    EXPECT_TRUE(Accepts(*compiled, "[TOOL_CALLS] [" + f + "]"));
    EXPECT_TRUE(Accepts(*compiled, "[TOOL_CALLS] [" + f + ", " + g + "]"));
    EXPECT_TRUE(Accepts(*compiled, "[TOOL_CALLS] [\n  " + f + ",\n  " + g + "\n]"));
    EXPECT_EQ(Accepts(*compiled, "Well: [TOOL_CALLS] [" + f + "]"), free_text);
    EXPECT_FALSE(Accepts(*compiled, "[TOOL_CALLS] []"));
    EXPECT_FALSE(Accepts(*compiled, "[TOOL_CALLS] [{\"name\": \"h\", \"arguments\": {}}]"));
  }
  tags.max_tags = 1;
  EXPECT_FALSE(Accepts(*Compile(TagsConstraint(tags)), "[TOOL_CALLS] [" + f + ", " + g + "]"));
}

TEST(TagsTest, ContentsOfEveryKind) {
  StructuralTags tags;
  tags.tags = {Tag("<re>", Content(Kind::kRegex, "[a-z<]*"), "</re>"),
               Tag("<any>", Content(Kind::kAnyText), "</any>"),
               Tag("<obj>", Content(Kind::kJsonObject), "</obj>"),
               Tag("<one>", Content(Kind::kText, "x"), "</one>")};
  TextFormat choice = Content(Kind::kChoice);
  choice.choices = {"yes", "no", ""};
  tags.tags.push_back(Tag("<pick>", choice, "</pick>"));
  TextFormat both = Content(Kind::kSequence);
  both.parts = {Content(Kind::kRegex, "a+"), Content(Kind::kAnyText), Content(Kind::kText, ";"),
                Content(Kind::kAnyText)};
  tags.tags.push_back(Tag("<both>", both, "</both>"));
  const auto compiled = Compile(TagsConstraint(tags));
  for (const std::string text :
       {"<re></re>", "<re>ab<</re>", "<any>a<b</</any>", "<any>é</any> ", "<obj>{\"a\": []}</obj>",
        "<one>x</one>", "<pick>yes</pick><pick></pick>", "<both>aab;;b</both>", "<both>a;</both>",
        "see <one> <pick>no</pick>"}) {
    EXPECT_EQ(Accepts(*compiled, text), text.find("<one> ") == std::string::npos) << text;
  }
  for (const std::string text : {"<re>A</re>", "<any>a", "<obj>[]</obj>", "<one></one>",
                                 "<pick>maybe</pick>", "<both>b;</both>", "<both>a</both>"}) {
    EXPECT_FALSE(Accepts(*compiled, text)) << text;
  }
}

TEST(TagsTest, Sequences) {
  TextFormat thought = Content(Kind::kSequence);
  thought.parts = {Content(Kind::kText, "<think>"), Content(Kind::kAnyText),
                   Content(Kind::kText, "</think>"), Content(Kind::kTags)};
  thought.parts[3].tags = std::make_shared<const StructuralTags>(Calls());
  TextFormat format = Content(Kind::kAnyOf);
  format.parts = {thought, Content(Kind::kRegex, "\\d+")};
  const auto compiled = Compile(FormatSpec(format));
  EXPECT_TRUE(Accepts(*compiled, "123"));
  EXPECT_TRUE(Accepts(*compiled, "<think></think>"));
  EXPECT_TRUE(Accepts(*compiled, "<think>" + Call("other") + "</think>" + Call("time")));
  EXPECT_FALSE(Accepts(*compiled, "<think>" + Call("time")));
  EXPECT_FALSE(Accepts(*compiled, "<think></think>" + Call("other")));
  EXPECT_FALSE(Accepts(*compiled, "12a"));
}

TEST(TagsTest, ExcludedTexts) {
  StructuralTags tags = Calls();
  tags.excluded = {"</tool_call>", "<|"};
  const auto compiled = Compile(TagsConstraint(tags));
  EXPECT_TRUE(Accepts(*compiled, "< |" + Call("time") + "<"));
  EXPECT_FALSE(Accepts(*compiled, "<|"));
  EXPECT_FALSE(Accepts(*compiled, Call("time") + "</tool_call>"));
  TextFormat sequence = Content(Kind::kSequence);
  sequence.parts = {Content(Kind::kAnyText), Content(Kind::kText, "</a>"), Content(Kind::kAnyText)};
  sequence.parts[0].excluded = {"<b>", "a<"};
  sequence.parts[2].excluded = {"x"};
  const auto parts = Compile(FormatSpec(sequence));
  EXPECT_TRUE(Accepts(*parts, "x<b</a>a<"));
  EXPECT_FALSE(Accepts(*parts, "<b></a>"));
  EXPECT_FALSE(Accepts(*parts, "a</a>"));
  EXPECT_FALSE(Accepts(*parts, "</a>x"));
}

TEST(TagsTest, Refusals) {
  StructuralTags tags;
  ExpectRefusal(TagsConstraint(tags), "no tags");
  tags = Calls();
  tags.triggers = {"<call>"};
  ExpectRefusal(TagsConstraint(tags), "tags.0: begins with none");
  tags.triggers = {"<tool_call>", "<call>"};
  ExpectRefusal(TagsConstraint(tags), "\"<call>\"");
  tags = Calls();
  tags.tags[1].content.text = "{\"type\": \"thing\"}";
  ExpectRefusal(TagsConstraint(tags), "tags.1.content: schema at #");
  tags = Calls();
  tags.tags[0].begin = "\xC3";
  ExpectRefusal(TagsConstraint(tags), "not UTF-8");
  tags = Calls();
  tags.tags[0].begin = "";
  tags.triggers.clear();
  ExpectRefusal(TagsConstraint(tags), "triggers");
  TextFormat deep = Content(Kind::kAnyText);
  for (int i = 0; i < 100; ++i) {
    TextFormat outer = Content(Kind::kSequence);
    outer.parts = {deep};
    deep = outer;
  }
  ExpectRefusal(FormatSpec(deep), "nested");
  TextFormat wide = Content(Kind::kAnyOf);
  wide.parts.assign(5000, Content(Kind::kText, "x"));
  ExpectRefusal(FormatSpec(wide), "parts");
}

TEST(TagsTest, CanonicalTextsDiffer) {
  std::vector<ConstraintSpec> specs = {TagsConstraint(Calls()), Pattern("a"), Choices({"a"})};
  StructuralTags tags = Calls();
  tags.stop_after_first = true;
  specs.push_back(TagsConstraint(tags));
  tags.tags[0].end += " ";
  specs.push_back(TagsConstraint(tags));
  for (size_t i = 0; i < specs.size(); ++i) {
    for (size_t j = 0; j < specs.size(); ++j) {
      EXPECT_EQ(CanonicalText(specs[i]) == CanonicalText(specs[j]), i == j);
    }
  }
  EXPECT_EQ(CanonicalText(TagsConstraint(Calls())), CanonicalText(specs[0]));
}

// Returns whether `text` matches from `at` on, after `count` tags. Tries all ways, by the words of
// text_format.h.
class Recogniser {
 public:
  Recogniser(const StructuralTags& tags, std::function<bool(std::string_view)> is_content)
      : tags_(tags), is_content_(std::move(is_content)) {}

  bool Matches(std::string_view text) const {
    if (!tags_.free_text) {
      if (text.empty() && !tags_.at_least_one) return true;
      return Group(text, tags_.prefix, "", 0,
                   [](std::string_view rest, int) { return rest.empty(); });
    }
    return Between(text, 0);
  }

 private:
  using Then = std::function<bool(std::string_view, int)>;

  bool Between(std::string_view text, int count) const {
    size_t end = std::string_view::npos;
    for (const std::string& trigger : tags_.triggers) {
      const size_t at = text.find(trigger);
      if (at != text.npos) end = std::min(end, at + trigger.size());
    }
    if (end == text.npos) return count > 0 || !tags_.at_least_one;
    for (const std::string& trigger : tags_.triggers) {
      if (end < trigger.size() || text.substr(end - trigger.size(), trigger.size()) != trigger) {
        continue;
      }
      const bool matches =
          Group(text.substr(end - trigger.size()), tags_.prefix, trigger, count,
                [&](std::string_view rest, int tags) {
                  return tags_.stop_after_first ? rest.empty() : Between(rest, tags);
                });
      if (matches) return true;
    }
    return false;
  }

  bool Group(std::string_view text, const std::string& before, std::string_view trigger, int count,
             const Then& then) const {
    if (tags_.max_tags > 0 && count == tags_.max_tags) return false;
    for (const StructuralTag& tag : tags_.tags) {
      const std::string begin = before + tag.begin;
      if (!text.starts_with(begin) || !begin.starts_with(trigger)) continue;
      const std::string_view rest = text.substr(begin.size());
      for (size_t n = 0; n + tag.end.size() <= rest.size(); ++n) {
        if (!is_content_(rest.substr(0, n)) || !rest.substr(n).starts_with(tag.end)) continue;
        const std::string_view behind = rest.substr(n + tag.end.size());
        if (behind.starts_with(tags_.suffix) &&
            then(behind.substr(tags_.suffix.size()), count + 1)) {
          return true;
        }
        const bool several = !tags_.free_text || !tags_.prefix.empty() ||
                             !tags_.separator.empty() || !tags_.suffix.empty();
        if (several && Group(behind, tags_.separator, "", count + 1, then)) return true;
      }
    }
    return false;
  }

  const StructuralTags& tags_;
  std::function<bool(std::string_view)> is_content_;
};

// Compares all short texts over a small alphabet with the recogniser.
TEST(TagsTest, AllShortTexts) {
  Random random(71);
  const std::string alphabet = "<at>";
  const auto piece = [&](int most) {
    std::string out;
    for (int n = random.Below(most + 1); n > 0; --n) out += alphabet[random.Below(4)];
    return out;
  };
  int compiled_specs = 0;
  int accepted = 0;
  for (int round = 0; round < 120; ++round) {
    StructuralTags tags;
    for (int n = 1 + random.Below(3); n > 0; --n) {
      tags.tags.push_back(Tag("<" + piece(2), Content(Kind::kRegex, "a*"), piece(2)));
    }
    tags.free_text = random.Below(3) > 0;
    tags.at_least_one = random.Below(2) == 0;
    tags.stop_after_first = random.Below(3) == 0;
    tags.max_tags = random.Below(3);
    if (random.Below(3) == 0) tags.separator = piece(2);
    if (random.Below(3) == 0) tags.prefix = piece(2);
    if (random.Below(3) == 0) tags.suffix = piece(2);
    if (tags.free_text) {
      for (const StructuralTag& tag : tags.tags) {
        const std::string begin = tags.prefix + tag.begin;
        tags.triggers.push_back(begin.substr(0, 1 + random.Below(static_cast<int>(begin.size()))));
      }
    }
    const auto compiled = CompileConstraint(TagsConstraint(tags), SmallVocabulary());
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    ++compiled_specs;
    const Recogniser recogniser(
        tags, [](std::string_view text) { return text.find_first_not_of('a') == text.npos; });
    constexpr int kLength = 6;
    for (int code = 0; code < 1 << (2 * kLength); ++code) {
      for (int length = 0; length <= kLength; ++length) {
        if (code >> (2 * length) != 0) continue;
        std::string text;
        for (int i = 0; i < length; ++i) text += alphabet[(code >> (2 * i)) & 3];
        const bool expected = recogniser.Matches(text);
        accepted += expected;
        ASSERT_EQ(Accepts(**compiled, text), expected) << text << " in round " << round;
      }
    }
  }
  EXPECT_GT(accepted, 10000);
}

// A vocabulary with special tokens behind the ordinary ones.
class SpecialTokenizer : public ListTokenizer {
 public:
  SpecialTokenizer(std::vector<std::string> tokens, int first_special)
      : ListTokenizer(std::move(tokens), 2), first_special_(first_special) {}
  bool IsSpecial(TokenId id) const override {
    return ListTokenizer::IsSpecial(id) || id >= first_special_;
  }

 private:
  const int first_special_;
};

class SpecialTokensTest : public ::testing::Test {
 protected:
  SpecialTokensTest() {
    std::vector<std::string> tokens = MakeTokens(600, AllBytes());
    calls_ = static_cast<TokenId>(tokens.size());
    tokens.insert(tokens.end(), {"[TOOL_CALLS]", "<|end|>", "<|other|>", "[INST]"});
    const int size = static_cast<int>(tokens.size());
    vocabulary_ = *VocabularyIndex::Build(SpecialTokenizer(tokens, calls_), {kEos}, size);
    tags_.tags = {Tag("[TOOL_CALLS]f", Content(Kind::kJsonObject), "<|end|>")};
    tags_.triggers = {"[TOOL_CALLS]"};
  }

  // Feeds text in single bytes, and special tokens by their ids. Returns whether all are accepted,
  // each if and only if it is in the mask.
  bool Feed(ConstraintState* state, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      std::vector<TokenId> ids;
      for (TokenId id = calls_; id < vocabulary_->vocab_size(); ++id) {
        if (TextOf(id) == part) ids.push_back(id);
      }
      if (ids.empty()) {
        for (const char c : part) ids.push_back(2 + static_cast<uint8_t>(c));
      }
      for (const TokenId id : ids) {
        const bool set = IsSet(MaskOf(state, *vocabulary_), id);
        EXPECT_EQ(set, state->Clone()->Accept(id)) << part;
        if (!state->Accept(id)) return false;
      }
    }
    return true;
  }

  std::string TextOf(TokenId id) const {
    for (const auto& special : vocabulary_->specials()) {
      if (special.id == id) return special.text;
    }
    return "";
  }

  TokenId calls_ = 0;
  std::shared_ptr<const VocabularyIndex> vocabulary_;
  StructuralTags tags_;
};

TEST_F(SpecialTokensTest, StandWhereTheTagsSpellThem) {
  const auto compiled = Compile(TagsConstraint(tags_), vocabulary_);
  EXPECT_EQ(std::vector<TokenId>(compiled->text_tokens().begin(), compiled->text_tokens().end()),
            (std::vector<TokenId>{calls_, calls_ + 1}));
  const auto feed = [&](const std::vector<std::string>& parts) {
    const auto state = compiled->NewState();
    return Feed(state.get(), parts) && state->complete();
  };
  EXPECT_TRUE(feed({"[TOOL_CALLS]", "f{}", "<|end|>"}));
  EXPECT_TRUE(
      feed({"Well: ", "[TOOL_CALLS]", "f{\"a\": 1}", "<|end|>", "[TOOL_CALLS]", "f{}", "<|end|>"}));
  EXPECT_TRUE(feed({"[TOOL", "_CALLS]f{}<|", "end|>"})) << "ordinary tokens spell the same text";
  EXPECT_TRUE(feed({"[TOOL_CALL", "[TOOL_CALLS]", "f{}", "<|end|>"}));
  EXPECT_FALSE(feed({"[TOOL_CALLS]", "g"}));
  EXPECT_FALSE(feed({"<|end|>"})) << "not in free text";
  EXPECT_FALSE(feed({"[TOOL_CALLS]", "f{\"", "<|end|>"})) << "not in contents";
  EXPECT_FALSE(feed({"[TOOL_CALLS]", "f{\"", "[TOOL_CALLS]"}));
  EXPECT_FALSE(feed({"<|other|>"}));
  EXPECT_FALSE(feed({"[INST]"}));
}

TEST_F(SpecialTokensTest, AreAPartOfLongerTriggers) {
  tags_.tags = {Tag("to <|other|>f[INST]", Content(Kind::kRegex, "\\d+"), "")};
  tags_.triggers = {"to <|other|>f"};
  const auto compiled = Compile(TagsConstraint(tags_), vocabulary_);
  const auto feed = [&](const std::vector<std::string>& parts) {
    const auto state = compiled->NewState();
    return Feed(state.get(), parts) && state->complete();
  };
  EXPECT_TRUE(feed({"go to ", "<|other|>", "f", "[INST]", "12"}));
  EXPECT_FALSE(feed({"go to ", "<|other|>", "g"})) << "the trigger must be completed";
  EXPECT_TRUE(feed({"go to <|oth", "er|>g"}));
  EXPECT_FALSE(feed({"go ", "<|other|>"}));
  EXPECT_FALSE(feed({"[INST]"}));
}

TEST_F(SpecialTokensTest, OpenTheFirstTag) {
  tags_.free_text = false;
  tags_.triggers.clear();
  tags_.at_least_one = true;
  const auto compiled = Compile(TagsConstraint(tags_), vocabulary_);
  const auto state = compiled->NewState();
  EXPECT_EQ(TokensOf(MaskOf(state.get(), *vocabulary_)).back(), calls_);
  EXPECT_TRUE(Feed(state.get(), {"[TOOL_CALLS]", "f{}", "<|end|>", "[TOOL_CALLS]"}));
}

}  // namespace
}  // namespace moeserve::testing
