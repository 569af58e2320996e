// The routes about texts, over a real socket, with small models.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "tests/server/encode_server.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;

std::vector<float> FloatsOf(const Json& list) { return list.get<std::vector<float>>(); }

std::vector<float> DecodeFloats(const Json& text) {
  std::string bytes;
  EXPECT_TRUE(absl::Base64Unescape(text.get<std::string>(), &bytes));
  std::vector<float> out(bytes.size() / sizeof(float));
  std::memcpy(out.data(), bytes.data(), out.size() * sizeof(float));
  return out;
}

double LengthOf(const std::vector<float>& vector) {
  double sum = 0.0;
  for (const float x : vector) sum += double{x} * x;
  return std::sqrt(sum);
}

using Refused = std::pair<std::string, std::string>;

class Encode : public EncodeServer {
 protected:
  std::vector<float> Embedding(const Json& request) {
    return FloatsOf(Answer("/v1/embeddings", request)["data"][0]["embedding"]);
  }
};

TEST_F(Encode, EmbeddingsOfAllFormsOfInput) {
  Start("nomic-experts");
  const Json one = Answer("/v1/embeddings", {{"input", "cab"}, {"model", "small"}});
  EXPECT_EQ(one["object"], "list");
  EXPECT_EQ(one["model"], "small");
  EXPECT_EQ(one["data"][0]["object"], "embedding");
  EXPECT_EQ(one["data"][0]["index"], 0);
  EXPECT_EQ(one["usage"]["prompt_tokens"], 5);
  EXPECT_EQ(one["usage"]["total_tokens"], 5);
  EXPECT_FALSE(one["usage"].contains("completion_tokens"));
  EXPECT_GT(one["usage"]["experts_per_token"], 0);
  EXPECT_GT(one["usage"]["activated_parameters_per_token"], 0);
  const std::vector<float> vector = FloatsOf(one["data"][0]["embedding"]);
  EXPECT_EQ(vector.size(), static_cast<size_t>(spec().hidden_size));
  EXPECT_EQ(Embedding({{"input", {2, 12, 10, 11, 3}}}), vector);
  EXPECT_EQ(Embedding({{"input", {12, 10, 11}}}),
            Embedding({{"input", "cab"}, {"add_special_tokens", false}}));
  const Json many = Answer("/v1/embeddings", {{"input", {"x", "cab", ""}}});
  ASSERT_EQ(many["data"].size(), 3u);
  EXPECT_EQ(many["data"][1]["index"], 1);
  EXPECT_EQ(FloatsOf(many["data"][1]["embedding"]), vector);
  EXPECT_EQ(many["usage"]["prompt_tokens"], 3 + 5 + 2);
  const Json ids = Answer("/v1/embeddings", {{"input", {{2, 12, 10, 11, 3}, {7}}}});
  EXPECT_EQ(FloatsOf(ids["data"][0]["embedding"]), vector);
}

TEST_F(Encode, Base64HasTheSameBits) {
  Start("nomic-experts");
  const Json texts = {"cab", "a longer text of several words", ""};
  const Json floats = Answer("/v1/embeddings", {{"input", texts}});
  const Json bits = Answer("/v1/embeddings", {{"input", texts}, {"encoding_format", "base64"}});
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(DecodeFloats(bits["data"][i]["embedding"]), FloatsOf(floats["data"][i]["embedding"]));
  }
}

TEST_F(Encode, NormalizedAsTheModelSaysUnlessAskedOtherwise) {
  Start("tiny-encoder-nomic");
  EXPECT_NEAR(LengthOf(Embedding({{"input", "cab"}})), 1.0, 1e-6);
  const std::vector<float> raw = Embedding({{"input", "cab"}, {"use_activation", false}});
  EXPECT_GT(std::abs(LengthOf(raw) - 1.0), 1e-3);
  EXPECT_EQ(Embedding({{"input", "cab"}, {"normalize", false}}), raw);
  // Cut first, then normalized.
  std::vector<float> cut = Embedding({{"input", "cab"}, {"dimensions", 8}});
  ASSERT_EQ(cut.size(), 8u);
  EXPECT_NEAR(LengthOf(cut), 1.0, 1e-6);
  EXPECT_NEAR(cut[3] / cut[0], raw[3] / raw[0], 1e-4);
}

