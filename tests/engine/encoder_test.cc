// Encoders, and decoders that make vectors of texts: agreement with the PyTorch reference, and
// results that do not depend on what else is computed.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <numeric>

#include "engine/routes/route_layout.h"
#include "engine/validate_request.h"
#include "tests/support/encoder_golden.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

// What a step computes of one text.
struct EncodedOutputs {
  std::vector<float> rows;  // [T, RowOutputs()]
  std::vector<float> text;  // [TextOutputs()], normalized if the model normalizes
  friend bool operator==(const EncodedOutputs&, const EncodedOutputs&) = default;
};

void Normalize(std::vector<float>& vector) {
  double sum = 0.0;
  for (const float x : vector) sum += double{x} * x;
  for (float& x : vector) x = static_cast<float>(x / std::max(std::sqrt(sum), 1e-12));
}

// Runs texts in one step, each in a slot of its own.
std::vector<EncodedOutputs> Encode(ModelRunner& runner, const EncoderGolden& golden,
                                   const std::vector<int>& texts, StepSetup setup = {}) {
  std::vector<ModelRunner::Part> parts;
  for (const int i : texts) {
    parts.push_back({static_cast<int>(parts.size()), 0, golden.tokens[i], golden.types[i]});
  }
  const ModelSpec& spec = runner.spec();
  std::vector<float> vectors;
  if (spec.pooling.has_value()) setup.texts = &vectors;
  const std::vector<float> rows = runner.RunTogether(parts, setup);
  std::vector<EncodedOutputs> outputs;
  auto row = rows.begin();
  auto vector = vectors.begin();
  for (const ModelRunner::Part& part : parts) {
    const auto count = std::ssize(part.tokens) * RowOutputs(spec);
    EncodedOutputs& out = outputs.emplace_back();
    out.rows.assign(row, row + count);
    row += count;
    if (!spec.pooling.has_value()) continue;
    out.text.assign(vector, vector + TextOutputs(spec));
    vector += TextOutputs(spec);
    if (spec.pooling->normalize) Normalize(out.text);
  }
  return outputs;
}

