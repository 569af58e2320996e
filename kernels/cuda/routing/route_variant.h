// The forms in which routing can run on a device. All forms compute the same bits; they differ in
// the number of blocks and launches that share the work.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/routing.h"
#include "kernels/cuda/routing/route_device.h"

namespace moeserve::cuda {

// The part of the product matrix that a block computes, rows x columns. kAuto: ChooseRoute()
// decides.
enum class RouteTile { kAuto, k8x4, k8x8, k8x16, k16x16, k32x16, k64x8 };
inline constexpr RouteTile kRouteTiles[] = {RouteTile::k8x4,   RouteTile::k8x8,   RouteTile::k8x16,
                                            RouteTile::k16x16, RouteTile::k32x16, RouteTile::k64x8};

// The kernel: selection of the top k with the scores in registers, for dot and for cosine routers;
// or any selection, with scratch memory for all ranks.
enum class RouteKernelKind { kAuto, kTopOfDots, kTopOfCosines, kAny };

// The launch that builds the plan: the launch that selects the experts, or two launches after it.
enum class PlanForm { kAuto, kSameLaunch, kChunks };

struct RouteVariant {
  RouteTile tile = RouteTile::kAuto;
  RouteKernelKind kernel = RouteKernelKind::kAuto;
  PlanForm plan = PlanForm::kAuto;
  // 8 or 16: one cluster of so many blocks instead of a grid with tiles. 0: no cluster.
  int cluster_blocks = 0;

  bool operator==(const RouteVariant&) const = default;
};

// A warp of a tile computes row_tile x column_tile products; a block has row_warps x column_warps
// warps, and `stages` steps of kRouterStep elements are in flight.
struct RouteTileShape {
  int row_tile, column_tile, row_warps, column_warps, stages;

  constexpr int rows() const { return row_tile * row_warps; }
  constexpr int columns() const { return column_tile * column_warps; }
};

constexpr RouteTileShape ShapeOf(RouteTile tile) {
  switch (tile) {
    case RouteTile::kAuto:
      break;
    case RouteTile::k8x4:
      return {4, 1, 2, 4, 8};
    case RouteTile::k8x8:
      return {4, 2, 2, 4, 6};
    case RouteTile::k8x16:
      return {4, 4, 2, 4, 4};
    case RouteTile::k16x16:
      return {4, 8, 4, 2, 3};
    case RouteTile::k32x16:
      return {8, 8, 4, 2, 3};
    case RouteTile::k64x8:
      return {8, 8, 8, 1, 2};
  }
  return {};
}

// Returns the shared memory of a tile whose rows have elements of this size.
constexpr int64_t RouteTileBytes(RouteTile tile, int element_bytes) {
  const RouteTileShape s = ShapeOf(tile);
  return int64_t{s.stages} * kRouterStep * (s.columns() * 4 + s.rows() * element_bytes);
}

// Bytes in front of the memory that the phases of the kernel share: the flag of LastToArrive(), a
// tile's products, and the routes of kSharedRoutes assignments and their row counts.
inline constexpr int kSharedRoutes = 256;
constexpr int64_t RouteHeaderBytes(RouteTile tile) {
  const RouteTileShape s = ShapeOf(tile);
  const int64_t bytes =
      128 + int64_t{4} * s.rows() * s.columns() + 8 * kSharedRoutes + 4 * s.rows();
  return (bytes + 127) / 128 * 128;
}

// A cluster routes up to this many rows with up to kMostTopExperts dot scores.
inline constexpr int kMostClusterRows = 32;
inline constexpr int kRouteClusterWarps = 16;  // per block, at most

// How a cluster divides the products: each block computes those of `block_columns` columns, a warp
// row_tile x column_tile of them at a time. The weights of its columns and the rows are in its
// shared memory, behind a header with the products and the routes of all rows.
struct RouteClusterShape {
  int block_columns = 0, row_tile = 1, column_tile = 1;
  int64_t row_elements = 0;  // RouterTables::padded
  int64_t header_bytes = 0, weight_bytes = 0, row_bytes = 0;

