// Reports of how far the loading of a model is.

#include "server/commands/load_progress.h"

#include <gtest/gtest.h>

#include <memory>

#include "engine/spec/weights.h"

namespace moeserve::server {
namespace {

TEST(ProgressTextTest, TellsBytesAndSecondsLeft) {
  constexpr int64_t kTotal = int64_t{4} << 30;
  EXPECT_EQ(ProgressText(0.25, kTotal, 3.0), "loading: 1.0 GiB of 4.0 GiB, 9 s left");
  EXPECT_EQ(ProgressText(1.0, kTotal, 3.0), "loading: 4.0 GiB of 4.0 GiB, 0 s left");
  // Before the first tensor, nothing can be said about the time.
  EXPECT_EQ(ProgressText(0.0, kTotal, 0.0), "loading: 0 B of 4.0 GiB");
  // A tensor that is fetched twice must not give more than the whole.
  EXPECT_EQ(ProgressText(1.5, kTotal, 3.0), "loading: 4.0 GiB of 4.0 GiB, 0 s left");
}

// A source that counts calls.
class Source final : public WeightSource {
 public:
  Result<HostTensor> Get(std::string_view, const std::vector<int64_t>& shape) override {
    ++gets;
    return HostTensor{.data = nullptr, .dtype = DType::kF16, .shape = shape, .owner = nullptr};
  }
  Quantization StoredQuantization() const override { return Quantization::kInt4; }
  DType DominantDType() const override { return DType::kF16; }
  int gets = 0;
};

TEST(ReportedWeightsTest, PassesTensorsOn) {
  Source source;
  ModelSpec spec;
  spec.vocab_size = 8;
  spec.hidden_size = 4;
  ReportedWeights weights(source, spec, 1000, ProgressOutput::kTerminal);
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    const auto got = weights.Get(tensor.name, tensor.shape);
    ASSERT_TRUE(got.ok());
    EXPECT_EQ(got->shape, tensor.shape);
    const auto integers = weights.GetQuantized(tensor.name, tensor.shape, Quantization::kInt4);
    ASSERT_TRUE(integers.ok());
    EXPECT_FALSE(integers->has_value());
  }
  EXPECT_GT(source.gets, 0);
  EXPECT_EQ(weights.StoredQuantization(), Quantization::kInt4);
  EXPECT_EQ(weights.DominantDType(), DType::kF16);
}

}  // namespace
}  // namespace moeserve::server
