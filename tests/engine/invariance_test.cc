// A row's logits depend on its own sequence alone: they must be bit-identical for every chunking,
// alone and in every batch.

#include <gtest/gtest.h>

#include <cstring>

#include "kernels/cpu/cpu_backend.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

struct Setup {
  GoldenModel model;
  DType compute;
  Quantization quantization = Quantization::kNone;

  std::string type() const {
    return std::string(quantization == Quantization::kNone ? Name(compute) : Name(quantization));
  }
};

std::vector<Setup> Setups() {
  std::vector<Setup> setups;
  for (const GoldenModel& m : GoldenModels()) {
    setups.push_back({m, DType::kF32});
    if (TestDevice() != "cpu") {  // the types with one scale per row
      setups.push_back({m, DType::kBF16});
      setups.push_back({m, DType::kBF16, Quantization::kInt8Channel});
      setups.push_back({m, DType::kBF16, Quantization::kInt4K});
      continue;
    }
    setups.push_back({m, DType::kBF16, Quantization::kInt8});
    // The random models vary the settings of layers, which do not depend on the type of the
    // weights.
    if (m.name.starts_with("tiny-")) continue;
    setups.push_back({m, DType::kBF16});
    setups.push_back({m, DType::kBF16, Quantization::kInt8Channel});
    setups.push_back({m, DType::kBF16, Quantization::kInt4});
    setups.push_back({m, DType::kBF16, Quantization::kInt4K});
  }
  return setups;
}

::testing::AssertionResult SameBits(const float* a, const float* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(float)) != 0) {
      return ::testing::AssertionFailure() << "element " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

class InvarianceTest : public ::testing::TestWithParam<Setup> {
 protected:
  void SetUp() override {
    auto golden = ReadGolden(GetParam().model.golden);
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }
  std::unique_ptr<ModelRunner> Load(RunnerOptions options = {}) {
    options.compute = GetParam().compute;
    options.quantization = GetParam().quantization;
    auto runner = ModelRunner::Load(GetParam().model.model, options);
    EXPECT_TRUE(runner.ok()) << runner.status();
    return *std::move(runner);
  }
  Golden golden_;
};

TEST_P(InvarianceTest, CachedDecodingEqualsFullRecomputation) {
  auto runner = Load();
  const int n = golden_.length * runner->vocab();
  for (int p = 0; p < 2; ++p) {
    const std::vector<float> whole = runner->Run(golden_.Prompt(p), golden_.length);
    for (int chunk : {1, 7, 16, 63}) {
      const std::vector<float> parts = runner->Run(golden_.Prompt(p), chunk);
      EXPECT_TRUE(SameBits(whole.data(), parts.data(), n)) << "chunk " << chunk;
    }
  }
}

TEST_P(InvarianceTest, ThreadsDoNotMatter) {
  auto one = Load({.threads = 1});
  auto three = Load({.threads = 3});
  const std::vector<float> a = one->Run(golden_.Prompt(0), golden_.length);
  const std::vector<float> b = three->Run(golden_.Prompt(0), golden_.length);
  EXPECT_TRUE(SameBits(a.data(), b.data(), static_cast<int64_t>(a.size())));
}

// One step of 32 rows over eight sequences at different positions: some have several rows in the
// middle of their prompt, some decode one row.
TEST_P(InvarianceTest, ARowIsTheSameAloneAndInABatch) {
  auto runner = Load();
  const int vocab = runner->vocab();
  const std::vector<int> begins = {0, 5, 16, 31, 40, 47, 1, 50};
  const std::vector<int> counts = {9, 1, 7, 1, 5, 1, 7, 1};
  std::vector<std::vector<float>> alone;
  for (size_t s = 0; s < begins.size(); ++s) {
    const std::vector<int32_t> prompt = golden_.Prompt(static_cast<int>(s) % golden_.prompts);
    const std::vector<float> all = runner->Run(prompt, 1, 0, {}, static_cast<int>(s));
    alone.emplace_back(all.begin() + begins[s] * vocab,
                       all.begin() + (begins[s] + counts[s]) * vocab);
  }
  for (const bool reversed : {false, true}) {
    std::vector<ModelRunner::Part> parts;
    for (size_t i = 0; i < begins.size(); ++i) {
      const size_t s = reversed ? begins.size() - 1 - i : i;
      const std::vector<int32_t> prompt = golden_.Prompt(static_cast<int>(s) % golden_.prompts);
      parts.push_back({static_cast<int>(s),
                       begins[s],
                       {prompt.begin() + begins[s], prompt.begin() + begins[s] + counts[s]}});
      // Unlike keys and values, a state is that of the last position that was computed.
      if (!StateShapes(runner->spec()).empty() && begins[s] > 0) {
        runner->Run({prompt.begin(), prompt.begin() + begins[s]}, 8, 0, {}, static_cast<int>(s));
      }
    }
    const auto* cpu = dynamic_cast<const cpu::CpuBackend*>(&runner->backend());
    const uint64_t visits = cpu == nullptr ? 0 : cpu->expert_visits();
    const std::vector<float> together = runner->RunTogether(parts);
    const float* row = together.data();
    for (const ModelRunner::Part& part : parts) {
      const std::vector<float>& expected = alone[part.slot];
      EXPECT_TRUE(SameBits(row, expected.data(), static_cast<int64_t>(expected.size())))
          << "sequence " << part.slot;
      row += expected.size();
    }
    if (cpu == nullptr) continue;  // only the CPU backend counts visits
    const uint64_t step_visits = cpu->expert_visits() - visits;
    // Rows of one step share grouped products: each of the two matrices of an expert's sub-layer is
    // read at most once, however many of the 32 rows selected it.
    uint64_t experts = 0;
    for (const BlockSpec& block : runner->spec().blocks) {
      if (block.routing() == nullptr) continue;
      const FeedForwardSpec* f = block.feed_forward();
      experts += block.routing()->num_bodies() * (f == nullptr ? 1 : f->expert.depth);
    }
    EXPECT_LE(step_visits, 2 * experts);
    EXPECT_EQ(step_visits > 0, experts > 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, InvarianceTest, ::testing::ValuesIn(Setups()),
                         [](const auto& info) {
                           std::string name = info.param.model.name + "_" + info.param.type();
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moeserve::testing
