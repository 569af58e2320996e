// Structured output: the request fields, compilation and caching, and requests to the whole server.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <latch>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "server/base/api_error.h"
#include "server/base/work_pool.h"
#include "server/fields/structured_fields.h"
#include "server/generation/constraint_compiler.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;
using Kind = ConstraintSpec::Kind;

struct Spelling {
  const char* body;
  Kind kind;
  const char* text;
  const char* param;
};

void PrintTo(const Spelling& spelling, std::ostream* out) { *out << spelling.param; }

class Spellings : public ::testing::TestWithParam<Spelling> {};

TEST_P(Spellings, MeanTheSameConstraint) {
  const Spelling& expected = GetParam();
  const auto found = ParseConstraint(Json::parse(expected.body));
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_TRUE(found->has_value());
  EXPECT_EQ((*found)->spec.kind, expected.kind);
  EXPECT_EQ((*found)->spec.text, expected.text);
  EXPECT_EQ((*found)->param, expected.param);
}

INSTANTIATE_TEST_SUITE_P(
    Fields, Spellings,
    ::testing::Values(
        Spelling{R"({"response_format": {"type": "json_object"}})", Kind::kJsonObject, "",
                 "response_format"},
        Spelling{R"({"response_format": {"type": "json_schema",
                     "json_schema": {"name": "a", "schema": {"type": "null"}}}})",
                 Kind::kJsonSchema, R"({"type":"null"})", "response_format"},
        Spelling{R"({"structured_outputs": {"json": {"type": "null"}, "regex": null}})",
                 Kind::kJsonSchema, R"({"type":"null"})", "structured_outputs.json"},
        Spelling{R"({"structured_outputs": {"json": "{}"}})", Kind::kJsonSchema, "{}",
                 "structured_outputs.json"},
        Spelling{R"({"structured_outputs": {"json_object": true}})", Kind::kJsonObject, "",
                 "structured_outputs.json_object"},
        Spelling{R"({"structured_outputs": {"regex": "a+"}})", Kind::kRegex, "a+",
                 "structured_outputs.regex"},
        Spelling{R"({"structured_outputs": {"choice": ["a", "b"]}})", Kind::kChoice, "",
                 "structured_outputs.choice"},
        Spelling{R"({"guided_json": {"type": "null"}})", Kind::kJsonSchema, R"({"type":"null"})",
                 "guided_json"},
        Spelling{R"({"guided_regex": "a+"})", Kind::kRegex, "a+", "guided_regex"},
        Spelling{R"({"guided_choice": ["a"]})", Kind::kChoice, "", "guided_choice"},
        Spelling{R"({"guided_grammar": "start: A"})", Kind::kGrammar, "start: A", "guided_grammar"},
        Spelling{R"({"structured_outputs": {"grammar": "root ::= \"a\""}})", Kind::kGrammar,
                 "root ::= \"a\"", "structured_outputs.grammar"}));

// Both forms of a structural tag describe the same texts, and so does the form as a string.
TEST(ParseConstraint, StructuralTags) {
  const Json older = Json::parse(R"({"type": "structural_tag", "triggers": ["<f"],
      "structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}]})");
  const Json newer = Json::parse(R"({"type": "structural_tag", "format": {"type":
      "triggered_tags", "triggers": ["<f"], "tags": [{"begin": "<f=a>", "content": {"type":
      "json_schema", "json_schema": {"type": "object"}}, "end": "</f>"}]}})");
  std::vector<std::string> texts;
  for (const Json& body : {Json{{"response_format", older}}, Json{{"response_format", newer}},
                           Json{{"structured_outputs", {{"structural_tag", older}}}},
                           Json{{"structured_outputs", {{"structural_tag", newer.dump()}}}}}) {
    const auto found = ParseConstraint(body);
    ASSERT_TRUE(found.ok() && found->has_value()) << found.status();
    EXPECT_EQ((*found)->spec.kind, Kind::kFormat);
    texts.push_back(CanonicalText((*found)->spec));
    EXPECT_EQ(texts.back(), texts.front());
  }
}

