// Choosing the forms of routing and the blocks of the sampler by measuring them.

#include "kernels/cuda/tuning/route_tuning.h"

#include <gtest/gtest.h>

#include "kernels/cuda/rows/sampler.h"
#include "kernels/cuda/tuning/sampler_tuning.h"
#include "tests/cuda/counting_device.h"
#include "tests/cuda/route_support.h"

namespace moeserve::cuda {
namespace {

using testing::CountingDevice;
using testing::kNoLimit;
using testing::NewCountingDevice;

// Keeps the number of words that the default writes to the output.
class WordsDevice : public CountingDevice {
 public:
  WordsDevice(cudaStream_t stream, void* output, size_t bytes, std::vector<int64_t>* words)
      : CountingDevice(stream, output, bytes), output_(output), bytes_(bytes), words_(words) {}

  Status RunDefault(const std::function<void(int)>& enqueue) override {
    MOESERVE_RETURN_IF_ERROR(CountingDevice::RunDefault(enqueue));
    int64_t written = 0;
    for (const uint32_t word : FromDevice(static_cast<const uint32_t*>(output_), bytes_ / 4)) {
      written += word != 0xffffffffu;
    }
    words_->push_back(written);
    return absl::OkStatus();
  }

 private:
  const void* const output_;
  const size_t bytes_;
  std::vector<int64_t>* const words_;
};

// Returns a router of the `k` largest softmax gates, with dot scores or, with `dim`, cosine scores.
RouteCase TopRouter(int experts, int width, int k, int dim, uint64_t seed) {
  RouteCase c = MakeScoreCase(experts, width, dim, seed);
  c.settings.gate = Gate::kSoftmax;
  c.settings.select = SelectKind::kTopK;
  c.settings.k = k;
  c.settings.choice_bias = false;
  c.settings.groups = c.settings.best_groups = 1;
  c.tensors.choice_bias = {};
  // Scores that are not finite are zeros or NaN, whose bits are not compared here.
  c.tensors.bias = {};
  return c;
}

// Returns a launch as the backend passes it; its pointers are not read.
RouteLaunch Recorded(const CudaRouter& router, int64_t rows, DType dtype = DType::kBF16) {
  const RouteSettings& s = router.settings();
  return {.router = &router,
          .input = {nullptr, dtype, rows, s.input_width, s.input_width},
          .k_max = std::min(s.k, s.num_experts)};
}

// All forms are run with the bits of the default, scores and plans, and the choices are used.
TEST(RouteTuningTest, MeasuresWhatWasRecorded) {
  constexpr int kExperts = 10, kSelected = 3, kRows = 300;
  const RouteCase c = TopRouter(kExperts, 64, kSelected, 0, 6);
  const auto router = std::move(CudaRouter::Create(c.settings, c.tensors)).value();
  const auto same = std::move(CudaRouter::Create(c.settings, c.tensors)).value();
  Choices choices;
  RouteTuning tuning(&choices);
  EXPECT_EQ(tuning.Variant(Recorded(*router, 5)), RouteVariant{});
  tuning.Record(true);
  EXPECT_EQ(tuning.Variant(Recorded(*router, kRows)), RouteVariant{});
  EXPECT_EQ(tuning.Variant(Recorded(*same, 7)), RouteVariant{});
  std::vector<int64_t> words;
  const auto device = [&](cudaStream_t stream, void* output, size_t bytes) {
    return std::make_unique<WordsDevice>(stream, output, bytes, &words);
  };
  const auto messages = tuning.Measure(kNoLimit, device, nullptr);
  ASSERT_TRUE(messages.ok()) << messages.status();
  EXPECT_EQ(*messages, std::vector<std::string>());
  EXPECT_EQ(tuning.measured(), 6);
  EXPECT_EQ(tuning.left_out(), 0);
  std::vector<int64_t> expected;
  for (const int rows : {1, 4, 16, 64, 256, kRows}) {
    expected.push_back(rows * kExperts + kExperts + 1 + 4 * rows * kSelected + rows + 1 +
                       (rows + 3) / 4);
  }
  EXPECT_EQ(words, expected);

  // The candidate that is prepared last seems to be the fastest.
  const int most =
      static_cast<int>(RouteVariantsThatFit(Recorded(*router, 4)).back().cluster_blocks);
  if (most > 0) {
    EXPECT_EQ(most, 16);
    const RouteVariant cluster{.plan = PlanForm::kSameLaunch, .cluster_blocks = 16};
    EXPECT_EQ(tuning.Variant(Recorded(*router, 1)), cluster);
    EXPECT_EQ(tuning.Variant(Recorded(*same, 20)), cluster);
  }
  EXPECT_EQ(tuning.Variant(Recorded(*router, 64)),
            (RouteVariant{.tile = RouteTile::k64x8, .plan = PlanForm::kSameLaunch}));
  EXPECT_EQ(tuning.Variant(Recorded(*router, kRows)),
            (RouteVariant{.tile = RouteTile::k64x8, .plan = PlanForm::kChunks}));
  EXPECT_EQ(tuning.Variant(Recorded(*router, 64, DType::kF32)), RouteVariant{});
  const RouteOverride override;
  RouteLaunch changed = Recorded(*router, 64);
  changed.overrides = &override;
  EXPECT_EQ(tuning.Variant(changed), RouteVariant{});
  // What is known is not measured again.
  tuning.Record(true);
  tuning.Variant(Recorded(*router, kRows));
  ASSERT_TRUE(tuning.Measure({}, NewCountingDevice, nullptr).ok());
  EXPECT_EQ(tuning.measured(), 0);
}

// Cosine scores, f32 rows, and rows that are changed before the scores.
TEST(RouteTuningTest, OtherRouters) {
  std::vector<std::unique_ptr<CudaRouter>> routers;
  for (const bool changes : {false, true}) {
    RouteCase c = TopRouter(12, 72, 2, 16, 8);
    if (changes) c.settings.row_norm = RowNorm::kRms;
    routers.push_back(std::move(CudaRouter::Create(c.settings, c.tensors)).value());
  }
  RouteCase table = TopRouter(12, 72, 2, 0, 8);
  AddRareSettings(table, true);
  routers.push_back(std::move(CudaRouter::Create(table.settings, table.tensors)).value());
  Choices choices;
  RouteTuning tuning(&choices);
  tuning.Record(true);
  for (const auto& router : routers) tuning.Variant(Recorded(*router, 20, DType::kF32));
  const auto messages = tuning.Measure(kNoLimit, NewCountingDevice, nullptr);
  ASSERT_TRUE(messages.ok()) << messages.status();
  EXPECT_EQ(*messages, std::vector<std::string>());
  EXPECT_EQ(tuning.measured(), 8);  // 1, 4, 16 and 20 rows; a table is not measured
  for (int i = 0; i < 2; ++i) {
    EXPECT_NE(tuning.Variant(Recorded(*routers[static_cast<size_t>(i)], 20, DType::kF32)),
              RouteVariant{});
  }
  EXPECT_EQ(tuning.Variant(Recorded(*routers[2], 20, DType::kF32)), RouteVariant{});
}

TEST(RouteTuningTest, EndsWhenItsTimeIsOver) {
  const RouteCase c = TopRouter(4, 64, 2, 0, 1);
  const auto router = std::move(CudaRouter::Create(c.settings, c.tensors)).value();
  Choices choices;
  RouteTuning tuning(&choices);
  tuning.Record(true);
  tuning.Variant(Recorded(*router, 20));
  const auto device = [](cudaStream_t, void*, size_t) -> std::unique_ptr<TuneDevice> {
    ADD_FAILURE() << "nothing is measured";
    return nullptr;
  };
  ASSERT_TRUE(
      tuning.Measure({.limit = std::chrono::seconds(-1), .rows_factor = 4}, device, nullptr).ok());
  EXPECT_EQ(tuning.left_out(), 4);
}

// All numbers of blocks are run with the bits of the default, and the choices are used.
TEST(SamplerTuningTest, MeasuresWhatWasRecorded) {
  constexpr int kTokens = 3000;
  if (SampleBlockCounts(kTokens).size() < 2) GTEST_SKIP() << "no clusters";
  const auto launch = [](int count, int vocabulary = 3000) {
    return SampleLaunch{.count = count, .stride = vocabulary, .vocabulary = vocabulary};
  };
  Choices choices;
  SamplerTuning tuning(&choices);
  EXPECT_EQ(tuning.Blocks(launch(1)), 0);
  tuning.Record(true);
  EXPECT_EQ(tuning.Blocks(launch(5)), 0);
  EXPECT_EQ(tuning.Blocks(launch(2)), 0);
  EXPECT_EQ(tuning.Blocks(launch(0)), 0);
  const auto messages = tuning.Measure(kNoLimit, NewCountingDevice, nullptr);
  ASSERT_TRUE(messages.ok()) << messages.status();
  EXPECT_EQ(*messages, std::vector<std::string>());
  EXPECT_EQ(tuning.measured(), 3);  // 1, 4 and 5 rows
  for (const int rows : {1, 3, 5, 100}) {
    EXPECT_EQ(tuning.Blocks(launch(rows)), SampleBlockCounts(kTokens).back()) << rows;
  }
  EXPECT_EQ(tuning.Blocks(launch(5, kTokens + 1)), 0);
}

// A default of several blocks is the first candidate; the one that it replaces there is measured,
// too.
TEST(SamplerTuningTest, LongRows) {
  constexpr int kTokens = 33000;
  if (ChooseSampleBlocks(1, kTokens) == 1) GTEST_SKIP() << "no clusters";
  std::vector<int> choices_of_times;
  for (const int fastest : {0, 1, 2, 3}) {
    // The candidates take 10 us each, but for one.
    class ListedDevice : public CountingDevice {
     public:
      ListedDevice(cudaStream_t stream, void* output, size_t bytes, int fastest)
          : CountingDevice(stream, output, bytes), fastest_(fastest) {}
      Result<std::function<Result<double>()>> Prepare(const std::function<void(int)>&) override {
        const double time = prepared_++ == fastest_ ? 5.0 : 10.0;
        return std::function<Result<double>()>([time]() -> Result<double> { return time; });
      }

     private:
      const int fastest_;
      int prepared_ = 0;
    };
    const SampleLaunch launch{.count = 1, .stride = kTokens, .vocabulary = kTokens};
    Choices choices;
    SamplerTuning tuning(&choices);
    tuning.Record(true);
    tuning.Blocks(launch);
    const auto device = [&](cudaStream_t stream, void* output, size_t bytes) {
      return std::make_unique<ListedDevice>(stream, output, bytes, fastest);
    };
    ASSERT_TRUE(tuning.Measure(kNoLimit, device, nullptr).ok());
    choices_of_times.push_back(tuning.Blocks(launch));
  }
  EXPECT_EQ(choices_of_times[0], ChooseSampleBlocks(1, kTokens));
  std::sort(choices_of_times.begin(), choices_of_times.end());
  EXPECT_EQ(choices_of_times, SampleBlockCounts(kTokens));
}

}  // namespace
}  // namespace moeserve::cuda
