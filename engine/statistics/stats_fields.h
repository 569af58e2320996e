// Lists the fields of expert statistics. The code that adds, subtracts, compares and stores
// statistics iterates over these lists. A field added to expert_stats.h must be added here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "base/check.h"
#include "engine/statistics/expert_stats.h"

namespace moeserve {

// An array of a block: its name in profile files and the kind of its length.
struct BlockArray {
  std::string_view name;
  bool by_expert = true;  // true: length E; false: a different length
  bool counter = true;    // true: a sum over steps; false: a property of the model
};

// Calls f(array, that array of each of `blocks`) for every array.
template <typename F, typename... Blocks>
void ForEachBlockArray(const F& f, Blocks&... blocks) {
  f(BlockArray{"selections"}, blocks.selections...);
  f(BlockArray{"decode_selections"}, blocks.decode_selections...);
  f(BlockArray{"weight_sums"}, blocks.weight_sums...);
  f(BlockArray{"touching_tokens"}, blocks.touching_tokens...);
  f(BlockArray{"visits"}, blocks.visits...);
  f(BlockArray{"distinct_histogram", false}, blocks.distinct_histogram...);
  f(BlockArray{"recomputed_selections"}, blocks.recomputed_selections...);
  f(BlockArray{"rejected_selections"}, blocks.rejected_selections...);
  f(BlockArray{"router.probability_sums"}, blocks.router.probability_sums...);
  f(BlockArray{"router.selections"}, blocks.router.selections...);
  f(BlockArray{"expert_parameters", true, false}, blocks.expert_parameters...);
  f(BlockArray{"expert_widths", true, false}, blocks.expert_widths...);
}

// Calls f(counter of each of `blocks`) for every scalar integer, in the order of profile files.
inline constexpr int kBlockIntegers = 6 + 2 * kNumPhases;
template <typename F, typename... Blocks>
void ForEachBlockInteger(const F& f, Blocks&... blocks) {
  for (int p = 0; p < kNumPhases; ++p) f(blocks.tokens[p]...);
  for (int p = 0; p < kNumPhases; ++p) f(blocks.rows[p]...);
  f(blocks.nonfinite_rows...);
  f(blocks.recomputed_tokens...);
  f(blocks.recomputed_rows...);
  f(blocks.rejected_tokens...);
  f(blocks.rejected_rows...);
  f(blocks.router.rows...);
}

// Calls f(sum of each of `blocks`) for every scalar real number, in the order of profile files.
inline constexpr int kBlockReals = 2;
template <typename F, typename... Blocks>
void ForEachBlockReal(const F& f, Blocks&... blocks) {
  f(blocks.router.entropy_sum...);
  f(blocks.router.squared_logsumexp_sum...);
}

// Calls f(counter of each of `stats`) for every integer of the whole model, in the order of profile
// files.
inline constexpr int kModelIntegers = 4 + kNumPhases * (16 + 12);
template <typename F, typename... Stats>
void ForEachModelInteger(const F& f, Stats&... stats) {
  f(stats.tokens...);
  f(stats.recomputed_tokens...);
  f(stats.rejected_tokens...);
  f(stats.steps...);
  const auto histogram = [&](auto&... histograms) {
    const size_t buckets = std::max({histograms.buckets.size()...});
    for (size_t i = 0; i < buckets; ++i) f(histograms.buckets[i]...);
    f(histograms.sum...);
  };
  for (int p = 0; p < kNumPhases; ++p) histogram(stats.expert_rows[p]...);
  for (int p = 0; p < kNumPhases; ++p) histogram(stats.active_experts[p]...);
}

// Calls f(counter of `a`, counter of `b`) for every counter; properties of the model are left out.
// `a` and `b` must be statistics of the same model.
template <typename A, typename B, typename F>
void ForEachCounterOfModel(A& a, B& b, const F& f) {
  const auto each = [&](auto& x, auto& y) {
    MOESERVE_CHECK(x.size() == y.size(), "statistics of the same model");
    for (size_t i = 0; i < x.size(); ++i) f(x[i], y[i]);
  };
  MOESERVE_CHECK(a.blocks.size() == b.blocks.size(), "statistics of the same model");
  ForEachModelInteger(f, a, b);
  each(a.diversity_histogram, b.diversity_histogram);
  for (size_t i = 0; i < a.blocks.size(); ++i) {
    ForEachBlockInteger(f, a.blocks[i], b.blocks[i]);
    ForEachBlockReal(f, a.blocks[i], b.blocks[i]);
    ForEachBlockArray(
        [&](const BlockArray& array, auto& x, auto& y) {
          if (array.counter) each(x, y);
        },
        a.blocks[i], b.blocks[i]);
  }
}

}  // namespace moeserve
