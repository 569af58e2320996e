// The kernel that routes rows, for all tiles and kinds. Each kind is compiled in a source file of
// its own.
#pragma once

#include <algorithm>

#include "base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/routing/plan.h"
#include "kernels/cuda/routing/route_plan.cuh"
#include "kernels/cuda/routing/route_product.cuh"
#include "kernels/cuda/routing/route_select.cuh"
#include "kernels/cuda/routing/route_top.cuh"
#include "kernels/cuda/routing/route_variant.h"

namespace moeserve::cuda {

struct RouteKernelArgs {
  ProductArgs product;
  RouterTables router;
  const int32_t* sequence = nullptr;
  const int32_t* token_ids = nullptr;
  int rows_per_token = 1;
  float* scores = nullptr;
  int64_t scores_stride = 0;
  const RouteOverride* overrides = nullptr;
  int k_max = 0;
  int32_t* experts = nullptr;  // [rows, k_max]
  float* weights = nullptr;    // [rows, k_max]
  int32_t* counts = nullptr;   // [rows]
  uint8_t* failed = nullptr;   // [rows / rows_per_token] or null
  int32_t* arrivals = nullptr;
  bool sort = false;  // whether the scratch memory of a selecting warp includes keys
  bool build_plan = false;
  PlanArrays plan;
  // Set by LaunchRouteTile().
  int select_warps = 1;      // number of warps whose scratch fits at once
  int select_bytes = 0;      // bytes of scratch per selecting warp
  int table_begin = 0;       // where a cosine router's expert vectors are in the block's memory
  bool early_table = false;  // whether they are copied before the products
};

// The routes of the rows that a block selects, in its shared memory or in global memory.
struct RoutesOut {
  int first_row = 0;  // row of the arrays' first element
  int32_t* experts = nullptr;
  float* weights = nullptr;
  int32_t* counts = nullptr;
};

template <RouteKernelKind kKind>
__device__ __forceinline__ void SelectOne(const RouteKernelArgs& a, int r,
                                          const RowProducts& products, const RoutesOut& out,
                                          char* memory, int warp, int lane) {
  const RouteSettings& s = a.router.settings;
  char* const scratch = memory + int64_t{warp} * a.select_bytes;
  const int64_t at = r - out.first_row;
  float* const scores = a.scores == nullptr ? nullptr : a.scores + r * a.scores_stride;
  bool finite;
  if constexpr (kKind == RouteKernelKind::kAny) {
    const int32_t* listed = nullptr;
    if (s.select == SelectKind::kTable) {
      listed = a.router.table + int64_t{a.token_ids[r / a.rows_per_token]} * s.k;
    }
    finite = SelectRow({.router = &a.router,
                        .listed = listed,
                        .products = products,
                        .override = a.overrides == nullptr ? nullptr : a.overrides + r,
                        .scores = scores,
                        .k_max = a.k_max,
                        .experts = out.experts + at * a.k_max,
                        .weights = out.weights + at * a.k_max,
                        .count = out.counts + at,
                        .nonfinite = a.plan.row_nonfinite + r},
                       CarveSelect(scratch, s, a.sort), lane);
  } else {
    finite = SelectTop<kKind == RouteKernelKind::kTopOfCosines>(
        {.router = &a.router,
         .products = products,
         .table = reinterpret_cast<const float*>(memory + a.table_begin),
         .scratch = reinterpret_cast<float*>(scratch),
         .scores = scores,
         .experts = out.experts + at * a.k_max,
         .weights = out.weights + at * a.k_max,
         .count = out.counts + at,
         .nonfinite = a.plan.row_nonfinite + r},
        lane);
  }
  if (!finite && lane == 0 && a.failed != nullptr) a.failed[r / a.rows_per_token] = 1;
}

// Selects the experts of rows [first_row, end). `products` are theirs in shared memory, `stride`
// elements from row to row, or null if they are in global memory.
template <RouteKernelKind kKind>
__device__ __forceinline__ void SelectRows(const RouteKernelArgs& a, int first_row, int end,
                                           const float* products, int stride, const RoutesOut& out,
                                           char* memory) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  if (warp >= a.select_warps) return;
  for (int r = first_row + warp; r < end; r += a.select_warps) {
    if (a.sequence != nullptr && a.sequence[r / a.rows_per_token] < 0) {
      if (lane == 0) {
        out.counts[r - out.first_row] = 0;
        a.plan.row_nonfinite[r] = 0;
      }
      continue;
    }
    const RowProducts row =
        products != nullptr
            ? RowProducts{products + (r - first_row) * stride, true}
            : RowProducts{a.product.products + int64_t{r} * a.product.columns, false};
    SelectOne<kKind>(a, r, row, out, memory, warp, lane);
  }
}