  constexpr int64_t bytes() const { return header_bytes + weight_bytes + row_bytes; }
};

inline constexpr int kRouteClusterBarrierBytes = 128;

constexpr RouteClusterShape ClusterShapeOf(int64_t rows, int64_t columns, int width,
                                           int element_bytes, int blocks) {
  RouteClusterShape c;
  c.block_columns = static_cast<int>((columns + blocks - 1) / blocks);
  // A tile takes less loads and conversions than its products alone, but occupies fewer warps.
  if (rows * c.block_columns > kRouteClusterWarps) c.row_tile = 4, c.column_tile = 2;
  const auto round_up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  c.row_elements = round_up(width, kRouterStep);
  c.header_bytes = round_up(
      kRouteClusterBarrierBytes + 4 * rows * columns + 8 * kSharedRoutes + 4 * kMostClusterRows,
      128);
  c.weight_bytes = round_up(c.block_columns, c.column_tile) * c.row_elements * 4;
  c.row_bytes = round_up(rows, c.row_tile) * c.row_elements * element_bytes;
  return c;
}

// Returns whether SelectTop() (route_top.cuh) can select the experts of rows without overrides. It
// must be false for settings that SelectTop() does not read.
inline bool IsTopRouter(const RouteSettings& s) {
  const bool gate = s.gate == GateKind::kSoftmax || s.gate == GateKind::kSoftmaxSelected ||
                    s.gate == GateKind::kSigmoid;
  const bool score = s.score == ScoreKind::kDot || s.dim <= kMostTopDim;
  return gate && score && s.select == SelectKind::kTopK && !RanksByChoice(s) && s.k >= 1 &&
         (s.k < s.num_experts ? s.k : s.num_experts) <= kMostTopRanks &&
         s.num_experts <= kMostTopExperts;
}

// The shared memory that a warp of SelectTop() needs: for the projection of the row, then for the
// gate values.
static_assert(kMostTopDim <= kMostTopExperts);
inline constexpr int64_t kSelectTopBytes = 4 * kMostTopExperts;

// Lanes without an expert read the elements after the row's last expert. A table of expert vectors
// in shared memory is followed by this many unused bytes, so that the reads stay within the block's
// memory.
inline constexpr int64_t kExpertTableSlack = 4 * kMostTopExperts;

// Returns the bytes of shared memory that the table of a cosine router takes.
constexpr int64_t ExpertTableBytes(const RouteSettings& s) {
  return (int64_t{4} * s.dim * s.num_experts + 15) / 16 * 16 + kExpertTableSlack;
}

// What the choice of a form depends on.
struct RouteShape {
  RouteSettings settings;
  int64_t rows = 0;
  int64_t columns = 0;  // RouterTables::columns
  int64_t k_max = 0;
  bool overrides = false;  // whether rows have overrides
  int element_bytes = 2;   // of the elements of the rows
  int multiprocessors = 0;
  int64_t shared_limit = 0;     // shared memory per block
  int64_t cluster_limit = 0;    // shared memory per block of a cluster
  int most_cluster_blocks = 0;  // 0: the device has no clusters
};

// Replaces what `wanted` leaves to kAuto, and also choices that the shape or the device does not
// allow.
RouteVariant ChooseRoute(const RouteShape& shape, const RouteVariant& wanted);

// Returns all forms that the shape and the device allow with the kernel that ChooseRoute() prefers,
// each once. The first one is that of an empty variant.
std::vector<RouteVariant> RouteVariantsThatFit(const RouteShape& shape);

// Returns whether one block builds the plan if `wanted` leaves it open or asks for it; `limit` is
// the shared memory that the block may use.
bool BuildsPlanInOneBlock(int64_t rows, int64_t k_max, int experts, int64_t limit, PlanForm wanted);

}  // namespace moeserve::cuda
