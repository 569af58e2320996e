#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/routing/plan.h"
#include "kernels/cuda/routing/route_plan.cuh"
#include "kernels/cuda/routing/route_product.cuh"
#include "kernels/cuda/routing/route_select.cuh"
#include "kernels/cuda/routing/router.h"

namespace moeserve::cuda {
namespace {

// Upper bound of a block's dynamic shared memory. On devices that have less, RouteSharedLimit()
// returns what they have.
constexpr int64_t kMaxShared = 160 << 10;
// Bytes in front of the memory that the phases of the kernel share; they hold the flag of
// LastToArrive().
constexpr int64_t kHeader = 128;
// Number of multiprocessors of a large device. The smallest tiles (few columns) are used if the
// launch then has at most two thread blocks per multiprocessor, the next larger ones (few rows) if
// it has at most one. In larger launches, small tiles would read inputs and weights from memory too
// often.
constexpr int64_t kMultiprocessors = 132;
constexpr int64_t kSmallTileBlocks = 2 * kMultiprocessors;

__device__ __forceinline__ float WidenedElement(float x) { return x; }
__device__ __forceinline__ float WidenedElement(Bf16 x) { return F32FromBf16(x); }

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
  bool sort = false;     // whether the scratch memory of a selecting warp includes keys
  int select_warps = 1;  // number of warps whose scratch fits at once
  int select_bytes = 0;  // bytes of scratch per selecting warp
  bool build_plan = false;
  PlanArrays plan;
};

__device__ void SelectRows(const RouteKernelArgs& a, int first_row, int tile_rows, char* memory) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  if (warp >= a.select_warps) return;
  const SelectScratch scratch =
      CarveSelect(memory + int64_t{warp} * a.select_bytes, a.router.settings, a.sort);
  const int end = min(first_row + tile_rows, a.product.rows);
  for (int r = first_row + warp; r < end; r += a.select_warps) {
    if (a.sequence != nullptr && a.sequence[r / a.rows_per_token] < 0) {
      if (lane == 0) {
        a.counts[r] = 0;
        a.plan.row_nonfinite[r] = 0;
      }
      continue;
    }
    const RouteSettings& s = a.router.settings;
    const int32_t* listed = nullptr;
    if (s.select == SelectKind::kTable) {
      listed = a.router.table + int64_t{a.token_ids[r / a.rows_per_token]} * s.k;
    }
    SelectRow({.router = &a.router,
               .listed = listed,
               .products = a.product.products + int64_t{r} * a.product.columns,
               .override = a.overrides == nullptr ? nullptr : a.overrides + r,
               .scores = a.scores == nullptr ? nullptr : a.scores + r * a.scores_stride,
               .k_max = a.k_max,
               .experts = a.experts + int64_t{r} * a.k_max,
               .weights = a.weights + int64_t{r} * a.k_max,
               .count = a.counts + r,
               .nonfinite = a.plan.row_nonfinite + r,
               .failed = a.failed == nullptr ? nullptr : a.failed + r / a.rows_per_token},
              scratch, lane);
  }
}

// The grid is column tiles x row tiles. The last block to arrive in a row of tiles selects the
// experts for these rows. With build_plan, the block that completes the last rows also builds the
// plan.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2) RouteKernel(RouteKernelArgs a) {
  char* header = DynamicShared<char>();
  int32_t* flag = reinterpret_cast<int32_t*>(header);
  char* memory = header + kHeader;
  const int first_row = static_cast<int>(blockIdx.y) * Tile::kRows;
  TileProducts<Tile>(a.product, first_row, static_cast<int>(blockIdx.x) * Tile::kColumns, memory);
  if (gridDim.x == 1) {
    __syncthreads();
  } else if (!LastToArrive(a.arrivals + 1 + blockIdx.y, static_cast<int>(gridDim.x), flag)) {
    return;
  }
  SelectRows(a, first_row, Tile::kRows, memory);
  if (!a.build_plan) return;
  if (gridDim.y == 1) {
    __syncthreads();
  } else if (!LastToArrive(a.arrivals, static_cast<int>(gridDim.y), flag)) {
    return;
  }
  const RouteTable table{.experts = a.experts,
                         .weights = a.weights,
                         .counts = a.counts,
                         .offsets = nullptr,
                         .k_max = a.k_max};
  const int experts = a.router.settings.num_experts;
  BuildSmallPlan(table, experts, a.product.rows, CarvePlan(memory, experts), a.plan);
}

constexpr int kChangeWarps = 4;  // rows per block

