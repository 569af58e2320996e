#include "server/tools/tool_constraint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/error_text.h"
#include "engine/text/structured/compile_constraint.h"
#include "server/generation/constraint_compiler.h"
#include "tests/structured/support.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

constexpr char kSchema[] = R"({"type": "object", "additionalProperties": false,
    "required": ["n", "w"], "properties": {"n": {"type": "integer", "minimum": -99, "maximum": 99}, "w": {"enum": ["x", "y"]},
    "o": {"type": "object", "properties": {"s": {"type": "string"}}}}})";

// A vocabulary of all bytes, of texts in which syntaxes differ, and of special tokens.
class Vocabulary {
 public:
  Vocabulary() {
    std::vector<std::string> tokens = {"<pad>",   "<eos>",       "[TOOL_CALLS]",
                                       "[ARGS]",  "<|channel|>", "<|message|>",
                                       "<|end|>", "<|start|>",   "<|constrain|>"};
    first_byte_ = static_cast<TokenId>(tokens.size());
    const int specials = static_cast<int>(tokens.size());
    for (const char c : moeserve::testing::AllBytes()) tokens.emplace_back(1, c);
    for (const char* text :
         {"<tool_call>", "</tool_call>", "<think>", "</think>", "{\"name\": \"", "\", \"",
          "arguments", "analysis", "final", " assistant", "}\n", "; "}) {
      tokens.emplace_back(text);
    }
    tokenizer_ = std::make_unique<moeserve::testing::ListTokenizer>(tokens, specials);
    auto index = VocabularyIndex::Build(*tokenizer_, {moeserve::testing::kEos},
                                        static_cast<int>(tokens.size()));
    MOESERVE_CHECK(index.ok(), std::string(index.status().message()).c_str());
    index_ = *index;
  }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  // Returns the token of a byte.
  TokenId IdOf(char c) const { return first_byte_ + static_cast<uint8_t>(c); }
  const std::shared_ptr<const VocabularyIndex>& index() const { return index_; }

 private:
  TokenId first_byte_ = 0;
  std::unique_ptr<moeserve::testing::ListTokenizer> tokenizer_;
  std::shared_ptr<const VocabularyIndex> index_;
};

const Vocabulary& Shared() {
  static const Vocabulary vocabulary;
  return vocabulary;
}

ToolSettings CallSettings(ToolChoice choice, bool parallel = true) {
  ToolSettings settings;
  settings.choice = choice;
  settings.parallel = parallel;
  settings.callable = {{.name = "first", .parameters = kSchema},
                       {.name = "second.tool", .parameters = {}}};
  if (choice == ToolChoice::kNamed) {
    settings.callable.pop_back();
    settings.parallel = false;
  }
  return settings;
}

std::shared_ptr<const CompiledConstraint> Compile(const ConstraintSpec& spec) {
  auto compiled = CompileConstraint(spec, Shared().index());
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  return compiled.ok() ? *compiled : nullptr;
}

// Ends reasoning in which the text of `state` is, if it is, and appends the end to `text`. A limit
// of tokens does not end it.
void LeaveReasoning(std::unique_ptr<ConstraintState>& state, std::string& text) {
  const bool channels = text.starts_with("<|channel|>");
  const std::string_view end = channels ? "<|end|><|start|>assistant" : "</think>";
  if (!channels && text.find(end) != text.npos) return;
  constexpr std::string_view kReasoning = "<|channel|>analysis";
  const size_t message = text.rfind("<|message|>");
  if (channels && (message == text.npos || message < kReasoning.size() ||
                   text.substr(message - kReasoning.size(), kReasoning.size()) != kReasoning ||
                   text.find(end, message) != text.npos)) {
    return;
  }
  auto after = state->Clone();
  for (const char c : end) {
    if (!after->Accept(Shared().IdOf(c))) return;
  }
  state = std::move(after);
  text += end;
}

