// Compares the perplexity of held-out text in the engine with the reference's: in f32, in bf16 and
// with integer weights. The runs select their own routes.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

std::string ReadText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

nlohmann::json Reference() {
  return nlohmann::json::parse(ReadText(SourcePath("tests/golden/perplexity.json")));
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  const nlohmann::json reference = Reference();
  for (const auto& [name, value] : reference["perplexity"].items()) names.push_back(name);
  return names;
}

// Returns the perplexity over all windows. Each window is a sequence of its own that predicts all
// its tokens but the first.
double Perplexity(TestEngine& engine, const std::vector<TokenId>& tokens, int window) {
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(window)) {
    Request r;
    r.id = std::to_string(at);
    r.prompt.assign(tokens.begin() + static_cast<int64_t>(at),
                    tokens.begin() + static_cast<int64_t>(std::min(
                                         tokens.size(), at + static_cast<size_t>(window))));
    r.sampling.max_tokens = 0;
    r.sampling.prompt_logprobs = 0;
    sinks.push_back(engine.Submit(std::move(r)));
  }
  double sum = 0.0;
  int64_t count = 0;
  for (const auto& sink : sinks) {
    const absl::Status status = sink->Wait();
    EXPECT_TRUE(status.ok()) << status;
    if (!status.ok()) return std::numeric_limits<double>::quiet_NaN();
    for (const auto& logprob : sink->prompt_logprobs()) {
      if (!logprob.has_value()) continue;
      sum -= logprob->logprob;
      ++count;
    }
  }
  return std::exp(sum / static_cast<double>(count));
}

class PerplexityTest : public ::testing::TestWithParam<std::string> {
 protected:
  // Returns the perplexity of the test's model, and prints it next to `baseline`.
  double Measure(DType compute, Quantization quantization, double baseline) {
    const nlohmann::json reference = Reference();
    auto engine = TestEngine::Start(SourcePath("deploy/models/" + GetParam()), {}, compute,
                                    TestDevice(), quantization);
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (!engine.ok() || (*engine)->get().tokenizer() == nullptr) return std::nan("");
    auto tokens =
        (*engine)->get().tokenizer()->Encode(ReadText(SourcePath(reference["text"])), false);
    EXPECT_TRUE(tokens.ok()) << tokens.status();
    if (!tokens.ok()) return std::nan("");
    tokens->resize(reference["tokens"]);
    const double found = Perplexity(**engine, *tokens, reference["window"]);
    const std::string_view type =
        quantization == Quantization::kNone ? Name(compute) : Name(quantization);
    std::printf("%s %s: perplexity %.4f, against %.4f, %+.4f %%\n", GetParam().c_str(),
                std::string(type).c_str(), found, baseline, 100.0 * (found / baseline - 1.0));
    return found;
  }
};

TEST_P(PerplexityTest, EqualsTheReference) {
  const double expected = Reference()["perplexity"][GetParam()];
  for (DType compute : {DType::kF32, DType::kBF16}) {
    EXPECT_NEAR(Measure(compute, Quantization::kNone, expected) / expected, 1.0, 1e-3);
  }
}

TEST_P(PerplexityTest, IntegersCostLittle) {
  const double reference = Reference()["perplexity"][GetParam()];
  const double bf16 = Measure(DType::kBF16, Quantization::kNone, reference);
  EXPECT_LE(Measure(DType::kBF16, Quantization::kInt8Channel, bf16) / bf16, 1.005);
  EXPECT_LE(Measure(DType::kBF16, Quantization::kInt4K, bf16) / bf16, 1.01);
  if (TestDevice() != "cpu") return;  // the emulated device would take too long for all types
  EXPECT_LE(Measure(DType::kBF16, Quantization::kInt8, bf16) / bf16, 1.003);
  EXPECT_LE(Measure(DType::kBF16, Quantization::kInt4, bf16) / bf16, 1.01);
}

// An int8 KV cache must hardly change the perplexity.
TEST_P(PerplexityTest, OfACacheOfBytesIsClose) {
  const nlohmann::json reference = Reference();
  double found[2];
  for (const KvCacheType type : {KvCacheType::kBF16, KvCacheType::kInt8}) {
    auto engine = TestEngine::Start(SourcePath("deploy/models/" + GetParam()),
                                    {.kv_cache_type = type}, DType::kBF16);
    ASSERT_TRUE(engine.ok()) << engine.status();
    auto tokens =
        (*engine)->get().tokenizer()->Encode(ReadText(SourcePath(reference["text"])), false);
    ASSERT_TRUE(tokens.ok()) << tokens.status();
    tokens->resize(reference["tokens"]);
    found[type == KvCacheType::kInt8] = Perplexity(**engine, *tokens, reference["window"]);
  }
  std::printf("%s: perplexity %.4f with bf16, %.4f with int8, %+.4f %%\n", GetParam().c_str(),
              found[0], found[1], 100.0 * (found[1] / found[0] - 1.0));
  EXPECT_NE(found[0], found[1]);
  EXPECT_NEAR(found[1] / found[0], 1.0, 3e-3);
}

INSTANTIATE_TEST_SUITE_P(Models, PerplexityTest, ::testing::ValuesIn(Names()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moeserve::testing