double WorstElement(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = a.size() == b.size() ? 0.0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double error = std::abs(double{a[i]} - b[i]);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

// Returns the largest difference of logits, log-probabilities or elements of vectors.
double EncodedDifference(const ModelSpec& spec, const EncoderGolden& golden, int i,
                         const EncodedText& expected, const EncodedOutputs& found, bool top) {
  double worst = expected.text.empty() ? 0.0 : WorstElement(found.text, expected.text);
  if (!expected.logits.empty()) {
    worst = std::max(worst, WorstElement(found.rows, expected.logits));
  }
  for (size_t t = 0; t < expected.target_logprobs.size(); ++t) {
    const float* row = found.rows.data() + t * static_cast<size_t>(spec.vocab_size);
    const auto note = [&](int token, float logprob) {
      const double error = std::abs(LogSoftmaxAt(row, spec.vocab_size, token) - logprob);
      if (!(error <= worst)) worst = error;
    };
    note(golden.tokens[i][t], expected.target_logprobs[t]);
    for (int k = 0; top && k < golden.top; ++k) {
      const size_t at = t * static_cast<size_t>(golden.top) + static_cast<size_t>(k);
      note(golden.top_ids[i][at], expected.top_logprobs[at]);
    }
  }
  return worst;
}

// The routes of one text in the reference, for all routed blocks.
std::vector<GivenRoutes> EncodedRoutesOf(const EncoderGolden& golden, const RouteLayout& layout,
                                         int text) {
  int begin = 0;
  for (int i = 0; i < text; ++i) begin += static_cast<int>(golden.tokens[i].size());
  const int end = begin + static_cast<int>(golden.tokens[text].size());
  std::vector<GivenRoutes> routes;
  for (const RoutedBlock& b : layout.blocks) {
    const GivenRoutes& all = golden.routes.at({b.layer, b.block});
    const int first = begin * b.sub_tokens, last = end * b.sub_tokens;
    GivenRoutes& part = routes.emplace_back();
    for (int r = first; r <= last; ++r) part.offsets.push_back(all.offsets[r] - all.offsets[first]);
    part.experts.assign(all.experts.begin() + all.offsets[first],
                        all.experts.begin() + all.offsets[last]);
    part.weights.assign(all.weights.begin() + all.offsets[first],
                        all.weights.begin() + all.offsets[last]);
  }
  return routes;
}

class EncoderTest : public ::testing::TestWithParam<GoldenModel> {
 protected:
  void SetUp() override {
    Result<EncoderGolden> golden = ReadEncoderGolden(GetParam().golden);
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }
  EncoderGolden golden_;
};

TEST_P(EncoderTest, ReferenceInF32) {
  for (const char* isa : {"auto", "avx2", "plain"}) {
    if (TestDevice() != "cpu" && isa != std::string("auto")) continue;
    auto runner = ModelRunner::Load(GetParam().model, {.isa = isa});
    if (absl::IsInvalidArgument(runner.status()) && isa != std::string("auto")) continue;
    ASSERT_TRUE(runner.ok()) << runner.status();
    double worst = 0.0;
    for (int i = 0; i < golden_.texts(); ++i) {
      const EncodedOutputs found = Encode(**runner, golden_, {i}).front();
      worst = std::max(
          worst, EncodedDifference((*runner)->spec(), golden_, i, golden_.f32[i], found, true));
    }
    std::printf("%s %s f32: worst difference %.2e\n", GetParam().name.c_str(), isa, worst);
    EXPECT_LE(worst, 1e-4);
  }
}

TEST_P(EncoderTest, ReferenceInBf16WithReplayedRoutes) {
  const EncodedText& first = golden_.bf16.front();
  if (first.text.empty() && first.logits.empty() && first.target_logprobs.empty()) {
    GTEST_SKIP() << "a golden file of a family, without results in bf16";
  }
  auto runner = ModelRunner::Load(GetParam().model, {.compute = DType::kBF16});
  ASSERT_TRUE(runner.ok()) << runner.status();
  const ModelSpec& spec = (*runner)->spec();
  const RouteLayout layout(spec);
  double worst = 0.0;
  for (int i = 0; i < golden_.texts(); ++i) {
    const std::vector<GivenRoutes> routes = EncodedRoutesOf(golden_, layout, i);
    StepSetup setup;
    setup.given.resize(spec.blocks.size());
    for (size_t b = 0; b < routes.size(); ++b) {
      setup.given[static_cast<size_t>(layout.blocks[b].slot)] = &routes[b];
    }
    const EncodedOutputs found = Encode(**runner, golden_, {i}, setup).front();
    worst = std::max(worst, EncodedDifference(spec, golden_, i, golden_.bf16[i], found, false));
  }
  std::printf("%s bf16: worst difference %.2e\n", GetParam().name.c_str(), worst);
  EXPECT_LE(worst, 6e-2);
}

// Alone, together, and together in another order.
TEST_P(EncoderTest, SameBitsInCompany) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const int threads : {1, 2}) {
      auto runner = ModelRunner::Load(GetParam().model, {.compute = compute, .threads = threads});
      ASSERT_TRUE(runner.ok()) << runner.status();
      std::vector<EncodedOutputs> alone;
      for (int i = 0; i < golden_.texts(); ++i) {
        alone.push_back(Encode(**runner, golden_, {i}).front());
      }
      std::vector<int> order(golden_.texts());
      std::iota(order.begin(), order.end(), 0);
      EXPECT_TRUE(alone == Encode(**runner, golden_, order));
      const std::vector<int> other = {7, 0, 3, 3, 6, 1, 2};
      const std::vector<EncodedOutputs> mixed = Encode(**runner, golden_, other);
      for (size_t i = 0; i < other.size(); ++i) EXPECT_TRUE(mixed[i] == alone[other[i]]) << i;
    }
  }
}