// Generates a text with random tokens, of at most `max_tokens` tokens and the end of the reasoning.
// Tokens that begin a call are preferred, because free text would seldom have one. If not
// `may_be_cut`, the text must be complete.
std::string Generate(const CompiledConstraint& constraint, std::mt19937& random, int max_tokens,
                     bool may_be_cut = false) {
  auto state = constraint.NewState();
  std::vector<uint32_t> mask(Shared().index()->mask_words());
  std::string text;
  for (int left = max_tokens; left > 0; --left) {
    // Reasoning ends when there is just time for the longest call.
    const bool hurries = left < 4 * max_tokens / 5;
    if (hurries) LeaveReasoning(state, text);
    state->AllowedTokens(mask, left);
    std::vector<TokenId> allowed;
    for (TokenId id = 0; id < Shared().tokenizer().vocab_size(); ++id) {
      const bool reasons_again = hurries && text.ends_with("<|channel|>") &&
                                 Shared().tokenizer().TokenBytes(id).starts_with("a");
      if ((mask[id / 32] >> (id % 32) & 1) && !reasons_again) allowed.push_back(id);
    }
    if (allowed.empty()) {
      ADD_FAILURE() << "nothing may follow " << text << " with " << left;
      return text;
    }
    TokenId chosen = allowed[random() % allowed.size()];
    for (const TokenId id : allowed) {
      const std::string bytes = Shared().tokenizer().TokenBytes(id);
      if (bytes.size() > 3 && random() % 4 == 0) chosen = id;
    }
    if (chosen == moeserve::testing::kEos) return text;
    text += Shared().tokenizer().TokenBytes(chosen);
    EXPECT_TRUE(state->Accept(chosen));
  }
  EXPECT_TRUE(may_be_cut || state->complete()) << text;
  return text;
}

AssistantDelta SplitCalls(const SplitRules& rules, const std::string& text) {
  const auto splitter = AnswerSplitter::Make(rules, [](int call) { return Concat(call); });
  AssistantDelta out = splitter->Push(text);
  out.Append(splitter->Finish());
  return out;
}

void ExpectValid(const ToolCallDelta& call, const std::string& text) {
  const Json arguments = Json::parse(call.arguments, nullptr, false);
  ASSERT_TRUE(arguments.is_object()) << text;
  if (call.name == "second.tool") return;
  ASSERT_EQ(call.name, "first") << text;
  EXPECT_TRUE(arguments.at("n").is_number_integer()) << text;
  EXPECT_TRUE(arguments.at("w") == "x" || arguments.at("w") == "y") << text;
  for (const auto& [name, value] : arguments.items()) {
    EXPECT_TRUE(name == "n" || name == "w" || name == "o") << text;
  }
}

struct Case {
  const CallSyntax* syntax;
  bool reasons;
  bool begins_in_reasoning;
};

class ToolConstraints : public ::testing::TestWithParam<Case> {
 protected:
  SplitRules Rules() const {
    return {.syntax = GetParam().syntax,
            .has_tools = true,
            .tools = Offered(CallSettings(ToolChoice::kAuto).callable),
            .reasons = GetParam().reasons,
            .begins_in_reasoning = GetParam().begins_in_reasoning};
  }
};

TEST_P(ToolConstraints, RequiredCallsAreValid) {
  for (const ToolChoice choice : {ToolChoice::kRequired, ToolChoice::kNamed}) {
    const ToolSettings settings = CallSettings(choice);
    const auto constraint = Compile(AnswerConstraint(settings, Rules(), std::nullopt));
    ASSERT_NE(constraint, nullptr);
    std::mt19937 random(1);
    for (int round = 0; round < 60; ++round) {
      const std::string text = Generate(*constraint, random, 250);
      const AssistantDelta answer = SplitCalls(Rules(), text);
      ASSERT_FALSE(answer.calls.empty()) << text;
      EXPECT_EQ(answer.content, "") << text;
      if (choice == ToolChoice::kNamed) {
        EXPECT_EQ(answer.calls.size(), 1u) << text;
      }
      for (const ToolCallDelta& call : answer.calls) ExpectValid(call, text);
    }
  }
}

TEST_P(ToolConstraints, CallsThatTheModelChoosesAreValid) {
  for (const bool parallel : {true, false}) {
    const ToolSettings settings = CallSettings(ToolChoice::kAuto, parallel);
    const auto constraint = Compile(AnswerConstraint(settings, Rules(), std::nullopt));
    ASSERT_NE(constraint, nullptr);
    std::mt19937 random(2);
    int calls = 0, texts = 0;
    for (int round = 0; round < 100; ++round) {
      const std::string text = Generate(*constraint, random, 250, /*may_be_cut=*/true);
      const AssistantDelta answer = SplitCalls(Rules(), text);
      calls += static_cast<int>(answer.calls.size());
      texts += answer.calls.empty();
      if (!parallel) {
        EXPECT_LE(answer.calls.size(), 1u) << text;
      }
      for (const ToolCallDelta& call : answer.calls) ExpectValid(call, text);
    }
    EXPECT_GT(texts, 0);
    // A random text seldom spells a long tag byte by byte.
    const std::string_view trigger = GetParam().syntax->trigger;
    if (trigger == "<tool_call>" || trigger == "[TOOL_CALLS]") {
      EXPECT_GT(calls, 5);
    }
  }
}