TEST(ParseConstraint, FormatsOfSeveralParts) {
  const auto found = ParseConstraint(Json::parse(R"({"response_format": {"type": "structural_tag",
      "format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
        {"type": "or", "elements": [{"type": "regex", "pattern": "a+"},
                                    {"type": "const_string", "value": "none"},
                                    {"type": "grammar", "grammar": "root ::= \"g\""}]},
        {"type": "tags_with_separator", "separator": ", ", "at_least_one": true, "tags": [
          {"type": "tag", "begin": "[", "content": {"type": "json_schema", "json_schema": true},
           "end": ["]"]}]}]}}})"));
  ASSERT_TRUE(found.ok() && found->has_value()) << found.status();
  const auto& parts = (*found)->spec.format->parts;
  ASSERT_EQ(parts.size(), 3u);
  ASSERT_EQ(parts[1].parts.size(), 3u);
  EXPECT_EQ(parts[1].parts[2].kind, TextFormat::Kind::kGrammar);
  ASSERT_NE(parts[2].tags, nullptr);
  EXPECT_FALSE(parts[2].tags->free_text);
  EXPECT_TRUE(parts[2].tags->at_least_one);
  EXPECT_EQ(parts[2].tags->separator, ", ");
  EXPECT_EQ(parts[2].tags->tags[0].end, "]");
}

TEST(ParseConstraint, FreeText) {
  for (const char* body :
       {"{}", R"({"response_format": null})", R"({"response_format": {"type": "text"}})",
        R"({"structured_outputs": {}})", R"({"structured_outputs": {"json_object": false}})",
        R"({"guided_json": null})"}) {
    const auto found = ParseConstraint(Json::parse(body));
    ASSERT_TRUE(found.ok()) << body << found.status();
    EXPECT_FALSE(found->has_value()) << body;
  }
}

TEST(ParseConstraint, StrictIsPassedOn) {
  const auto found = ParseConstraint(Json::parse(
      R"({"response_format": {"type": "json_schema",
          "json_schema": {"name": "a", "schema": {}, "strict": true}}})"));
  ASSERT_TRUE(found.ok() && found->has_value());
  EXPECT_TRUE((*found)->spec.strict);
}

struct FormatRefusal {
  const char* body;
  const char* code;
  const char* param;
};

void PrintTo(const FormatRefusal& refusal, std::ostream* out) {
  *out << refusal.code << ' ' << refusal.param;
}

class StructuredRefusals : public ::testing::TestWithParam<FormatRefusal> {};

TEST_P(StructuredRefusals, NameCodeAndField) {
  const auto found = ParseConstraint(Json::parse(GetParam().body));
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(ApiCode(found.status()), GetParam().code) << found.status();
  EXPECT_EQ(ApiParam(found.status()), GetParam().param) << found.status();
}

INSTANTIATE_TEST_SUITE_P(
    Fields, StructuredRefusals,
    ::testing::Values(
        FormatRefusal{R"({"response_format": "json"})", "invalid_value", "response_format"},
        FormatRefusal{R"({"response_format": {}})", "invalid_value", "response_format"},
        FormatRefusal{R"({"response_format": {"type": "xml"}})", "unsupported_parameter",
                      "response_format.type"},
        FormatRefusal{R"({"response_format": {"type": "json_schema"}})", "missing_field",
                      "response_format.json_schema"},
        FormatRefusal{R"({"response_format": {"type": "json_schema", "json_schema": []}})",
                      "invalid_value", "response_format.json_schema"},
        FormatRefusal{
            R"({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}})",
            "missing_field", "response_format.json_schema.name"},
        FormatRefusal{R"({"response_format": {"type": "json_schema",
                    "json_schema": {"name": "a b", "schema": {}}}})",
                      "invalid_value", "response_format.json_schema.name"},
        FormatRefusal{
            R"({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}})",
            "missing_field", "response_format.json_schema.schema"},
        FormatRefusal{R"({"response_format": {"type": "json_schema",
                    "json_schema": {"name": "a", "schema": 3}}})",
                      "invalid_value", "response_format.json_schema.schema"},
        FormatRefusal{R"({"response_format": {"type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}, "strict": 1}}})",
                      "invalid_value", "response_format.json_schema.strict"},
        FormatRefusal{R"({"structured_outputs": "a"})", "invalid_value", "structured_outputs"},
        FormatRefusal{R"({"structured_outputs": {"grammar": ""}})", "invalid_value",
                      "structured_outputs.grammar"},
        FormatRefusal{R"({"structured_outputs": {"xml": "a"}})", "unsupported_parameter",
                      "structured_outputs.xml"},
        FormatRefusal{R"({"structured_outputs": {"structural_tag": "x"}})", "invalid_value",
                      "structured_outputs.structural_tag"},
        FormatRefusal{R"({"response_format": {"type": "structural_tag"}})", "missing_field",
                      "response_format.format"},
        FormatRefusal{
            R"({"response_format": {"type": "structural_tag", "format": {"type": "xml"}}})",
            "unsupported_parameter", "response_format.format.type"},
        FormatRefusal{R"({"response_format": {"type": "structural_tag", "triggers": ["<"],
                    "structures": [{"begin": "<", "schema": 1, "end": ">"}]}})",
                      "invalid_value", "response_format.structures[0].schema"},
        FormatRefusal{R"({"response_format": {"type": "structural_tag", "triggers": [""],
                    "structures": [{"begin": "<", "schema": {}, "end": ">"}]}})",
                      "invalid_value", "response_format.triggers"},
        FormatRefusal{R"({"response_format": {"type": "structural_tag", "format": {"type": "or",
                    "elements": [{"type": "any_text", "escapes": ["a"]}]}}})",
                      "unsupported_parameter", "response_format.format.elements[0].escapes"},
        FormatRefusal{R"({"response_format": {"type": "structural_tag", "format": {"type": "tag",
                    "begin": "a", "end": ["b", "c"], "content": {"type": "any_text"}}}})",
                      "unsupported_parameter", "response_format.format.end"},
        FormatRefusal{R"({"structured_outputs": {"json_object": 1}})", "invalid_value",
                      "structured_outputs.json_object"},
        FormatRefusal{R"({"structured_outputs": {"json": {}, "regex": "a"}})", "invalid_value",
                      "structured_outputs.regex"},
        FormatRefusal{R"({"guided_json": {}, "response_format": {"type": "json_object"}})",
                      "invalid_value", "guided_json"},
        FormatRefusal{R"({"guided_choice": []})", "invalid_value", "guided_choice"},
        FormatRefusal{R"({"guided_choice": ["a", 1]})", "invalid_value", "guided_choice"},
        FormatRefusal{R"({"guided_regex": ""})", "invalid_value", "guided_regex"}));

