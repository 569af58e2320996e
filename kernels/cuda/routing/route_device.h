// The arguments of the routing kernels: plain values and device pointers.
#pragma once

#include <cstdint>

#include "kernels/base/route_settings.h"

namespace moeserve::cuda {

// A plan is built by one block, for at most kOnePlanRows rows, or by one block per kPlanChunk rows.
inline constexpr int kPlanChunk = 256;
inline constexpr int kOnePlanRows = 1024;
// The data of more experts than this would not fit into the shared memory of a chunk's block.
inline constexpr int kMaxRoutedExperts = 4096;
inline constexpr int kMaxCosineDim = 4096;
// The router's weights are padded with zeros to whole tiles of kRouterColumns columns and
// kRouterStep elements.
inline constexpr int kRouterColumns = 16;
inline constexpr int kRouterStep = 256;
// The smallest number of rows in a tile of products.
inline constexpr int kFewestTileRows = 8;
// The kernels that select the top k experts without scratch memory for all ranks hold the scores of
// up to kMostTopExperts experts in registers, and lane r of a warp holds the expert of rank r.
inline constexpr int kMostTopExperts = 256;
inline constexpr int kMostTopRanks = 32;
inline constexpr int kMostTopDim = 64;  // of cosine routers

// RouteSharedBytes() returns the bytes of shared memory per block that routing with `settings` and
// building a plan need; RouteSharedLimit() returns the limit of the current device.
int64_t RouteSharedBytes(const RouteSettings& settings);
int64_t RouteSharedLimit();

// A router's tensors on the device. `weights` is the matrix that is multiplied with the input rows:
// the expert vectors of a dot router, or the projection of a cosine router.
struct RouterTables {
  RouteSettings settings;
  int columns = 0;                      // products per row: E (dot router) or dim (cosine router)
  int64_t padded = 0;                   // elements per weight row, a multiple of kRouterStep
  const float* weights = nullptr;       // [columns rounded up, padded], elements permuted by
                                        // PermutedForTile()
  const float* bias = nullptr;          // [columns] or null
  const float* experts = nullptr;       // cosine router only: [dim][E], padded to 16 bytes
  const float* choice_bias = nullptr;   // [E] or null
  const float* row_weight = nullptr;    // [c] or null
  const float* expert_scale = nullptr;  // [E] or null
  const int32_t* table = nullptr;       // [vocabulary, RouteSettings::k] or null
  float temperature = 1.0f;             // result of ResolvedTemperature()
};

// Returns the position at which element `i` of a weight row is stored. Of every 256 elements, lane
// l of a warp reads elements 8 l to 8 l + 7; the order is such that in each load, the lanes of a
// warp read adjacent pairs.
constexpr int64_t PermutedForTile(int64_t i) {
  const int64_t within = i % kRouterStep;
  const int64_t lane = within / 8, element = within % 8;
  return i - within + element / 2 * 64 + lane * 2 + element % 2;
}

// The routes of rows before they are sorted by expert. The routes of row r are the `counts[r]`
// elements from r * k_max on or, if `offsets` is not null, elements [offsets[r], offsets[r + 1]).
// The experts of a row ascend.
struct RouteTable {
  const int32_t* experts = nullptr;
  const float* weights = nullptr;
  const int32_t* counts = nullptr;
  const int32_t* offsets = nullptr;
  int k_max = 0;
};

// Pointers to the arrays of a RoutingPlan, for writing.
struct PlanArrays {
  int32_t* expert_offsets = nullptr;
  int32_t* expert_of_assignment = nullptr;
  int32_t* row_of_assignment = nullptr;
  float* weight_of_assignment = nullptr;
  int32_t* row_offsets = nullptr;
  int32_t* assignments_of_row = nullptr;
  uint8_t* row_nonfinite = nullptr;
};

}  // namespace moeserve::cuda