TEST_F(Encode, RawWhereTheModelSaysNothing) {
  Start("bert-vectors");
  EXPECT_GT(std::abs(LengthOf(Embedding({{"input", "cab"}})) - 1.0), 1e-3);
  EXPECT_NEAR(LengthOf(Embedding({{"input", "cab"}, {"normalize", true}})), 1.0, 1e-6);
}

TEST_F(Encode, DimensionsOfTheModel) {
  TextSettings settings;
  settings.dimensions = {4, 8};
  Start("nomic-experts", {.settings = settings});
  EXPECT_EQ(Embedding({{"input", "a"}, {"dimensions", 8}}).size(), 8u);
  EXPECT_EQ(Embedding({{"input", "a"}, {"dimensions", spec().hidden_size}}).size(),
            static_cast<size_t>(spec().hidden_size));
  for (const int size : {0, 5, spec().hidden_size + 1, -1}) {
    EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}, {"dimensions", size}}),
              Refused("invalid_value", "dimensions"));
  }
}

TEST_F(Encode, Prompts) {
  TextSettings settings;
  settings.prompts = {{"query", "q: "}, {"passage", "p: "}, {"none", ""}};
  settings.default_prompt = "passage";
  Start("nomic-experts", {.settings = settings});
  const std::vector<float> query = Embedding({{"input", "qcab"}, {"prompt_name", "none"}});
  EXPECT_EQ(Embedding({{"input", "cab"}, {"prompt_name", "query"}}), query);
  EXPECT_EQ(Embedding({{"input", "cab"}, {"input_type", "query"}}), query);
  EXPECT_EQ(Embedding({{"input", "cab"}, {"input_type", "document"}}),
            Embedding({{"input", "cab"}}));
  EXPECT_NE(Embedding({{"input", "cab"}}), query);
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}, {"prompt_name", "other"}}),
            Refused("invalid_value", "prompt_name"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}, {"input_type", "other"}}),
            Refused("invalid_value", "input_type"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", {5, 6}}, {"prompt_name", "query"}}),
            Refused("invalid_value", "prompt_name"));
}

TEST_F(Encode, LongTextsAreRefusedOrCut) {
  TextSettings settings;
  settings.max_tokens = 6;
  Start("nomic-experts", {.settings = settings});
  EXPECT_EQ(Embedding({{"input", "abcd"}}).size(), static_cast<size_t>(spec().hidden_size));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "abcde"}}),
            Refused("context_length_exceeded", "input"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", {5, 5, 5, 5, 5, 5, 5}}}),
            Refused("context_length_exceeded", "input"));
  EXPECT_EQ(Embedding({{"input", "abcdefgh"}, {"truncate_prompt_tokens", -1}}),
            Embedding({{"input", "abcd"}}));
  EXPECT_EQ(Embedding({{"input", "abcdefgh"}, {"truncate_prompt_tokens", 4}}),
            Embedding({{"input", "ab"}}));
  EXPECT_EQ(
      Embedding(
          {{"input", "abcdefgh"}, {"truncate_prompt_tokens", 4}, {"truncation_side", "left"}}),
      Embedding({{"input", "gh"}}));
  EXPECT_EQ(Embedding({{"input", {10, 11, 12, 13}}, {"truncate_prompt_tokens", 2}}),
            Embedding({{"input", {10, 11}}}));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}, {"truncate_prompt_tokens", 0}}),
            Refused("invalid_value", "truncate_prompt_tokens"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}, {"truncation_side", "up"}}),
            Refused("invalid_value", "truncation_side"));
}

TEST_F(Encode, DecodersCutAtTheLeft) {
  Start("tiny-decoder-pooling");
  EXPECT_EQ(Embedding({{"input", {10, 11, 12, 13}}, {"truncate_prompt_tokens", 2}}),
            Embedding({{"input", {12, 13}}}));
}