ConstraintCompiler MakeCompiler(size_t max_cached_bytes = size_t{128} << 20) {
  static const ByteTokenizer tokenizer;
  return ConstraintCompiler(VocabularyIndex::Build(tokenizer, {kEos}, kVocabSize),
                            ConstraintLimits(), max_cached_bytes);
}

ConstraintField Regex(const std::string& pattern) {
  ConstraintField field;
  field.spec.kind = Kind::kRegex;
  field.spec.text = pattern;
  field.param = "guided_regex";
  return field;
}

TEST(ConstraintCompiler, EqualRequestsShareOneConstraint) {
  ConstraintCompiler compiler = MakeCompiler();
  const auto first = compiler.Compile(Regex("a+"));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*compiler.Compile(Regex("a+")), *first);
  ConstraintField schema = Regex("a+");
  schema.spec.kind = Kind::kChoice;
  schema.spec.choices = {"a+"};
  const auto choice = compiler.Compile(schema);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_NE(*choice, *first);
  schema.spec.choices = {"a", "+"};
  EXPECT_NE(*compiler.Compile(schema), *choice);
  EXPECT_EQ(compiler.cached(), 3u);
}

TEST(ConstraintCompiler, KeepsTheLastUsedWithinItsBytes) {
  const size_t one = (*MakeCompiler().Compile(Regex("a+")))->memory_bytes();
  ConstraintCompiler compiler = MakeCompiler(2 * one + 1000);
  const auto a = *compiler.Compile(Regex("a+"));
  const auto b = *compiler.Compile(Regex("b+"));
  EXPECT_EQ(*compiler.Compile(Regex("a+")), a);
  const auto c = *compiler.Compile(Regex("c+"));  // evicts b from the cache
  EXPECT_EQ(compiler.cached(), 2u);
  EXPECT_EQ(*compiler.Compile(Regex("a+")), a);
  EXPECT_NE(*compiler.Compile(Regex("b+")), b);
}

TEST(ConstraintCompiler, RefusalsAreNotKept) {
  ConstraintCompiler compiler = MakeCompiler();
  const auto refused = compiler.Compile(Regex("("));
  EXPECT_EQ(ApiCode(refused.status()), "invalid_schema");
  EXPECT_EQ(ApiParam(refused.status()), "guided_regex");
  EXPECT_EQ(compiler.cached(), 0u);
}

