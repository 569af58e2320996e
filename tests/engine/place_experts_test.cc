// Which ranks get which experts, and how well balanced the ranks then are.
#include "engine/weights/place_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>

#include "model_loaders/checkpoint/loader.h"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

// A model of `layers` routed blocks; block b is {Stack::kOnly, 2 b + 1}.
ModelSpec Routed(int layers, std::vector<int> widths) {
  ModelSpec spec;
  spec.vocab_size = 4;
  spec.hidden_size = 8;
  LayerSpec layer;
  layer.attention.head_dim = 8;
  layer.feed_forward.routing.emplace();
  layer.feed_forward.routing->num_experts = static_cast<int>(widths.size());
  layer.feed_forward.routing->widths = std::move(widths);
  spec.AddLayers(layers, layer);
  return spec;
}

std::pair<Stack, int> Block(int b) { return {Stack::kOnly, 2 * b + 1}; }

std::vector<int64_t> HeldBy(const std::vector<HolderSet>& holders, int ranks) {
  std::vector<int64_t> held(static_cast<size_t>(ranks));
  for (const HolderSet set : holders) {
    for (int r = 0; r < ranks; ++r) held[static_cast<size_t>(r)] += set >> r & 1;
  }
  return held;
}

TEST(PlaceExpertsTest, ExpertsGoByLoadToTheLeastLoadedRankWithRoom) {
  const ModelSpec spec = Routed(1, std::vector<int>(6, 16));
  // 10, 6, 2 on the first, 9, 8 on the second; the first is full then, although it has less load.
  const ExpertPlacement placement =
      PlaceExperts(spec, {.ranks = 2, .loads = {{Block(0), {0.5, 9, 10, 8, 0.9, 6}}}});
  EXPECT_EQ(placement.holders(Stack::kOnly, 1), (std::vector<HolderSet>{2, 2, 1, 2, 1, 1}));
  // Wide experts count as much more load as they have more parameters, and fill a rank earlier.
  const ModelSpec wide = Routed(1, {10, 10, 10, 30});
  EXPECT_EQ(PlaceExperts(wide, {.ranks = 2}).holders(Stack::kOnly, 1),
            (std::vector<HolderSet>{2, 2, 2, 1}));
}

TEST(PlaceExpertsTest, ExpertsOfOneSizeTakeEqualMemory) {
  std::mt19937 random(7);
  for (const int experts : {5, 8, 10, 61}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      for (const int percent : {0, 12, 50, 100}) {
        const ModelSpec spec = Routed(6, std::vector<int>(static_cast<size_t>(experts), 4));
        PlaceOptions options{.ranks = ranks, .copies_percent = ranks == 1 ? 0 : percent};
        for (int b = 0; b < 6; ++b) {
          std::vector<double>& loads = options.loads[Block(b)];
          for (int e = 0; e < experts; ++e) loads.push_back(random() % 1000);
        }
        const ExpertPlacement placement = PlaceExperts(spec, options);
        for (int b = 0; b < 6; ++b) {
          const std::vector<HolderSet>& holders = placement.holders(Stack::kOnly, 2 * b + 1);
          const auto held = HeldBy(holders, ranks);
          const auto [least, most] = std::ranges::minmax(held);
          // A rank gets no copy of what it has, although there is room.
          EXPECT_LE(most - least, percent == 0 ? 1 : 3)
              << experts << " experts, " << ranks << " ranks, " << percent << " % copies";
          EXPECT_EQ(std::accumulate(held.begin(), held.end(), int64_t{0}),
                    experts + experts * options.copies_percent / 100);
          for (const HolderSet h : holders) EXPECT_NE(h, 0u);
        }
        const auto sizes = SizeOfRanks(placement, ExpertParameters(spec));
        const auto [least, most] = std::ranges::minmax(sizes);
        EXPECT_LE(most - least, (percent == 0 ? 1 : 3) * 3 * 8 * 4)
            << experts << " experts, " << ranks << " ranks, " << percent << " % copies";
      }
    }
  }
}

TEST(PlaceExpertsTest, TheExpertsWithTheMostLoadPerCopyAreCopied) {
  const ModelSpec spec = Routed(1, std::vector<int>(4, 16));
  // 90 is copied twice (90, 45, 30), then the 40.
  const ExpertPlacement placement = PlaceExperts(
      spec, {.ranks = 4, .copies_percent = 75, .loads = {{Block(0), {10, 90, 40, 20}}}});
  std::vector<int> copies;
  for (const HolderSet h : placement.holders(Stack::kOnly, 1)) copies.push_back(std::popcount(h));
  EXPECT_EQ(copies, (std::vector<int>{1, 3, 2, 1}));
  // More copies than there can be.
  const ExpertPlacement all = PlaceExperts(spec, {.ranks = 2, .copies_percent = 300});
  EXPECT_EQ(all.holders(Stack::kOnly, 1), (std::vector<HolderSet>{3, 3, 3, 3}));
}

