// Limits of requests about texts whose work or answer is far larger than their body.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/server/encode_server.h"

namespace moeserve::server::testing {
namespace {

using EncodeLimits = EncodeServer;
using Refused = std::pair<std::string, std::string>;

// A cross-encoder reads the query once for each document.
TEST_F(EncodeLimits, LongQueriesOfManyDocuments) {
  Start("roberta-cross-encoder");
  const std::vector<std::string> many(1024, "b");
  const std::string query(kMaxFirstBytes / many.size() + 1, ' ');
  EXPECT_EQ(Refusal("/rerank", {{"query", query}, {"documents", many}}),
            Refused("invalid_value", "query"));
  EXPECT_EQ(Refusal("/score", {{"text_1", query}, {"text_2", many}}),
            Refused("invalid_value", "text_1"));
  const Json few = Answer("/rerank", {{"query", query}, {"documents", {"a", "b"}}});
  EXPECT_EQ(few["results"].size(), 2u);
}

TEST_F(EncodeLimits, ManyMasksInLongTexts) {
  Start("bert-masked-lm");
  std::string text;
  for (int i = 0; i < 150; ++i) text += "<mask>";
  EXPECT_EQ(Refusal("/v1/fill-mask", {{"input", text}, {"top_k", 100}}),
            Refused("invalid_value", "top_k"));
  EXPECT_EQ(Answer("/v1/fill-mask", {{"input", text}, {"top_k", 2}})["masks"].size(), 150u);
  // Texts are not cut here, so no error speaks of it.
  const RawResponse longer = Send("/v1/fill-mask", {{"input", text + text}});
  EXPECT_EQ(longer.status, 400);
  EXPECT_EQ(longer.body.find("truncate"), std::string::npos) << longer.body;
}

// The answer of /predict has no place for the labels of tokens.
TEST_F(EncodeLimits, PredictNeedsLabelsOfTexts) {
  Start("privacy-filter");
  EXPECT_EQ(Refusal("/predict", {{"inputs", "cab"}}), Refused("unsupported_task", "model"));
}

}  // namespace
}  // namespace moeserve::server::testing