// Returns whether the routes stay in the block that selects the experts of all rows. They do if
// they are few.
__device__ __forceinline__ bool KeepsRoutes(const RouteKernelArgs& a) {
  return a.build_plan && a.product.rows <= 32 && a.product.rows * a.k_max <= kSharedRoutes;
}

// Returns where the routes of all rows are stored; `shared` has room for kSharedRoutes routes and
// the counts of the rows.
__device__ __forceinline__ RoutesOut PlaceOfRoutes(const RouteKernelArgs& a, bool keeps,
                                                   void* shared) {
  RoutesOut out{.first_row = 0, .experts = a.experts, .weights = a.weights, .counts = a.counts};
  if (keeps) {
    out.experts = static_cast<int32_t*>(shared);
    out.weights = reinterpret_cast<float*>(out.experts + kSharedRoutes);
    out.counts = out.experts + 2 * kSharedRoutes;
  }
  return out;
}

// Builds the plan from the routes of all rows.
__device__ __forceinline__ void BuildPlanOf(const RouteKernelArgs& a, bool kept,
                                            const RoutesOut& out, char* memory) {
  const RouteTable table{.experts = out.experts,
                         .weights = out.weights,
                         .counts = out.counts,
                         .offsets = nullptr,
                         .k_max = a.k_max};
  const int experts = a.router.settings.num_experts, rows = a.product.rows;
  if (kept) {
    BuildFewRoutesPlan(table, experts, rows, CarvePlan(memory, experts, rows, false), a.plan);
  } else {
    BuildOnePlan(table, experts, rows, CarvePlan(memory, experts, rows, true), a.plan);
  }
}

// The grid is column tiles x row tiles. The last block to arrive in a row of tiles selects the
// experts for these rows. With build_plan, the block that completes the last rows also builds the
// plan.
template <typename Tile, RouteKernelKind kKind>
__global__ void __launch_bounds__(Tile::kThreads, 2) RouteKernel(RouteKernelArgs a) {
  constexpr bool kHasTable = kKind == RouteKernelKind::kTopOfCosines;
  char* const header = DynamicShared<char>();
  int32_t* const flag = reinterpret_cast<int32_t*>(header);
  float* const tile = reinterpret_cast<float*>(header + 128);
  char* const memory = header + Tile::kHeaderBytes;
  const int first_row = static_cast<int>(blockIdx.y) * Tile::kRows;
  const bool all_columns = gridDim.x == 1;
  TileProducts<Tile>(a.product, first_row, static_cast<int>(blockIdx.x) * Tile::kColumns, memory,
                     all_columns ? tile : nullptr, [&] {
                       if (kHasTable && a.early_table) {
                         CopyExpertTable(a.router, memory + a.table_begin);
                       }
                     });
  if (all_columns) {
    __syncthreads();
  } else if (!LastToArrive(a.arrivals + 1 + blockIdx.y, static_cast<int>(gridDim.x), flag)) {
    return;
  }
  if (kHasTable && !a.early_table) {
    CopyExpertTable(a.router, memory + a.table_begin);
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncthreads();
  }
  // The routes of a few rows stay in the block.
  const bool all_rows = gridDim.y == 1;
  static_assert(kSharedRoutes <= Tile::kThreads);
  const bool in_shared = all_rows && KeepsRoutes(a);
  const RoutesOut out = PlaceOfRoutes(a, in_shared, tile + Tile::kRows * Tile::kColumns);
  SelectRows<kKind>(a, first_row, min(first_row + Tile::kRows, a.product.rows),
                    all_columns ? tile : nullptr, Tile::kColumns, out, memory);
  if (!a.build_plan) return;
  if (all_rows) {
    __syncthreads();
  } else if (!LastToArrive(a.arrivals, static_cast<int>(gridDim.y), flag)) {
    return;
  }
  BuildPlanOf(a, in_shared, out, memory);
}

// Expert vectors up to this size are copied while the products are computed, to memory of their
// own. Larger ones take the memory of the products, so that two blocks fit on a multiprocessor.
constexpr int64_t kMostBytesOfEarlyTable = 32 << 10;

