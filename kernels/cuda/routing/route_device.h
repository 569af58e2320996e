// Arguments of the routing kernels: plain values and device pointers.
#pragma once

#include <cstdint>

#include "kernels/route_settings.h"

namespace moeserve::cuda {

// Rows that one block plans at once; up to this many, routing is one launch.
inline constexpr int kPlanChunk = 256;
inline constexpr int kPlanWords = kPlanChunk / 32;
// More experts than this do not fit the plan's shared memory.
inline constexpr int kMaxRoutedExperts = 4096;
inline constexpr int kMaxCosineDim = 4096;
// Weights come in whole tiles of columns and of `kRouterStep` elements, zeros behind the end.
inline constexpr int kRouterColumns = 16;
inline constexpr int kRouterStep = 256;
// Fewest rows of a block that computes products.
inline constexpr int kFewestTileRows = 8;

// Bytes of shared memory that routing by `settings` with a plan needs per block, and the limit of
// the current device.
int64_t RouteSharedBytes(const RouteSettings& settings);
int64_t RouteSharedLimit();

// A router's tensors on the device. `weights` is what ProductsOf() counts the products of.
struct RouterTables {
  RouteSettings settings;
  int columns = 0;                 // products of a row: E or dim
  int64_t padded = 0;              // elements of a weight row, a multiple of kRouterStep
  const float* weights = nullptr;  // [columns rounded up, padded], see PermutedForTile
  const float* bias = nullptr;     // [columns] or null
  const float* experts = nullptr;  // cosine: [dim][E]
  float temperature = 1.0f;        // ResolvedTemperature()
};

// The place of element `i` of a weight row: lane l of a warp takes the elements 8 l to 8 l + 7 of
// every 256, in pairs that are adjacent for the warp.
constexpr int64_t PermutedForTile(int64_t i) {
  const int64_t within = i % kRouterStep;
  const int64_t lane = within / 8, element = within % 8;
  return i - within + element / 2 * 64 + lane * 2 + element % 2;
}

// The routes of rows before they are sorted by expert: of row r, `counts[r]` at r * k_max or, where
// `offsets` is not null, those between two offsets. Experts of a row ascend.
struct RouteTable {
  const int32_t* experts = nullptr;
  const float* weights = nullptr;
  const int32_t* counts = nullptr;
  const int32_t* offsets = nullptr;
  int k_max = 0;
};

// The arrays of a RoutingPlan, to be written.
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