TEST_P(ToolConstraints, AnswersWithoutCallsMatchTheResponseFormat) {
  ConstraintSpec schema;
  schema.kind = ConstraintSpec::Kind::kJsonSchema;
  schema.text = R"({"type": "object", "required": ["answer"], "additionalProperties": false,
                    "properties": {"answer": {"type": "boolean"}}})";
  const auto constraint =
      Compile(AnswerConstraint(CallSettings(ToolChoice::kAuto), Rules(), schema));
  ASSERT_NE(constraint, nullptr);
  std::mt19937 random(3);
  int texts = 0;
  for (int round = 0; round < 60; ++round) {
    const std::string text = Generate(*constraint, random, 250);
    const AssistantDelta answer = SplitCalls(Rules(), text);
    if (answer.calls.empty()) {
      ++texts;
      const Json parsed = Json::parse(answer.content, nullptr, false);
      ASSERT_TRUE(parsed.is_object()) << text;
      EXPECT_TRUE(parsed.at("answer").is_boolean()) << text;
    } else {
      EXPECT_EQ(answer.content, "") << text;
    }
    for (const ToolCallDelta& call : answer.calls) ExpectValid(call, text);
  }
  EXPECT_GT(texts, 0);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const CallSyntax& syntax : CallSyntaxes()) {
    cases.push_back({&syntax, false, false});
    if (syntax.has_channels) continue;
    cases.push_back({&syntax, true, false});
    cases.push_back({&syntax, true, true});
  }
  return cases;
}