TEST(ConstraintCompiler, WithoutVocabularySaysWhy) {
  ConstraintCompiler compiler(absl::InvalidArgumentError("it has no tokenizer"), ConstraintLimits(),
                              size_t{1} << 20);
  const auto refused = compiler.Compile(Regex("a"));
  EXPECT_EQ(ApiCode(refused.status()), "invalid_schema");
  EXPECT_NE(refused.status().ToString().find("no tokenizer"), std::string::npos);
}

using StructuredHttp = HttpTest;

TEST_F(StructuredHttp, ConstraintReachesTheEngineCompiled) {
  Start();
  const RawResponse response = Complete(R"({"prompt": "abc", "guided_regex": "h[a-z]+", "n": 2})");
  EXPECT_EQ(response.status, 200) << response.body;
  const std::vector<Request> submitted = engine_->submitted();
  ASSERT_EQ(submitted.size(), 2u);
  const auto& constraint = submitted[0].sampling.constraint;
  ASSERT_NE(constraint, nullptr);
  EXPECT_EQ(submitted[1].sampling.constraint, constraint);
  auto state = constraint->NewState();
  EXPECT_FALSE(state->Accept('x'));
  EXPECT_TRUE(state->Accept('h'));
}

TEST_F(StructuredHttp, StreamsToo) {
  Start();
  const RawResponse response =
      Complete(R"({"prompt": "abc", "response_format": {"type": "json_object"}, "stream": true})");
  EXPECT_EQ(response.status, 200);
  EXPECT_NE(response.body.find("data: [DONE]"), std::string::npos);
}

TEST_F(StructuredHttp, BadConstraintNeverReachesTheEngine) {
  Start();
  for (const char* body : {R"({"prompt": "abc", "guided_regex": "("})",
                           R"({"prompt": "abc", "guided_json": {"type": "nonsense"}})",
                           R"({"prompt": "abc", "guided_json": "{"})",
                           R"({"prompt": "abc", "response_format": {"type": "json_schema",
            "json_schema": {"name": "a", "schema": {"not": {}}, "strict": true}}})"}) {
    const RawResponse response = Complete(body);
    EXPECT_EQ(response.status, 400) << body;
    EXPECT_EQ(Error(response)["code"], "invalid_schema") << response.body;
  }
  const RawResponse response =
      Complete(R"({"prompt": "abc", "guided_regex": "a", "ignore_eos": true})");
  EXPECT_EQ(Error(response)["param"], "ignore_eos");
  EXPECT_TRUE(engine_->submitted().empty());
}

TEST_F(StructuredHttp, OthersAreServedWhileConstraintsWait) {
  Start();
  EXPECT_EQ(Complete(R"({"prompt": "abc", "guided_regex": "known"})").status, 200);
  std::promise<void> go;
  const std::shared_future<void> ready = go.get_future().share();
  std::latch begun(3);  // the threads of the pool
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(context_->work_pool().Post([ready, &begun] {
      begun.count_down();
      ready.wait();
    }));
  }
  begun.wait();
  RawClient waiting(port());
  waiting.Send(Post("/v1/completions", R"({"prompt": "abc", "guided_regex": "a"})"));
  RawClient leaving(port());
  leaving.Send(Post("/v1/completions", R"({"prompt": "abc", "guided_regex": "b"})"));
  EXPECT_EQ(Complete(R"({"prompt": "abc"})").status, 200);
  EXPECT_EQ(Complete(R"({"prompt": "abc", "guided_regex": "known"})").status, 200);
  leaving.Close();
  // The work pool's queue is bounded: fill it.
  while (context_->work_pool().Post([] {})) {
  }
  const RawResponse refused = Complete(R"({"prompt": "abc", "guided_regex": "a"})");
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(Error(refused)["code"], "queue_full");
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  EXPECT_NE(
      context_->MetricsText().find("moeserve_requests_rejected_total{reason=\"queue_full\"} 1\n"),
      std::string::npos);
  // Wait until the server has noticed that the second client has disconnected.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  go.set_value();
  EXPECT_EQ(waiting.ReadResponse().status, 200);
  EXPECT_EQ(engine_->submitted().size(), 4u);
}

TEST_F(StructuredHttp, MessagesAreEscaped) {
  Start();
  const RawResponse response =
      Complete(R"({"prompt": "abc", "guided_json": {"properties": {"a\n\u001b": {"type": "x"}}}})");
  const std::string message = Error(response)["message"];
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_EQ(message.find('\x1b'), std::string::npos) << message;
}

}  // namespace
}  // namespace moeserve::server::testing