TEST_F(Encode, InvalidInputs) {
  Start("nomic-experts");
  const auto refused = [&](const Json& input) {
    return Refusal("/v1/embeddings", {{"input", input}});
  };
  const Refused invalid("invalid_value", "input");
  EXPECT_EQ(Refusal("/v1/embeddings", Json::object()), Refused("missing_field", "input"));
  for (const Json& input :
       {Json::array(), Json::array({Json::array()}), Json(7), Json(true), Json::object(),
        Json({"a", 5}), Json({5, "a"}), Json({{5}, "a"}), Json({"a", {5}}), Json({{{5}}}),
        Json({-1}), Json({96}), Json({1.5}), Json({{{"text", "a"}}})}) {
    EXPECT_EQ(refused(input), invalid) << input;
  }
  EXPECT_EQ(refused(std::vector<std::string>(2049, "a")), invalid);
  RawClient client(port());
  client.Send(Post("/v1/embeddings", R"({"input": [NaN]})"));
  EXPECT_EQ(Json::parse(client.ReadResponse().body)["error"]["code"], "invalid_json");
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}, {"encoding_format", "hex"}}),
            Refused("invalid_value", "encoding_format"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", ""}, {"add_special_tokens", false}}), invalid);
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", {5, 6}}, {"token_type_ids", {0}}}),
            Refused("invalid_value", "token_type_ids"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", {5, 6}}, {"token_type_ids", {0, 2}}}),
            Refused("invalid_value", "token_type_ids"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}, {"embed_dtype", "float16"}}),
            Refused("unsupported_parameter", "embed_dtype"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}, {"top_n", 3}}),
            Refused("unsupported_parameter", "top_n"));
  EXPECT_EQ(Send("/v1/embeddings", {{"input", "a"}, {"model", "other"}}).status, 404);
}

TEST_F(Encode, TextsNeedATokenizer) {
  Start("nomic-experts", {.tokenizer = false});
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}}), Refused("invalid_value", "input"));
  EXPECT_FALSE(Embedding({{"input", {5, 6}}}).empty());
}

TEST_F(Encode, ManyTextsPassASmallQueue) {
  Start("nomic-experts", {.engine = {.max_queued_seqs = 200}});
  std::vector<std::string> texts;
  for (int i = 0; i < 2048; ++i) {
    texts.push_back(std::string(1 + i % 7, static_cast<char>('a' + i % 26)));
  }
  const Json answer = Answer("/v1/embeddings", {{"input", texts}, {"encoding_format", "base64"}});
  ASSERT_EQ(answer["data"].size(), texts.size());
  for (const size_t i : {0u, 127u, 128u, 1000u, 2047u}) {
    EXPECT_EQ(answer["data"][i]["index"], i);
    EXPECT_EQ(DecodeFloats(answer["data"][i]["embedding"]), Embedding({{"input", texts[i]}}));
  }
}