// Reasoning is as free with a format for the content as without; the content is what the splitter
// takes for it.
TEST_P(ToolConstraints, TheContentAloneMatchesTheResponseFormat) {
  SplitRules rules = Rules();
  rules.has_tools = false;
  ConstraintSpec number;
  number.kind = ConstraintSpec::Kind::kRegex;
  number.text = "-?[0-9]{1,4}";
  ConstraintSpec choice;
  choice.kind = ConstraintSpec::Kind::kChoice;
  choice.choices = {"yes", "no"};
  ConstraintSpec object;
  object.kind = ConstraintSpec::Kind::kJsonObject;
  ConstraintSpec grammar;
  grammar.kind = ConstraintSpec::Kind::kGrammar;
  grammar.text = "root ::= \"(\" root \")\" | \"x\"";
  std::mt19937 random(5);
  for (const ConstraintSpec& text : {number, choice, object, grammar}) {
    const auto constraint = Compile(AnswerConstraint({}, rules, text));
    ASSERT_NE(constraint, nullptr);
    const auto alone = Compile(text);
    int reasoned = 0;
    for (int round = 0; round < 20; ++round) {
      const std::string answer = Generate(*constraint, random, 250);
      const AssistantDelta split = SplitCalls(rules, answer);
      reasoned += !split.reasoning.empty();
      const auto state = alone->NewState();
      for (const char c : split.content) {
        ASSERT_TRUE(state->Accept(Shared().IdOf(c))) << answer;
      }
      EXPECT_TRUE(state->complete()) << answer;
      EXPECT_TRUE(split.calls.empty());
    }
    if (rules.begins_in_reasoning) {
      EXPECT_GT(reasoned, 10);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ToolConstraints, ::testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name(info.param.syntax->name);
  std::erase_if(name, [](char c) { return c == '-' || c == '.'; });
  return name + (info.param.begins_in_reasoning ? "InReasoning"
                 : info.param.reasons           ? "WithReasoning"
                                                : "");
});

// Returns how many bytes of `text` a constraint allows, one token each.
size_t Allowed(const CompiledConstraint& constraint, std::string_view text) {
  const auto state = constraint.NewState();
  constexpr TokenId kFirstByte = 9;  // behind the special tokens
  size_t size = 0;
  while (size < text.size() && state->Accept(kFirstByte + static_cast<uint8_t>(text[size]))) ++size;
  return size;
}

TEST(AnswerConstraint, JsonThatIsNoCallIsFreeText) {
  for (const char* name : {"llama3", "json"}) {
    const SplitRules rules = {.syntax = FindCallSyntax(name), .has_tools = true};
    const auto constraint =
        Compile(AnswerConstraint(CallSettings(ToolChoice::kAuto), rules, std::nullopt));
    ASSERT_NE(constraint, nullptr);
    for (const std::string text : {R"([{"name": "Bob", "age": 3}])", R"({"name": "first", "x": 1})",
                                   R"([{"name": "first"}, {"name": ")"}) {
      EXPECT_EQ(Allowed(*constraint, text), text.size()) << text;
    }
    const std::string call = Concat(rules.syntax->opening, rules.syntax->before_name, "first",
                                    rules.syntax->before_arguments);
    EXPECT_EQ(Allowed(*constraint, call + "{\"n\": 1"), call.size() + 7);
    EXPECT_EQ(Allowed(*constraint, call + "{\"other"), call.size() + 2);
  }
}

// Elements come in the order of the schema, with strings as they are.
TEST(AnswerConstraint, ElementsFollowTheSchema) {
  ToolSettings settings = CallSettings(ToolChoice::kNamed);
  settings.callable[0].parameters = R"({"type": "object", "required": ["z"], "properties": {
      "z": {"type": "string", "maxLength": 3}, "l": {"type": "array", "items": {"type": "null"}},
      "e": {"enum": ["a b", 1]}}})";
  const SplitRules rules = {.syntax = FindCallSyntax("qwen3-coder"), .has_tools = true};
  const auto constraint = Compile(AnswerConstraint(settings, rules, std::nullopt));
  ASSERT_NE(constraint, nullptr);
  const auto element = [](std::string_view key, std::string_view value) {
    return Concat("<parameter=", key, ">\n", value, "\n</parameter>\n");
  };
  const std::string begin = "<tool_call>\n<function=first>\n";
  const std::string end = "</function>\n</tool_call>";
  for (const std::string& inside :
       {element("z", "a\"b"), element("z", "") + element("l", "[null, null]"),
        element("z", "abc") + element("e", "a b"), element("z", "1") + element("e", "1")}) {
    const std::string text = begin + inside + end;
    EXPECT_EQ(Allowed(*constraint, text), text.size()) << text;
  }
  for (const std::string& inside : {std::string(), element("l", "[]"), element("z", "abcd"),
                                    element("z", "a") + element("e", "c"),
                                    element("z", "a") + element("e", "1") + element("l", "[]"),
                                    element("z", "a") + element("other", "1")}) {
    const std::string text = begin + inside + end;
    EXPECT_LT(Allowed(*constraint, text), text.size()) << text;
  }
}

TEST(ConstraintCompiler, SchemasThatCannotBeCompiledAreRelaxed) {
  ToolSettings settings = CallSettings(ToolChoice::kRequired);
  settings.callable[1].parameters = R"({"type": "object", "unevaluatedProperties": {"a": 1},
                                        "$dynamicRef": "#x"})";
  const SplitRules rules = {.syntax = FindCallSyntax("hermes"), .has_tools = true};
  ConstraintCompiler compiler(Shared().index(), {}, 10 << 20);
  ConstraintField field{.spec = AnswerConstraint(settings, rules, std::nullopt), .param = "tools"};
  EXPECT_FALSE(compiler.Compile(field).ok());
  field.relaxes_schemas = true;
  const auto relaxed = compiler.Compile(field);
  ASSERT_TRUE(relaxed.ok()) << relaxed.status();
  EXPECT_EQ(compiler.Find(field), *relaxed);
  std::mt19937 random(4);
  for (int round = 0; round < 30; ++round) {
    const std::string text = Generate(**relaxed, random, 250);
    for (const ToolCallDelta& call : SplitCalls(rules, text).calls) ExpectValid(call, text);
  }
  // A strict schema is never relaxed.
  settings.callable[1].strict = true;
  field.spec = AnswerConstraint(settings, rules, std::nullopt);
  EXPECT_FALSE(compiler.Compile(field).ok());
}

}  // namespace
}  // namespace moeserve::server