// Returns what a model's request for text i asks for.
Request TextRequest(const ModelSpec& spec, const EncoderGolden& golden, int i) {
  Request request;
  request.id = "text-" + std::to_string(i);
  request.prompt = golden.tokens[i];
  if (spec.token_types > 0) request.token_types = golden.types[i];
  EncodeParams& encode = request.encode.emplace();
  for (const EncodeOutput output :
       {EncodeOutput::kText, EncodeOutput::kLogits, EncodeOutput::kTokens}) {
    if (Computes(spec, &output)) encode.output = output;
  }
  if (encode.output == EncodeOutput::kTokens) {
    encode.top = 3;
    encode.targets = {7, 1};
    for (int32_t row = 0; row < std::ssize(request.prompt); row += 2) {
      encode.rows.push_back(row);
      encode.own.push_back(request.prompt[static_cast<size_t>(row)]);
    }
  }
  return request;
}

void ExpectEncoded(const ModelSpec& spec, const Request& request, const EncodedOutputs& expected,
                   EncodeResult found) {
  const EncodeParams& encode = *request.encode;
  if (encode.output == EncodeOutput::kText) {
    if (spec.pooling->normalize) Normalize(found.values);
    EXPECT_TRUE(found.values == expected.text);
  } else if (encode.output == EncodeOutput::kLogits) {
    EXPECT_TRUE(found.values == expected.rows);
  } else {
    ASSERT_EQ(found.rows.size(), encode.rows.size());
    ASSERT_EQ(found.targets.size(), encode.rows.size() * encode.targets.size());
    for (size_t r = 0; r < encode.rows.size(); ++r) {
      const float* const row =
          expected.rows.data() + encode.rows[r] * static_cast<int64_t>(spec.vocab_size);
      EXPECT_EQ(found.rows[r].token, encode.own[r]);
      EXPECT_NEAR(found.rows[r].logprob, LogSoftmaxAt(row, spec.vocab_size, encode.own[r]), 1e-5);
      EXPECT_NEAR(found.targets[2 * r], LogSoftmaxAt(row, spec.vocab_size, 7), 1e-5);
      const auto best = static_cast<TokenId>(std::max_element(row, row + spec.vocab_size) - row);
      ASSERT_EQ(found.rows[r].top.size(), 3u);
      EXPECT_EQ(found.rows[r].top.front().first, best);
    }
  }
}

// Requests have the bits of single steps, whatever else the engine computes.
TEST_P(EncoderTest, RequestsOfAnEngine) {
  auto runner = ModelRunner::Load(GetParam().model);
  ASSERT_TRUE(runner.ok()) << runner.status();
  const ModelSpec& spec = (*runner)->spec();
  for (const int step_tokens : {8, 70, 512}) {
    EngineOptions options{.max_num_seqs = 6, .max_step_tokens = step_tokens};
    options.routing_records = true;
    auto engine = TestEngine::Start(GetParam().model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    std::vector<Request> requests;
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (int i = 0; i < golden_.texts(); ++i) {
      requests.push_back(TextRequest(spec, golden_, i));
      requests.back().routing_record = true;
      sinks.push_back((*engine)->Submit(requests.back()));
    }
    int64_t tokens = 0;
    for (int i = 0; i < golden_.texts(); ++i) {
      ASSERT_TRUE(sinks[i]->Wait().ok()) << sinks[i]->Wait();
      const OutputDelta& last = sinks[i]->last();
      ASSERT_TRUE(last.encoded.has_value());
      ExpectEncoded(spec, requests[i], Encode(**runner, golden_, {i}).front(), *last.encoded);
      EXPECT_EQ(last.usage.prompt_tokens, std::ssize(golden_.tokens[i]));
      EXPECT_EQ(last.usage.routed_tokens, std::ssize(golden_.tokens[i]));
      EXPECT_EQ(last.usage.completion_tokens, 0);
      tokens += last.usage.routed_tokens;
    }
    (*engine)->ExpectIdle();
    const ExpertStats stats = (*engine)->get().ExpertSnapshot();
    EXPECT_EQ(stats.tokens, static_cast<uint64_t>(tokens));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EncoderTest, ::testing::ValuesIn(EncoderGoldenModels()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moeserve::testing
