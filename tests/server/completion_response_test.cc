#include "server/completions/completion_response.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "server/base/status_conversion.h"
#include "server/base/utf8.h"
#include "server/chat/chat_response.h"
#include "server/generation/token_text.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

TEST(Utf8, ReplacesMaximalIllFormedParts) {
  EXPECT_EQ(Shortened("abc", 3), "abc");
  EXPECT_EQ(Shortened("abcd", 3), "abc...");
  EXPECT_EQ(Shortened("ab\xC3\xA9z", 3), "ab...") << "no half characters";
  EXPECT_EQ(ReplaceInvalidUtf8("a\xC3\xA9z"), "a\xC3\xA9z");
  EXPECT_EQ(ReplaceInvalidUtf8("\xC3"), "\xEF\xBF\xBD");
  EXPECT_EQ(ReplaceInvalidUtf8("\xE2\x82X"), "\xEF\xBF\xBDX");
  EXPECT_EQ(ReplaceInvalidUtf8("\xF0\x9F\x98\x80"), "\xF0\x9F\x98\x80");
  EXPECT_EQ(ReplaceInvalidUtf8("\xED\xA0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(ReplaceInvalidUtf8("\xC0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(ReplaceInvalidUtf8("\xF4\x90\x80\x80").size(), 12u);
  EXPECT_EQ(CountCodePoints("a\xC3\xA9\xF0\x9F\x98\x80"), 3u);
}

// In chats, alternatives are a list; in completions, their texts are keys.
TEST(Logprobs, KeepAlternativesOfEqualText) {
  const testing::ByteTokenizer tokenizer;
  TokenLogprob logprob;
  logprob.token = 0x80;
  logprob.logprob = -1.0f;
  logprob.top = {{0x80, -1.0f}, {0x81, -2.0f}};
  const auto entry = ChatLogprobJson(&tokenizer, logprob, false);
  ASSERT_TRUE(entry.ok()) << entry.status();
  ASSERT_EQ((*entry)["top_logprobs"].size(), 2u);
  EXPECT_EQ((*entry)["top_logprobs"][0]["token"], (*entry)["top_logprobs"][1]["token"]);
  EXPECT_NE((*entry)["top_logprobs"][0]["bytes"], (*entry)["top_logprobs"][1]["bytes"]);
  const auto top = [&](bool as_ids) {
    LogprobArrays arrays(&tokenizer, as_ids);
    EXPECT_TRUE(arrays.Add(logprob).ok());
    return arrays.Take()["top_logprobs"][0];
  };
  EXPECT_EQ(top(false).size(), 1u);
  EXPECT_EQ(top(false).front(), -1.0);
  EXPECT_EQ(top(true), OrderedJson({{"token_id:128", -1.0}, {"token_id:129", -2.0}}));
}

TEST(TokenText, ShowsPartsOfCharactersAsReplacement) {
  testing::ByteTokenizer tokenizer;
  EXPECT_EQ(TokenText(&tokenizer, 'a', false), "a");
  EXPECT_EQ(TokenText(&tokenizer, 0xC3, false), "\xEF\xBF\xBD");
  EXPECT_EQ(TokenText(&tokenizer, testing::kEos, false), "<eos>");
  EXPECT_EQ(TokenText(&tokenizer, 'a', true), "token_id:97");
  EXPECT_EQ(TokenText(nullptr, 5, false), "token_id:5");
}

TEST(LogprobArrays, HaveOneEntryPerTokenWithEqualNumbers) {
  testing::ByteTokenizer tokenizer;
  LogprobArrays arrays(&tokenizer, false);
  arrays.AddUnscored('a');
  TokenLogprob logprob;
  logprob.token = 'b';
  logprob.logprob = -1.1f;
  logprob.top = {{'c', -0.3f}, {'b', -1.1f}};
  ASSERT_TRUE(arrays.Add(logprob).ok());
  logprob.token = testing::kEos;
  logprob.logprob = -std::numeric_limits<float>::infinity();
  logprob.top = {{'c', -0.3f}};
  ASSERT_TRUE(arrays.Add(logprob).ok());
  const OrderedJson out = arrays.Take();
  EXPECT_EQ(out["tokens"], OrderedJson({"a", "b", "<eos>"}));
  EXPECT_TRUE(out["token_logprobs"][0].is_null());
  EXPECT_TRUE(out["top_logprobs"][0].is_null());
  EXPECT_EQ(out["token_logprobs"][1].dump(), out["top_logprobs"][1]["b"].dump());
  EXPECT_EQ(out["top_logprobs"][1].size(), 2u);
  EXPECT_EQ(out["token_logprobs"][2].dump(), "-9999.0");
  EXPECT_EQ(out["top_logprobs"][2]["<eos>"].dump(), "-9999.0");
  EXPECT_EQ(out["top_logprobs"][2].size(), 2u);
  EXPECT_EQ(out["text_offset"], OrderedJson({0, 1, 2}));
}

TEST(LogprobArrays, ZeroAlternativesGiveTheTokenItself) {
  testing::ByteTokenizer tokenizer;
  LogprobArrays arrays(&tokenizer, false);
  TokenLogprob logprob;
  logprob.token = 'b';
  logprob.logprob = -1.0f;
  ASSERT_TRUE(arrays.Add(logprob).ok());
  EXPECT_EQ(arrays.Take()["top_logprobs"][0], OrderedJson({{"b", -1.0}}));
}

TEST(LogprobArrays, KeepTheLargerOfEqualTextsAndCountCodePoints) {
  testing::ByteTokenizer tokenizer;
  LogprobArrays arrays(&tokenizer, false);
  TokenLogprob logprob;
  logprob.token = 0xC3;
  logprob.logprob = -5.0f;
  logprob.top = {{0xC4, -1.0f}, {0xC5, -2.0f}};
  ASSERT_TRUE(arrays.Add(logprob).ok());
  ASSERT_TRUE(arrays.Add(logprob).ok());
  const OrderedJson out = arrays.Take();
  EXPECT_EQ(out["top_logprobs"][0].size(), 1u);
  EXPECT_EQ(out["top_logprobs"][0].begin().value(), -1.0);
  EXPECT_EQ(out["text_offset"], OrderedJson({0, 1}));
}

TEST(LogprobArrays, OffsetsRunOnAcrossPieces) {
  testing::ByteTokenizer tokenizer;
  LogprobArrays arrays(&tokenizer, false);
  arrays.AddUnscored(testing::kEos);
  EXPECT_EQ(arrays.Take()["text_offset"], OrderedJson({0}));
  EXPECT_TRUE(arrays.empty());
  arrays.AddUnscored('x');
  EXPECT_EQ(arrays.Take()["text_offset"], OrderedJson({5}));
}

TEST(LogprobArrays, RefuseNan) {
  testing::ByteTokenizer tokenizer;
  LogprobArrays arrays(&tokenizer, false);
  TokenLogprob logprob;
  logprob.logprob = std::nanf("");
  EXPECT_EQ(arrays.Add(logprob).code(), absl::StatusCode::kInternal);
}

TEST(ChoiceJson, HasEveryKey) {
  ChoicePart part;
  part.index = 3;
  part.text = "x";
  EXPECT_EQ(DumpJson(ChoiceJson(part)),
            R"({"index":3,"text":"x","logprobs":null,"finish_reason":null,"stop_reason":null})");
  part.finish_reason = FinishReason::kStop;
  part.stop_string = "END";
  EXPECT_EQ(ChoiceJson(part)["stop_reason"], "END");
  part.stop_string.reset();
  part.stop_token = 5;
  part.finish_reason = FinishReason::kLength;
  EXPECT_EQ(ChoiceJson(part)["stop_reason"], 5);
  EXPECT_EQ(ChoiceJson(part)["finish_reason"], "length");
}

TEST(CompletionWriter, ReturnsTheBestSamplesOfEachPrompt) {
  testing::ByteTokenizer tokenizer;
  AnswerOptions options;
  options.samples = 4;
  options.best = 2;
  CompletionWriter writer({.id = "cmpl-1", .unique_id = "1", .created = 0, .model = "tiny"},
                          options, &tokenizer, 8);
  const float inf = std::numeric_limits<float>::infinity();
  // A long sample has the smaller sum but the larger mean; sample 7 is as good as sample 5.
  const std::vector<std::vector<float>> logprobs = {
      {-2.0f}, {-1.0f, -1.5f, -1.0f}, {-inf}, {-3.0f}, {-4.0f}, {-1.0f}, {-9.0f}, {-1.0f}};
  for (size_t i = 0; i < logprobs.size(); ++i) {
    for (size_t j = 0; j < logprobs[i].size(); ++j) {
      OutputDelta delta;
      if (j == 0) delta.text = std::to_string(i);
      delta.logprobs.resize(1);
      delta.logprobs[0].logprob = logprobs[i][j];
      ASSERT_TRUE(writer.Add(static_cast<int>(i), {}, std::move(delta)).ok());
    }
  }
  const OrderedJson choices = writer.TakeAnswer(Usage())["choices"];
  ASSERT_EQ(choices.size(), 4u);
  const std::vector<std::string> expected = {"1", "0", "5", "7"};
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(choices[i]["index"], i);
    EXPECT_EQ(choices[i]["text"], expected[i]);
    EXPECT_TRUE(choices[i]["logprobs"].is_null()) << "not asked for";
  }
}

TEST(SseEvent, IsOneLine) {
  EXPECT_EQ(SseEvent(OrderedJson{{"text", "a\nb\r\n\n"}}),
            "data: {\"text\":\"a\\nb\\r\\n\\n\"}\n\n");
  EXPECT_EQ(SseEvent(OrderedJson{{"text", "\xFF"}}), "data: {\"text\":\"\xEF\xBF\xBD\"}\n\n");
}

TEST(ErrorJson, HasAllFourKeys) {
  HttpError error;
  error.message = "m";
  EXPECT_EQ(ErrorJson(error),
            R"({"error":{"message":"m","type":"server_error","param":null,"code":null}})");
}

struct Mapping {
  absl::StatusCode status;
  int http;
  const char* type;
  const char* code;
};

TEST(ToHttpError, FollowsTheTable) {
  for (const Mapping& m : {
           Mapping{absl::StatusCode::kInvalidArgument, 400, "invalid_request_error",
                   "invalid_value"},
           Mapping{absl::StatusCode::kUnauthenticated, 401, "authentication_error",
                   "invalid_api_key"},
           Mapping{absl::StatusCode::kPermissionDenied, 403, "permission_error", "forbidden"},
           Mapping{absl::StatusCode::kNotFound, 404, "invalid_request_error", "model_not_found"},
           Mapping{absl::StatusCode::kAlreadyExists, 409, "invalid_request_error",
                   "duplicate_request_id"},
           Mapping{absl::StatusCode::kInternal, 500, "server_error", "internal_error"},
           Mapping{absl::StatusCode::kUnknown, 500, "server_error", "internal_error"},
           Mapping{absl::StatusCode::kResourceExhausted, 503, "overloaded_error", "queue_full"},
           Mapping{absl::StatusCode::kUnavailable, 503, "unavailable_error", "draining"},
           Mapping{absl::StatusCode::kDeadlineExceeded, 504, "server_error", "timeout"},
       }) {
    const HttpError error = ToHttpError(absl::Status(m.status, "text"));
    EXPECT_EQ(error.status, m.http);
    EXPECT_EQ(error.type, m.type);
    EXPECT_EQ(error.code, m.code);
    EXPECT_EQ(error.message == "text", m.http != 500) << "internal texts stay in the log";
  }
}

}  // namespace
}  // namespace moeserve::server