// Writes the rows that have the scores of the input rows (see ChangedElement()); a warp computes a
// row. Rows of padding tokens are changed, too; nothing reads the results.
template <typename T>
__global__ void __launch_bounds__(32 * kChangeWarps)
    ChangeRowsKernel(const T* input, int64_t stride, int rows, RouterTables router, float* out) {
  GridDependencyPass();
  const RouteSettings& s = router.settings;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int64_t row = int64_t{blockIdx.x} * kChangeWarps + warp;
  if (row >= rows) return;
  const T* const x = input + row * stride;
  const int n = s.input_width;
  float factor = 1.0f;
  if (s.row_norm != RowNorm::kNone) {
    float sum = 0.0f;
    for (int begin = lane * kRoutingGroup; begin < n; begin += kRoutingLanes * kRoutingGroup) {
      const int end = min(begin + kRoutingGroup, n);
      for (int i = begin; i < end; ++i) {
        const float v = WidenedElement(x[i]);
        sum = fmaf(v, v, sum);
      }
    }
    factor = RowFactor(WarpTreeSum(sum), n, s.norm_eps);
  }
  for (int i = lane; i < n; i += 32) {
    const float weight = router.row_weight == nullptr ? 1.0f : __ldg(router.row_weight + i);
    out[row * n + i] = ChangedElement(s, WidenedElement(x[i]), factor, weight);
  }
}

template <typename T>
void LaunchChangeRows(const RowsView& input, const RouterTables& router, float* out,
                      cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((input.rows + kChangeWarps - 1) / kChangeWarps);
  Launch(ChangeRowsKernel<T>,
         {.grid = dim3(blocks),
          .block = dim3(32 * kChangeWarps),
          .shared_bytes = 0,
          .stream = stream,
          .overlaps_predecessor = true},
         static_cast<const T*>(input.data), input.stride, static_cast<int>(input.rows), router,
         out);
}

// Returns the rows from which the products are computed: the input, or changed rows.
RowsView RowsForProducts(const RouteLaunch& launch, cudaStream_t stream) {
  const RouterTables& router = launch.router->tables();
  const RowsView& input = launch.input;
  if (!ChangesRow(router.settings) || input.rows == 0) return input;
  const int64_t width = router.settings.input_width;
  float* const changed = launch.scratch->changed_rows();
  if (input.dtype == DType::kBF16) {
    LaunchChangeRows<Bf16>(input, router, changed, stream);
  } else {
    LaunchChangeRows<float>(input, router, changed, stream);
  }
  return {changed, DType::kF32, input.rows, width, width};
}

// Returns the shared memory that the phases of a block can use on this device.
int64_t RoomOfBlock() { return RouteSharedLimit() - kHeader; }

template <typename Tile>
void LaunchTiles(RouteKernelArgs& a, int64_t room, cudaStream_t stream) {
  static_assert(Tile::kBytes <= kMaxShared - kHeader);
  a.select_warps = static_cast<int>(std::min<int64_t>(Tile::kWarps, room / a.select_bytes));
  MOESERVE_CHECK(a.select_warps > 0, "the router was checked when it was made");
  int64_t shared = std::max<int64_t>(Tile::kBytes, int64_t{a.select_warps} * a.select_bytes);
  if (a.build_plan) shared = std::max(shared, PlanBytes(a.router.settings.num_experts));
  const auto tiles = [](int64_t n, int tile) {
    return static_cast<unsigned>((n + tile - 1) / tile);
  };
  Launch(
      RouteKernel<Tile>,
      {.grid = dim3(tiles(a.product.columns, Tile::kColumns), tiles(a.product.rows, Tile::kRows)),
       .block = Tile::kThreads,
       .shared_bytes = static_cast<size_t>(kHeader + shared),
       .stream = stream,
       .overlaps_predecessor = true},
      a);
}

// All tiles compute the same bits; they differ in the number of blocks that share the work.
template <typename T>
void LaunchProducts(RouteKernelArgs& a, cudaStream_t stream) {
  using FewColumns = ProductTile<T, 4, 1, 2, 4, 8>;  // 8 rows x 4 columns
  using FewRows = ProductTile<T, 4, 4, 2, 4, 4>;     // 8 rows x 16 columns
  using SomeRows = ProductTile<T, 4, 8, 4, 2, 3>;    // 16 rows x 16 columns
  using ManyRows = ProductTile<T, 8, 8, 4, 2, 3>;    // 32 rows x 16 columns
  using ManyByFew = ProductTile<T, 8, 8, 8, 1, 2>;   // 64 rows x 8 columns
  const int64_t rows = a.product.rows, columns = a.product.columns;
  const int64_t room = RoomOfBlock();
  // Devices with little shared memory use only the small tiles.
  if (rows > kPlanChunk && std::max(ManyByFew::kBytes, ManyRows::kBytes) <= room) {
    if (columns <= ManyByFew::kColumns) {
      LaunchTiles<ManyByFew>(a, room, stream);
    } else {
      LaunchTiles<ManyRows>(a, room, stream);
    }
  } else if ((rows + 7) / 8 * ((columns + 3) / 4) <= kSmallTileBlocks) {
    LaunchTiles<FewColumns>(a, room, stream);
  } else if ((rows + 7) / 8 * ((columns + 15) / 16) <= kMultiprocessors ||
             SomeRows::kBytes > room) {
    LaunchTiles<FewRows>(a, room, stream);
  } else {
    LaunchTiles<SomeRows>(a, room, stream);
  }
}