template <typename T, RouteTile kTile, RouteKernelKind kKind>
void LaunchRouteTile(RouteKernelArgs a, int64_t shared_limit, cudaStream_t stream) {
  using Tile = ProductTile<T, kTile>;
  const RouteSettings& s = a.router.settings;
  const int64_t room = shared_limit - Tile::kHeaderBytes;
  const bool has_table = kKind == RouteKernelKind::kTopOfCosines;
  const int64_t table = has_table ? ExpertTableBytes(s) : 0;
  a.early_table = has_table && a.product.columns <= Tile::kColumns &&
                  table <= kMostBytesOfEarlyTable && Tile::kBytes + table <= room;
  a.select_bytes =
      static_cast<int>(kKind == RouteKernelKind::kAny ? SelectBytes(s, a.sort) : kSelectTopBytes);
  // An early table is behind the products; a late one is behind the scratch memory of the warps.
  const int64_t select_room = a.early_table ? Tile::kBytes : room - table;
  a.select_warps = static_cast<int>(std::min<int64_t>(Tile::kWarps, select_room / a.select_bytes));
  MOESERVE_CHECK(a.select_warps > 0, "the router was checked when it was made");
  const int64_t select = int64_t{a.select_warps} * a.select_bytes;
  a.table_begin = static_cast<int>(a.early_table ? Tile::kBytes : select);
  int64_t shared = std::max<int64_t>(Tile::kBytes, a.table_begin + table);
  if (a.build_plan) {
    shared = std::max(shared, OnePlanBytes(s.num_experts, a.product.rows));
  }
  const auto tiles = [](int64_t n, int tile) {
    return static_cast<unsigned>((n + tile - 1) / tile);
  };
  Launch(
      RouteKernel<Tile, kKind>,
      {.grid = dim3(tiles(a.product.columns, Tile::kColumns), tiles(a.product.rows, Tile::kRows)),
       .block = Tile::kThreads,
       .shared_bytes = static_cast<size_t>(Tile::kHeaderBytes + shared),
       .stream = stream,
       .overlaps_predecessor = true},
      a);
}

template <typename T, RouteKernelKind kKind>
void LaunchRouteKind(const RouteKernelArgs& a, RouteTile tile, int64_t shared_limit,
                     cudaStream_t stream) {
  switch (tile) {
    case RouteTile::kAuto:
      break;
    case RouteTile::k8x4:
      return LaunchRouteTile<T, RouteTile::k8x4, kKind>(a, shared_limit, stream);
    case RouteTile::k8x8:
      return LaunchRouteTile<T, RouteTile::k8x8, kKind>(a, shared_limit, stream);
    case RouteTile::k8x16:
      return LaunchRouteTile<T, RouteTile::k8x16, kKind>(a, shared_limit, stream);
    case RouteTile::k16x16:
      return LaunchRouteTile<T, RouteTile::k16x16, kKind>(a, shared_limit, stream);
    case RouteTile::k32x16:
      return LaunchRouteTile<T, RouteTile::k32x16, kKind>(a, shared_limit, stream);
    case RouteTile::k64x8:
      return LaunchRouteTile<T, RouteTile::k64x8, kKind>(a, shared_limit, stream);
  }
  MOESERVE_CHECK(false, "ChooseRoute() has chosen a tile");
}

// Launch the kernels of one kind; `dtype` is the type of the rows, f32 or bf16.
template <RouteKernelKind kKind>
void LaunchRouteKernel(const RouteKernelArgs& a, DType dtype, RouteTile tile, int64_t shared_limit,
                       cudaStream_t stream) {
  if (dtype == DType::kBF16) {
    LaunchRouteKind<Bf16, kKind>(a, tile, shared_limit, stream);
  } else {
    LaunchRouteKind<float, kKind>(a, tile, shared_limit, stream);
  }
}

extern template void LaunchRouteKernel<RouteKernelKind::kTopOfDots>(const RouteKernelArgs&, DType,
                                                                    RouteTile, int64_t,
                                                                    cudaStream_t);
extern template void LaunchRouteKernel<RouteKernelKind::kTopOfCosines>(const RouteKernelArgs&,
                                                                       DType, RouteTile, int64_t,
                                                                       cudaStream_t);
extern template void LaunchRouteKernel<RouteKernelKind::kAny>(const RouteKernelArgs&, DType,
                                                              RouteTile, int64_t, cudaStream_t);

}  // namespace moeserve::cuda
