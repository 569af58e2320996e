#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/routing/plan.h"
#include "kernels/cuda/routing/route_cluster.h"
#include "kernels/cuda/routing/route_kernel.cuh"
#include "kernels/cuda/routing/router.h"

namespace moeserve::cuda {
namespace {

// Upper bound of a block's dynamic shared memory. On devices that have less, RouteSharedLimit()
// returns what they have.
constexpr int64_t kMaxShared = 160 << 10;
__device__ __forceinline__ float WidenedElement(float x) { return x; }
__device__ __forceinline__ float WidenedElement(Bf16 x) { return F32FromBf16(x); }

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

int Multiprocessors() {
  static const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  return multiprocessors;
}

RouteShape ShapeOfLaunch(const RouteLaunch& launch, bool clusters) {
  const RouterTables& router = launch.router->tables();
  // Changed rows are f32.
  const DType dtype = ChangesRow(router.settings) ? DType::kF32 : launch.input.dtype;
  return {.settings = router.settings,
          .rows = launch.input.rows,
          .columns = router.columns,
          .k_max = launch.k_max,
          .overrides = launch.overrides != nullptr,
          .element_bytes = static_cast<int>(SizeOf(dtype)),
          .multiprocessors = Multiprocessors(),
          .shared_limit = RouteSharedLimit(),
          .cluster_limit = static_cast<int64_t>(SharedMemoryLimit()),
          .most_cluster_blocks = clusters ? MostRouteClusterBlocks() : 0};
}

// Returns the form in which the launch computes its norm; without a cluster if there is none.
RouteVariant ChooseNormRoute(const RouteLaunch& launch) {
  const RouteShape shape = ShapeOfLaunch(launch, true);
  // Blocks without columns only help with the rows.
  int blocks = shape.columns <= 8 ? 8 : shape.most_cluster_blocks;
  if (launch.variant.cluster_blocks > 0) blocks = launch.variant.cluster_blocks;
  RouteVariant variant;
  for (; blocks >= 8; blocks /= 2) {
    variant = ChooseRoute(shape, {.cluster_blocks = blocks});
    if (variant.cluster_blocks > 0) break;
  }
  const bool fits =
      variant.kernel == RouteKernelKind::kTopOfDots && variant.plan == PlanForm::kSameLaunch;
  if (!fits) variant.cluster_blocks = 0;
  return variant;
}

void LaunchKernelOf(const RouteVariant& variant, const RouteKernelArgs& a, DType dtype,
                    const NormLaunch* norm, cudaStream_t stream) {
  if (variant.cluster_blocks > 0) {
    LaunchRouteCluster(a, dtype, variant.kernel, variant.cluster_blocks, norm, stream);
    return;
  }
  MOESERVE_CHECK(norm == nullptr, "CanRouteNorm() allows the norm of a router's rows");
  const int64_t limit = RouteSharedLimit();
  switch (variant.kernel) {
    case RouteKernelKind::kAuto:
      break;
    case RouteKernelKind::kTopOfDots:
      return LaunchRouteKernel<RouteKernelKind::kTopOfDots>(a, dtype, variant.tile, limit, stream);
    case RouteKernelKind::kTopOfCosines:
      return LaunchRouteKernel<RouteKernelKind::kTopOfCosines>(a, dtype, variant.tile, limit,
                                                               stream);
    case RouteKernelKind::kAny:
      return LaunchRouteKernel<RouteKernelKind::kAny>(a, dtype, variant.tile, limit, stream);
  }
  MOESERVE_CHECK(false, "ChooseRoute() has chosen a kernel");
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
  int64_t header = 0;
  for (const RouteTile tile : kRouteTiles) header = std::max(header, RouteHeaderBytes(tile));
  return std::max(header + SelectBytes(settings, true), ChunkPlanBytes(settings.num_experts));
}

int64_t RouteSharedLimit() {
  return std::min(kMaxShared, static_cast<int64_t>(SharedMemoryLimit()));
}

std::vector<RouteVariant> RouteVariantsThatFit(const RouteLaunch& launch) {
  return RouteVariantsThatFit(ShapeOfLaunch(launch, true));
}

bool CanRouteNorm(const RouteLaunch& launch) {
  const NormLaunch& norm = *launch.norm;
  const RowsView& rows = launch.input;
  const RouteSettings& settings = launch.router->settings();
  const bool same = norm.output.data == rows.data && norm.output.dtype == rows.dtype &&
                    norm.output.rows == rows.rows && norm.output.cols == rows.cols &&
                    norm.output.stride == rows.stride;
  return same && rows.rows > 0 && rows.rows <= kMostRoutedNorms && norm.plan == nullptr &&
         norm.segments == 1 && norm.shape.parts == 1 && norm.width == settings.input_width &&
         norm.width == rows.cols && !ChangesRow(settings) && launch.overrides == nullptr &&
         (norm.sum == nullptr ||
          norm.sum->plan->row_offsets != launch.plan->arrays().row_offsets) &&
         ChooseNormRoute(launch).cluster_blocks > 0;
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
    LaunchPlan(build, true, stream);
    return launch.plan->Plan(rows, experts, launch.k_max);
  }
  const RowsView input = RowsForProducts(launch, stream);
  const RouteVariant variant =
      launch.norm != nullptr
          ? ChooseNormRoute(launch)
          : ChooseRoute(ShapeOfLaunch(launch, launch.variant.cluster_blocks > 0), launch.variant);
  const int64_t element = static_cast<int64_t>(SizeOf(input.dtype));
  const bool sort = launch.overrides != nullptr || settings.select == SelectKind::kTopP ||
                    std::min(settings.k, experts) > kMostTopRanks;
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
                    .build_plan = variant.plan == PlanForm::kSameLaunch,
                    .plan = plan,
                    .select_warps = 1,
                    .select_bytes = 0,
                    .table_begin = 0,
                    .early_table = false};
  LaunchKernelOf(variant, a, input.dtype, launch.norm, stream);
  if (!a.build_plan) LaunchPlan(build, false, stream);
  return launch.plan->Plan(rows, experts, launch.k_max);
}

RoutingPlan LaunchGivenPlan(const GivenPlanLaunch& launch, cudaStream_t stream) {
  CheckRoom(launch.rows, launch.num_experts, launch.k_max, *launch.plan, *launch.scratch);
  const bool one_launch = BuildsPlanInOneBlock(launch.rows, launch.k_max, launch.num_experts,
                                               RouteSharedLimit(), launch.plan_form);
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
             one_launch, stream);
  return launch.plan->Plan(launch.rows, launch.num_experts, launch.k_max);
}

}  // namespace moeserve::cuda