void CheckRoom(int rows, int experts, int k_max, const PlanMemory& plan,
               const RouteScratch& scratch) {
  const int64_t routes = int64_t{rows} * k_max;
  MOESERVE_CHECK(
      rows <= plan.max_rows() && routes <= plan.capacity() && experts <= plan.num_experts(),
      "PlanMemory::Reserve comes before the step");
  MOESERVE_CHECK(rows <= scratch.max_rows() && experts <= scratch.num_experts(),
                 "RouteScratch::Reserve comes before the step");
}

}  // namespace

int64_t RouteSharedBytes(const RouteSettings& settings) {
  return kHeader + std::max(SelectBytes(settings, true), PlanBytes(settings.num_experts));
}

int64_t RouteSharedLimit() {
  return std::min(kMaxShared, static_cast<int64_t>(SharedMemoryLimit()));
}

RoutingPlan LaunchRoute(const RouteLaunch& launch, cudaStream_t stream) {
  const RouterTables& router = launch.router->tables();
  const RouteSettings& settings = router.settings;
  const int rows = static_cast<int>(launch.input.rows);
  const int experts = settings.num_experts;
  RouteScratch& scratch = *launch.scratch;
  CheckRoom(rows, experts, launch.k_max, *launch.plan, scratch);
  MOESERVE_CHECK(int64_t{rows} * launch.k_max <= scratch.max_routes() &&
                     int64_t{rows} * router.columns <= scratch.max_products() &&
                     int64_t{rows} * ChangedWidth(settings) <= scratch.max_changed(),
                 "RouteScratch::Reserve comes before the step");
  MOESERVE_CHECK(
      launch.k_max >= std::min(settings.k, experts) && launch.input.cols >= settings.input_width,
      "the plan has room for what the router selects");
  MOESERVE_CHECK(settings.select != SelectKind::kTable || launch.token_ids != nullptr || rows == 0,
                 "a router with a table routes the tokens of a step");
  const PlanArrays plan = launch.plan->arrays();
  const PlanBuild build{.table = {.experts = scratch.experts(),
                                  .weights = scratch.weights(),
                                  .counts = scratch.counts(),
                                  .offsets = nullptr,
                                  .k_max = launch.k_max},
                        .rows = rows,
                        .experts = experts,
                        .clear_nonfinite = false,
                        .chunk_counts = scratch.chunk_counts(),
                        .arrivals = scratch.arrivals(),
                        .plan = plan};
  if (rows == 0) {
    LaunchPlan(build, stream);
    return launch.plan->Plan(rows, experts, launch.k_max);
  }
  const RowsView input = RowsForProducts(launch, stream);
  const int64_t element = static_cast<int64_t>(SizeOf(input.dtype));
  const bool sort = launch.overrides != nullptr || settings.select == SelectKind::kTopP ||
                    std::min(settings.k, experts) > kMostRanksByMaximum;
  RouteKernelArgs a{.product = {.input = input.data,
                                .stride = input.stride,
                                .aligned = reinterpret_cast<uintptr_t>(input.data) % 16 == 0 &&
                                           input.stride * element % 16 == 0,
                                .rows = rows,
                                .width = settings.input_width,
                                .weights = router.weights,
                                .padded = router.padded,
                                .columns = router.columns,
                                .bias = router.bias,
                                .products = scratch.products()},
                    .router = router,
                    .sequence = launch.sequence,
                    .token_ids = launch.token_ids,
                    .rows_per_token = launch.rows_per_token,
                    .scores = launch.scores,
                    .scores_stride = launch.scores_stride,
                    .overrides = launch.overrides,
                    .k_max = launch.k_max,
                    .experts = scratch.experts(),
                    .weights = scratch.weights(),
                    .counts = scratch.counts(),
                    .failed = launch.failed,
                    .arrivals = scratch.arrivals(),
                    .sort = sort,
                    .select_warps = 1,
                    .select_bytes = static_cast<int>(SelectBytes(settings, sort)),
                    .build_plan = rows <= kPlanChunk,
                    .plan = plan};
  if (input.dtype == DType::kBF16) {
    LaunchProducts<Bf16>(a, stream);
  } else {
    LaunchProducts<float>(a, stream);
  }
  if (!a.build_plan) LaunchPlan(build, stream);
  return launch.plan->Plan(rows, experts, launch.k_max);
}

RoutingPlan LaunchGivenPlan(const GivenPlanLaunch& launch, cudaStream_t stream) {
  CheckRoom(launch.rows, launch.num_experts, launch.k_max, *launch.plan, *launch.scratch);
  LaunchPlan({.table = {.experts = launch.experts,
                        .weights = launch.weights,
                        .counts = nullptr,
                        .offsets = launch.offsets,
                        .k_max = launch.k_max},
              .rows = launch.rows,
              .experts = launch.num_experts,
              .clear_nonfinite = true,
              .chunk_counts = launch.scratch->chunk_counts(),
              .arrivals = launch.scratch->arrivals(),
              .plan = launch.plan->arrays()},
             stream);
  return launch.plan->Plan(launch.rows, launch.num_experts, launch.k_max);
}

}  // namespace moeserve::cuda