TEST_F(Encode, ClientThatLeavesCancelsItsTexts) {
  Start("nomic-experts");
  const std::vector<std::string> texts(2048, std::string(150, 'a'));
  {
    RawClient client(port());
    client.Send(Post("/v1/embeddings", Json({{"input", texts}}).dump()));
    for (int i = 0; i < 500 && engine_->Stats().running == 0; ++i) {
      absl::SleepFor(absl::Milliseconds(2));
    }
    EXPECT_GT(engine_->Stats().running, 0);
    client.Reset();
  }
  EngineStats stats;
  for (int i = 0; i < 1000; ++i) {
    stats = engine_->Stats();
    if (stats.running == 0 && stats.waiting == 0) break;
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(stats.running + stats.waiting, 0);
  EXPECT_GT(stats.finished_abort, 0u);
  EXPECT_LT(stats.finished_stop + stats.finished_length, 2048u);
}

TEST_F(Encode, PoolingTasks) {
  Start("nomic-experts");
  const Json embed = Answer("/pooling", {{"input", "cab"}});
  EXPECT_EQ(embed["data"][0]["object"], "pooling");
  EXPECT_EQ(FloatsOf(embed["data"][0]["data"]), Embedding({{"input", "cab"}}));
  const Json rows = Answer("/pooling", {{"input", "cab"}, {"task", "token_embed"}});
  ASSERT_EQ(rows["data"][0]["data"].size(), 5u);
  // The vector of the text is the mean of those of its tokens.
  const std::vector<float> mean = FloatsOf(
      Answer("/pooling", {{"input", "cab"}, {"use_activation", false}})["data"][0]["data"]);
  const Json raw =
      Answer("/pooling", {{"input", "cab"}, {"task", "token_embed"}, {"use_activation", false}});
  for (size_t k = 0; k < mean.size(); ++k) {
    double sum = 0.0;
    for (const Json& row : raw["data"][0]["data"]) sum += row[k].get<double>();
    EXPECT_NEAR(sum / 5, mean[k], 1e-5);
  }
  const Json bits = Answer(
      "/pooling", {{"input", "cab"}, {"task", "token_embed"}, {"encoding_format", "base64"}});
  EXPECT_EQ(bits["data"][0]["shape"], Json({5, spec().hidden_size}));
  EXPECT_EQ(DecodeFloats(bits["data"][0]["data"])[0], rows["data"][0]["data"][0][0].get<float>());
  EXPECT_EQ(Refusal("/pooling", {{"input", "a"}, {"task", "classify"}}),
            Refused("unsupported_task", "task"));
  EXPECT_EQ(Refusal("/pooling", {{"input", "a"}, {"task", "sing"}}),
            Refused("invalid_value", "task"));
}

TEST_F(Encode, ClassesOfTexts) {
  Start("bert-classifier");
  const Json answer = Answer("/classify", {{"input", {"cab", "b"}}});
  ASSERT_EQ(answer["data"].size(), 2u);
  const std::vector<float> probs = FloatsOf(answer["data"][0]["probs"]);
  ASSERT_EQ(probs.size(), 3u);
  EXPECT_NEAR(probs[0] + probs[1] + probs[2], 1.0, 1e-6);
  EXPECT_EQ(answer["data"][0]["num_classes"], 3);
  const auto best = std::ranges::max_element(probs) - probs.begin();
  EXPECT_EQ(answer["data"][0]["label"], "LABEL_" + std::to_string(best));
  const std::vector<float> logits = FloatsOf(
      Answer("/v1/classify", {{"input", "cab"}, {"use_activation", false}})["data"][0]["probs"]);
  EXPECT_NEAR(probs[0] / probs[1], std::exp(logits[0] - logits[1]), 1e-5);
  EXPECT_EQ(FloatsOf(Answer("/pooling", {{"input", "cab"}})["data"][0]["data"]), probs);
  // A pair has token types of its own.
  const Json pair = {{"text", "cab"}, {"text_pair", "b"}};
  const Json joined = Answer("/classify", {{"input", Json::array({pair, "cab"})}});
  EXPECT_EQ(FloatsOf(joined["data"][1]["probs"]), probs);
  const Json ids = {{"input", {2, 12, 10, 11, 3, 11, 3}},
                    {"token_type_ids", {0, 0, 0, 0, 0, 1, 1}}};
  EXPECT_EQ(FloatsOf(joined["data"][0]["probs"]),
            FloatsOf(Answer("/classify", ids)["data"][0]["probs"]));
  for (const Json& wrong :
       {Json({{"text_pair", "a"}}), Json({{"text", 5}}), Json({{"text", "a"}, {"other", "b"}})}) {
    EXPECT_EQ(Refusal("/classify", {{"input", wrong}}), Refused("invalid_value", "input"));
  }
  EXPECT_EQ(Refusal("/classify", {{"input", "a"}, {"aggregation", "simple"}}),
            Refused("invalid_value", "aggregation"));
  // Three labels are no score.
  EXPECT_EQ(Refusal("/score", {{"text_1", "a"}, {"text_2", "b"}}),
            Refused("unsupported_task", "model"));
  EXPECT_EQ(Refusal("/v1/embeddings", {{"input", "a"}}), Refused("unsupported_task", "model"));
}

TEST_F(Encode, Entities) {
  Start("tiny-encoder-split");
  const std::string text = "ab\u00e9 cd, efghijkl mnopqrstu";
  for (const char* aggregation : {"none", "simple", "viterbi"}) {
    const Json answer = Answer("/classify", {{"input", text}, {"aggregation", aggregation}});
    for (const Json& entity : answer["data"][0]["entities"]) {
      // The offsets are those of characters, one of which has two bytes.
      const size_t start = entity["start"], end = entity["end"];
      const auto byte = [](size_t character) { return character + (character > 2 ? 1 : 0); };
      EXPECT_EQ(entity["word"], text.substr(byte(start), byte(end) - byte(start)));
      EXPECT_GT(entity["score"], 0.0);
      EXPECT_LE(entity["score"], 1.0);
      EXPECT_EQ(entity["entity_group"],
                aggregation == std::string("none") ? entity["entity_group"] : Json("a"));
      // The special token at the beginning and the end are no part of any.
      EXPECT_GE(entity["tokens"][0], 1);
      EXPECT_LE(entity["tokens"][1], 22);
    }
    if (aggregation != std::string("viterbi")) continue;
    EXPECT_EQ(answer["data"], Answer("/classify", {{"input", text}})["data"]);
    EXPECT_FALSE(answer["data"][0]["entities"].empty());
  }
  EXPECT_EQ(Refusal("/classify", {{"input", "a"}, {"aggregation", "other"}}),
            Refused("invalid_value", "aggregation"));
  const Json ids = Answer("/classify", {{"input", {10, 11, 12, 13, 14, 15, 16}}});
  for (const Json& entity : ids["data"][0]["entities"]) EXPECT_TRUE(entity["start"].is_null());
}

TEST_F(Encode, SimpleGroupsWithoutBioes) {
  Start("privacy-filter");
  EXPECT_TRUE(Answer("/classify", {{"input", "abcdef"}})["data"][0]["entities"].is_array());
  EXPECT_EQ(Refusal("/classify", {{"input", "a"}, {"aggregation", "viterbi"}}),
            Refused("invalid_value", "aggregation"));
  const Json rows = Answer("/pooling", {{"input", "cab"}})["data"][0]["data"];
  ASSERT_EQ(rows.size(), 5u);
  const std::vector<float> row = FloatsOf(rows[0]);
  double sum = 0.0;
  for (const float x : row) sum += x;
  EXPECT_NEAR(sum, 1.0, 1e-5);
}

TEST_F(Encode, ScoresOfACrossEncoder) {
  Start("roberta-cross-encoder");
  const auto scores = [&](const Json& request) {
    std::vector<float> out;
    const Json answer = Answer("/score", request);
    for (const Json& item : answer["data"]) {
      EXPECT_EQ(item["index"], out.size());
      EXPECT_EQ(item["object"], "score");
      out.push_back(item["score"].get<float>());
    }
    return out;
  };
  const std::vector<float> three = scores({{"text_1", "cab"}, {"text_2", {"a", "bb", "ccc"}}});
  ASSERT_EQ(three.size(), 3u);
  EXPECT_EQ(scores({{"queries", "cab"}, {"documents", "bb"}}), std::vector<float>{three[1]});
  EXPECT_EQ(scores({{"text_1", {"cab", "cab"}}, {"text_2", {"ccc", "a"}}}),
            (std::vector<float>{three[2], three[0]}));
  const float logit =
      scores({{"text_1", "cab"}, {"text_2", "a"}, {"use_activation", false}}).front();
  EXPECT_NEAR(three[0], 1.0 / (1.0 + std::exp(-logit)), 1e-6);
  const Json pair = {{"input", {{"text", "cab"}, {"text_pair", "a"}}}};
  EXPECT_EQ(FloatsOf(Answer("/classify", pair)["data"][0]["probs"]), std::vector<float>{three[0]});
  EXPECT_EQ(Refusal("/score", {{"text_1", {"a", "b"}}, {"text_2", {"a", "b", "c"}}}),
            Refused("invalid_value", "text_1"));
  EXPECT_EQ(Refusal("/score", {{"text_1", "a"}}), Refused("missing_field", "text_2"));
  EXPECT_EQ(Refusal("/score", {{"text_1", "a"}, {"text_2", Json::array()}}),
            Refused("invalid_value", "text_2"));
  EXPECT_EQ(Refusal("/score", {{"text_1", "a"}, {"queries", "a"}, {"text_2", "b"}}),
            Refused("invalid_value", "queries"));
  EXPECT_EQ(Refusal("/score", {{"text_1", "a"}, {"text_2", std::string(200, 'b')}}),
            Refused("context_length_exceeded", "text_2"));
}

TEST_F(Encode, Rankings) {
  Start("roberta-cross-encoder");
  const Json documents = {"a", {{"text", "bb"}}, "ccc", "a"};
  const Json request = {{"query", "cab"}, {"documents", documents}};
  const Json ranking = Answer("/v1/rerank", request);
  EXPECT_TRUE(ranking["id"].get<std::string>().starts_with("rerank-"));
  ASSERT_EQ(ranking["results"].size(), 4u);
  float before = 2.0f;
  size_t index_before = 0;
  for (const Json& result : ranking["results"]) {
    const float score = result["relevance_score"].get<float>();
    EXPECT_LE(score, before);
    const size_t index = result["index"];
    // Equal documents have equal scores; the first comes first.
    if (score == before) {
      EXPECT_GT(index, index_before);
    }
    before = score;
    index_before = index;
    const Json& document = documents[index];
    EXPECT_EQ(result["document"]["text"], document.is_string() ? document : document["text"]);
  }
  const Json scores = Answer("/score", {{"text_1", "cab"}, {"text_2", {"a", "bb", "ccc", "a"}}});
  for (const Json& result : ranking["results"]) {
    EXPECT_EQ(result["relevance_score"], scores["data"][result["index"].get<size_t>()]["score"]);
  }
  EXPECT_EQ(Answer("/rerank", request)["results"], ranking["results"]);
  Json short_request = request;
  short_request["top_n"] = 2;
  const Json v2 = Answer("/v2/rerank", short_request);
  ASSERT_EQ(v2["results"].size(), 2u);
  EXPECT_FALSE(v2["results"][0].contains("document"));
  EXPECT_EQ(v2["results"][0]["index"], ranking["results"][0]["index"]);
  // A document that is cut is another document.
  const Json cut = Answer(
      "/rerank", {{"query", "cab"}, {"documents", {"bbxyz", "bb"}}, {"max_tokens_per_doc", 2}});
  EXPECT_EQ(cut["results"][0]["relevance_score"], cut["results"][1]["relevance_score"]);
  EXPECT_EQ(Refusal("/rerank", {{"documents", {"a"}}}), Refused("missing_field", "query"));
  EXPECT_EQ(Refusal("/rerank", {{"query", "a"}}), Refused("missing_field", "documents"));
  EXPECT_EQ(Refusal("/rerank", {{"query", "a"}, {"documents", {1}}}),
            Refused("invalid_value", "documents"));
  EXPECT_EQ(Refusal("/rerank", {{"query", "a"}, {"documents", {"a"}}, {"top_n", 0}}),
            Refused("invalid_value", "top_n"));
}

TEST_F(Encode, SimilaritiesOfVectors) {
  Start("nomic-experts");
  const Json answer = Answer("/score", {{"text_1", "cab"}, {"text_2", {"cab", "xyz"}}});
  EXPECT_NEAR(answer["data"][0]["score"].get<float>(), 1.0, 1e-6);
  const std::vector<float> a = Embedding({{"input", "cab"}}), b = Embedding({{"input", "xyz"}});
  double dot = 0.0;
  for (size_t k = 0; k < a.size(); ++k) dot += double{a[k]} * b[k];
  EXPECT_NEAR(answer["data"][1]["score"].get<float>(), dot / (LengthOf(a) * LengthOf(b)), 1e-6);
  EXPECT_EQ(answer["usage"]["prompt_tokens"], 15);
  const Json ranking = Answer("/rerank", {{"query", "cab"}, {"documents", {"xyz", "cab"}}});
  EXPECT_EQ(ranking["results"][0]["index"], 1);
}

TEST_F(Encode, MasksAreFilled) {
  Start("bert-masked-lm");
  const Json answer = Answer("/v1/fill-mask", {{"input", "c<mask>b"}});
  ASSERT_EQ(answer["masks"].size(), 1u);
  const Json& mask = answer["masks"][0];
  EXPECT_EQ(mask["position"], 2);
  ASSERT_EQ(mask["tokens"].size(), 5u);
  double before = 0.0;
  for (const Json& token : mask["tokens"]) {
    const double logprob = token["logprob"];
    EXPECT_LE(logprob, before);
    before = logprob;
    EXPECT_NEAR(token["score"], std::exp(logprob), 1e-6);
    const TokenId id = token["token"];
    EXPECT_EQ(token["token_str"], LetterTokenizer().TokenBytes(id));
    const bool special = id < LetterTokenizer::kLetterA;
    EXPECT_EQ(token["sequence"], "c" + (special ? "" : LetterTokenizer().TokenBytes(id)) + "b");
  }
  // The same by ids; two masks; targets.
  EXPECT_EQ(Answer("/v1/fill-mask", {{"input", {2, 12, 4, 11, 3}}})["masks"], answer["masks"]);
  const Json two = Answer("/v1/fill-mask", {{"input", "<mask>b<mask>"}, {"top_k", 1}});
  ASSERT_EQ(two["masks"].size(), 2u);
  EXPECT_EQ(two["masks"][1]["position"], 3);
  EXPECT_TRUE(two["masks"][0]["tokens"][0]["sequence"].get<std::string>().ends_with("<mask><sep>"));
  const Json some = Answer("/v1/fill-mask", {{"input", "c<mask>b"}, {"targets", {"a", "z"}}});
  ASSERT_EQ(some["masks"][0]["tokens"].size(), 2u);
  for (const Json& token : some["masks"][0]["tokens"]) {
    EXPECT_TRUE(token["token"] == 10 || token["token"] == 35);
  }
  EXPECT_EQ(Answer("/v1/fill-mask", {{"input", "c<mask>b"}, {"targets", {10, 35}}})["masks"],
            some["masks"]);
}

TEST_F(Encode, LogprobsOfTokens) {
  Start("bert-masked-lm");
  const Json own = Answer("/v1/fill-mask", {{"input", "cab"}, {"logprobs", true}});
  ASSERT_EQ(own["logprobs"].size(), 5u);
  EXPECT_TRUE(own["masks"].empty());
  const Json others =
      Answer("/v1/fill-mask",
             {{"input", "c<mask>b"}, {"logprobs", true}, {"targets_of", {2, 12, 10, 11, 3}}});
  ASSERT_EQ(others["logprobs"].size(), 5u);
  const Json target = Answer("/v1/fill-mask", {{"input", "c<mask>b"}, {"targets", {10}}});
  EXPECT_EQ(others["logprobs"][2], target["masks"][0]["tokens"][0]["logprob"]);
  EXPECT_EQ(others["masks"][0]["tokens"].size(), 5u);
}

TEST_F(Encode, MasksThatAreNotThere) {
  Start("bert-masked-lm");
  const auto refused = [&](const Json& request) { return Refusal("/v1/fill-mask", request); };
  EXPECT_EQ(refused({{"input", "cab"}}), Refused("invalid_value", "input"));
  EXPECT_EQ(refused({{"input", {"c<mask>"}}}), Refused("invalid_value", "input"));
  EXPECT_EQ(refused({{"input", "<mask>"}, {"top_k", 0}}), Refused("invalid_value", "top_k"));
  EXPECT_EQ(refused({{"input", "<mask>"}, {"targets", {"ab"}}}),
            Refused("invalid_value", "targets"));
  EXPECT_EQ(refused({{"input", "<mask>"}, {"targets", {960}}}),
            Refused("invalid_value", "targets"));
  EXPECT_EQ(refused({{"input", "<mask>"}, {"targets_of", {5}}}),
            Refused("invalid_value", "targets_of"));
  EXPECT_EQ(refused({{"input", "<mask>"}, {"logprobs", true}, {"targets_of", {5}}}),
            Refused("invalid_value", "targets_of"));
  EXPECT_EQ(refused({{"input", "<mask>"}, {"truncate_prompt_tokens", 3}}),
            Refused("unsupported_parameter", "truncate_prompt_tokens"));
  EXPECT_EQ(Refusal("/classify", {{"input", "a"}}), Refused("unsupported_task", "model"));
}

TEST_F(Encode, MaskedModelWithPooling) {
  Start("bert-masked-lm", {.pooling = PoolingKind::kMean});
  EXPECT_FALSE(Embedding({{"input", "cab"}}).empty());
}

TEST_F(Encode, TasksOfModels) {
  Start("nomic-experts");
  RawClient client(port());
  client.Send(Get("/v1/models"));
  const Json card = Json::parse(client.ReadResponse().body)["data"][0];
  EXPECT_EQ(card["tasks"], Json({"embed", "token_embed", "score"}));
  const Refused unsupported("unsupported_task", "model");
  const Json messages = {{{"role", "user"}, {"content", "a"}}};
  EXPECT_EQ(Refusal("/v1/completions", {{"prompt", "a"}}), unsupported);
  EXPECT_EQ(Refusal("/v1/chat/completions", {{"messages", messages}}), unsupported);
  EXPECT_EQ(Send("/v1/responses", {{"input", "a"}}).status, 400);
  EXPECT_EQ(Send("/v1/messages", {{"messages", messages}, {"max_tokens", 4}}).status, 400);
  EXPECT_EQ(Send("/api/generate", {{"prompt", "a"}}).status, 400);
  // The same route makes vectors with a model that makes vectors.
  EXPECT_EQ(Send("/v2/models/small/generate", {{"text_input", "a"}}).status, 200);
  EXPECT_EQ(Refusal("/v1/fill-mask", {{"input", "a"}}), unsupported);
}

TEST_F(Encode, DecoderThatMakesVectors) {
  Start("tiny-decoder-pooling");
  RawClient client(port());
  client.Send(Get("/v1/models"));
  const Json card = Json::parse(client.ReadResponse().body)["data"][0];
  EXPECT_EQ(card["tasks"], Json({"generate", "embed", "token_embed", "score"}));
  EXPECT_EQ(Send("/v1/completions", {{"prompt", {10, 11}}, {"max_tokens", 2}}).status, 200);
  const std::vector<float> vector = Embedding({{"input", {10, 11, 12}}});
  EXPECT_NEAR(LengthOf(vector), 1.0, 1e-6);
  EXPECT_EQ(Embedding({{"input", {10, 11, 12}}}), vector);  // from the prefix cache
}

TEST_F(Encode, RoutesOfTexts) {
  Start("nomic-experts");
  for (const char* field : {"return_routing", "routing_records"}) {
    const Json answer = Answer("/v1/embeddings", {{"input", {"cab", "a"}}, {field, true}});
    const Json& record = answer["data"][0]["routing"];
    EXPECT_EQ(record["first_position"], 0);
    EXPECT_EQ(record["tokens"], 5);
    EXPECT_EQ(answer["data"][1]["routing"]["tokens"], 3);
    EXPECT_EQ(record["offsets"].size(), 5 * record["layout"]["rows_per_token"].get<size_t>() + 1);
  }
  EXPECT_FALSE(Answer("/v1/embeddings", {{"input", "a"}})["data"][0].contains("routing"));
  const Json pairs =
      Answer("/score", {{"text_1", "a"}, {"text_2", {"b", "c"}}, {"return_routing", true}});
  ASSERT_EQ(pairs["inputs"].size(), 3u);
  EXPECT_EQ(pairs["inputs"][2]["routing"]["tokens"], 3);
}

TEST_F(Encode, RoutingOverrides) {
  Start("nomic-experts");
  const Json one = {{"input", "cab"}, {"routing_control", {{"top_k", 1}}}};
  const Json answer = Answer("/v1/embeddings", one);
  EXPECT_EQ(answer["routing_control"], one["routing_control"]);
  EXPECT_NE(FloatsOf(answer["data"][0]["embedding"]), Embedding({{"input", "cab"}}));
  EXPECT_LT(answer["usage"]["experts_per_token"],
            Answer("/v1/embeddings", {{"input", "cab"}})["usage"]["experts_per_token"]);
}

TEST_F(Encode, CountsOfTasks) {
  Start("nomic-experts");
  const auto has = [&](const std::string& line) {
    return Metrics().find("\n" + line + "\n") != std::string::npos;
  };
  EXPECT_TRUE(has(R"(moeserve_requests_total{model="small",task="embed"} 0)"));
  Answer("/v1/embeddings", {{"input", {"cab", "a"}}});
  Answer("/score", {{"text_1", "a"}, {"text_2", "b"}});
  EXPECT_TRUE(has(R"(moeserve_requests_total{model="small",task="embed"} 1)"));
  EXPECT_TRUE(has(R"(moeserve_requests_total{model="small",task="score"} 1)"));
  EXPECT_TRUE(has(R"(moeserve_requests_total{model="small",task="generate"} 0)"));
  EXPECT_TRUE(has(R"(moeserve_encode_tokens_total{model="small"} 14)"));
  const std::string metrics = Metrics();
  EXPECT_NE(metrics.find(R"(phase="encode")"), std::string::npos);
  EXPECT_EQ(metrics.find(R"(moe_layer_tokens_total{model="small",layer="1",)"
                         R"(block="feed_forward",phase="prefill")"),
            std::string::npos);
}

TEST_F(Encode, MemoryIsLimited) {
  ServerSettings settings;
  settings.request_memory = size_t{4} << 20;
  Start("nomic-experts", {.server = settings});
  const std::vector<std::string> texts(2048, "a");
  const RawResponse response = Send("/v1/embeddings", {{"input", texts}});
  EXPECT_TRUE(response.status == 503 || response.status == 413) << response.status;
  EXPECT_FALSE(Embedding({{"input", "a"}}).empty());
}

}  // namespace
}  // namespace moeserve::server::testing