// Sizes follow from the tensors of a model, also of experts for attention and of stacks of layers.
TEST(PlaceExpertsTest, SizesAreThoseOfTheTensors) {
  const ModelSpec spec = Routed(1, {16, 4});
  EXPECT_EQ(ExpertParameters(spec).at(Block(0)), (std::vector<int64_t>{3 * 8 * 16, 3 * 8 * 4}));
  EXPECT_EQ(ExpertBytes(spec, Quantization::kNone, DType::kBF16).at(Block(0)),
            (std::vector<int64_t>{6 * 8 * 16, 6 * 8 * 4}));
  for (const GoldenModel& model : GoldenModels()) {
    SCOPED_TRACE(model.name);
    const auto checkpoint = LoadCheckpoint(model.model, {.require_tokenizer = false});
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const ModelSpec& s = checkpoint->spec;
    const ExpertSizes sizes = ExpertParameters(s);
    for (size_t b = 0; b < s.blocks.size(); ++b) {
      if (s.blocks[b].routing() == nullptr) continue;
      const std::vector<int64_t> proportional = PlaceParameters(s.blocks[b]);
      const auto& found = sizes.at({s.stack, static_cast<int>(b)});
      ASSERT_EQ(found.size(), proportional.size());
      for (size_t e = 0; e < found.size(); ++e) EXPECT_EQ(found[e] > 0, proportional[e] > 0);
    }
    EXPECT_EQ(PlacementDigest(s).size(), 64u);
  }
  EXPECT_NE(PlacementDigest(Routed(1, {16, 4})), PlacementDigest(Routed(1, {16, 5})));
  EXPECT_NE(PlacementDigest(Routed(1, {16, 4})), PlacementDigest(Routed(2, {16, 4})));
}

// Steps whose rows choose 8 of 64 experts, drawn without replacement with shares 1 / rank^1.2.
class ZipfSteps {
 public:
  static constexpr int kExperts = 64, kChosen = 8;
  explicit ZipfSteps(uint32_t seed) : random_(seed) {}

  std::vector<int32_t> Next(int rows) {
    std::vector<int32_t> counts(kExperts);
    for (int r = 0; r < rows; ++r) {
      std::vector<std::pair<double, int>> keys;
      for (int e = 0; e < kExperts; ++e) {
        const double u = (random_() + 0.5) / 4294967296.0;
        keys.emplace_back(-std::log(u) * std::pow(e + 1, 1.2), e);
      }
      std::ranges::nth_element(keys, keys.begin() + kChosen);
      for (int i = 0; i < kChosen; ++i) ++counts[static_cast<size_t>(keys[i].second)];
    }
    return counts;
  }

 private:
  std::mt19937 random_;
};

TEST(PlaceExpertsTest, RanksAreBalancedAtZipfLoads) {
  constexpr int kRanks = 4;
  const ModelSpec spec = Routed(1, std::vector<int>(ZipfSteps::kExperts, 16));
  PlaceOptions options{.ranks = kRanks};
  std::vector<double>& loads = options.loads[Block(0)];
  loads.resize(ZipfSteps::kExperts);
  ZipfSteps profile(1);
  for (int i = 0; i < 10; ++i) {
    const std::vector<int32_t> rows = profile.Next(512);
    for (size_t e = 0; e < rows.size(); ++e) loads[e] += rows[e];
  }
  std::vector<HolderSet> modulo;
  for (int e = 0; e < ZipfSteps::kExperts; ++e) modulo.push_back(HolderSet{1} << e % kRanks);
  const std::vector<int64_t> parameters(ZipfSteps::kExperts, 16);
  const auto mean = [&](const std::vector<HolderSet>& holders, int rows) {
    ZipfSteps steps(2);
    const int count = std::max(10, 2000 / rows);
    double sum = 0.0;
    for (int i = 0; i < count; ++i) {
      const std::vector<int32_t> step = steps.Next(rows);
      sum += Imbalance(step, parameters, OwnersOf(step, parameters, holders, kRanks), kRanks);
    }
    return sum / count;
  };
  EXPECT_GT(mean(modulo, 512), 1.15);
  for (const int percent : {0, 12, 50, 100}) {
    options.copies_percent = percent;
    const ExpertPlacement placement = PlaceExperts(spec, options);
    const std::vector<HolderSet>& holders = placement.holders(Stack::kOnly, 1);
    const double at16 = mean(holders, 16), at64 = mean(holders, 64), at512 = mean(holders, 512);
    std::printf("copies %3d %%: 16 rows %.3f, 64 rows %.3f, 512 rows %.3f\n", percent, at16, at64,
                at512);
    EXPECT_LE(at16, 1.20) << percent;
    EXPECT_LE(at64, 1.10) << percent;
    EXPECT_LE(at512, 1.10) << percent;
  }
}

}  // namespace
}  // namespace moeserve::testing
