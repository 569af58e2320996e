#include "kernels/cuda/routing/router.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/routing.h"
#include "kernels/cuda/routing/plan.h"

namespace moeserve::cuda {
namespace {

template <typename T>
Result<DeviceMemory> Uploaded(const std::vector<T>& values) {
  const size_t bytes = values.size() * sizeof(T);
  MOESERVE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(bytes));
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(memory.data(), values.data(), bytes, cudaMemcpyHostToDevice));
  // The copy may still be running, and other streams do not wait for the default stream.
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(nullptr));
  return memory;
}

int64_t RoundedUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Replaces `memory` if it has fewer than `count` 4-byte elements. The old content is lost.
Status Grow(DeviceMemory& memory, int64_t count) {
  const size_t bytes = static_cast<size_t>(std::max<int64_t>(count, 1)) * 4;
  if (memory.bytes() >= bytes) return absl::OkStatus();
  memory = DeviceMemory();
  MOESERVE_ASSIGN_OR_RETURN(memory, DeviceMemory::Allocate(bytes));
  return absl::OkStatus();
}

}  // namespace

Result<std::unique_ptr<CudaRouter>> CudaRouter::Create(const RouteSettings& settings,
                                                       const RouterTensors& tensors) {
  const bool cosine = settings.score == ScoreKind::kCosine;
  if (settings.num_experts > kMaxRoutedExperts) {
    return absl::InvalidArgumentError("a router of " + std::to_string(settings.num_experts) +
                                      " experts; the CUDA backend routes to at most " +
                                      std::to_string(kMaxRoutedExperts));
  }
  if (cosine && settings.dim > kMaxCosineDim) {
    return absl::InvalidArgumentError(
        "a cosine router of dimension " + std::to_string(settings.dim) +
        "; the CUDA backend takes at most " + std::to_string(kMaxCosineDim));
  }
  if (RouteSharedBytes(settings) > RouteSharedLimit()) {
    return absl::InvalidArgumentError("a router of " + std::to_string(settings.num_experts) +
                                      " experts; it needs " +
                                      std::to_string(RouteSharedBytes(settings)) +
                                      " bytes of shared memory, and the device has " +
                                      std::to_string(RouteSharedLimit()) + " for a block");
  }
  const int64_t width = settings.input_width;
  auto router = std::unique_ptr<CudaRouter>(new CudaRouter);
  RouterTables& t = router->tables_;
  t.settings = settings;
  t.columns = ProductsOf(settings);
  t.padded = RoundedUp(width, kRouterStep);

  const std::vector<float> products = Widened(cosine ? tensors.projection : tensors.weight);
  std::vector<float> tiled(static_cast<size_t>(RoundedUp(t.columns, kRouterColumns) * t.padded));
  for (int64_t c = 0; c < t.columns; ++c) {
    float* row = tiled.data() + c * t.padded;
    for (int64_t i = 0; i < width; ++i) row[PermutedForTile(i)] = products[c * width + i];
  }
  MOESERVE_ASSIGN_OR_RETURN(router->weights_, Uploaded(tiled));
  t.weights = router->weights_.as<float>();
  if (tensors.bias.data != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(router->bias_, Uploaded(Widened(tensors.bias)));
    t.bias = router->bias_.as<float>();
  }
  if (tensors.choice_bias.data != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(router->choice_bias_, Uploaded(Widened(tensors.choice_bias)));
    t.choice_bias = router->choice_bias_.as<float>();
  }
  if (tensors.row_weight.data != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(router->row_weight_, Uploaded(Widened(tensors.row_weight)));
    t.row_weight = router->row_weight_.as<float>();
  }
  if (tensors.expert_scale.data != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(router->expert_scale_, Uploaded(Widened(tensors.expert_scale)));
    t.expert_scale = router->expert_scale_.as<float>();
  }
  if (!tensors.table.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(router->table_, Uploaded(tensors.table));
    t.table = router->table_.as<int32_t>();
  }
  if (!cosine) return router;

  const int64_t dim = settings.dim, experts = settings.num_experts;
  std::vector<float> vectors = Widened(tensors.weight);
  std::vector<float> transposed(static_cast<size_t>(RoundedUp(dim * experts, 4)));
  NormaliseExperts(settings, vectors.data());
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t i = 0; i < dim; ++i) transposed[i * experts + e] = vectors[e * dim + i];
  }
  MOESERVE_ASSIGN_OR_RETURN(router->experts_, Uploaded(transposed));
  t.experts = router->experts_.as<float>();
  t.temperature = ResolvedTemperature(settings.temperature, tensors.temperature);
  return router;
}

Result<PlanMemory> PlanMemory::Create(int max_rows, int k_max, int num_experts) {
  PlanMemory plan;
  MOESERVE_RETURN_IF_ERROR(plan.Reserve(max_rows, k_max, num_experts));
  return plan;
}

Status PlanMemory::Reserve(int max_rows, int k_max, int num_experts) {
  const int64_t rows = std::max(max_rows, max_rows_);
  const int64_t capacity = std::max(int64_t{max_rows} * k_max, capacity_);
  const int64_t experts = std::max(num_experts, num_experts_);
  for (auto [memory, count] : {std::pair{&expert_offsets_, experts + 1},
                               {&expert_of_assignment_, capacity},
                               {&row_of_assignment_, capacity},
                               {&weight_of_assignment_, capacity},
                               {&row_offsets_, rows + 1},
                               {&assignments_of_row_, capacity},
                               {&row_nonfinite_, RoundedUp(rows, 4) / 4}}) {
    MOESERVE_RETURN_IF_ERROR(Grow(*memory, count));
  }
  max_rows_ = static_cast<int>(rows);
  capacity_ = capacity;
  num_experts_ = static_cast<int>(experts);
  return absl::OkStatus();
}

PlanArrays PlanMemory::arrays() const {
  return {.expert_offsets = expert_offsets_.as<int32_t>(),
          .expert_of_assignment = expert_of_assignment_.as<int32_t>(),
          .row_of_assignment = row_of_assignment_.as<int32_t>(),
          .weight_of_assignment = weight_of_assignment_.as<float>(),
          .row_offsets = row_offsets_.as<int32_t>(),
          .assignments_of_row = assignments_of_row_.as<int32_t>(),
          .row_nonfinite = row_nonfinite_.as<uint8_t>()};
}

RoutingPlan PlanMemory::Plan(int rows, int num_experts, int k_max) const {
  const PlanArrays a = arrays();
  return {.rows = rows,
          .num_experts = num_experts,
          .num_assignments = -1,
          .capacity = rows * k_max,
          .expert_offsets = a.expert_offsets,
          .expert_of_assignment = a.expert_of_assignment,
          .row_of_assignment = a.row_of_assignment,
          .weight_of_assignment = a.weight_of_assignment,
          .row_offsets = a.row_offsets,
          .assignments_of_row = a.assignments_of_row,
          .row_nonfinite = a.row_nonfinite};
}

Result<RouteScratch> RouteScratch::Create(int max_rows, int k_max, int num_experts, int max_columns,
                                          int max_width) {
  RouteScratch scratch;
  MOESERVE_RETURN_IF_ERROR(scratch.Reserve(max_rows, k_max, num_experts, max_columns, max_width));
  return scratch;
}

Status RouteScratch::Reserve(int max_rows, int k_max, int num_experts, int max_columns,
                             int max_width) {
  const int64_t rows = std::max(max_rows, max_rows_);
  const int64_t routes = std::max(int64_t{max_rows} * k_max, max_routes_);
  const int64_t products = std::max(int64_t{max_rows} * max_columns, max_products_);
  const int64_t changed = std::max(int64_t{max_rows} * max_width, max_changed_);
  const int64_t experts = std::max(num_experts, num_experts_);
  const size_t old_arrivals = arrivals_.bytes();
  for (auto [memory, count] :
       {std::pair{&changed_rows_, changed},
        {&products_, products},
        {&experts_, routes},
        {&weights_, routes},
        {&counts_, rows},
        {&chunk_counts_, (experts + 1) * PlanChunks(rows)},
        {&arrivals_, 1 + RoundedUp(rows, kFewestTileRows) / kFewestTileRows}}) {
    MOESERVE_RETURN_IF_ERROR(Grow(*memory, count));
  }
  if (arrivals_.bytes() != old_arrivals) {
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemset(arrivals_.data(), 0, arrivals_.bytes()));
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(nullptr));
  }
  max_rows_ = static_cast<int>(rows);
  max_routes_ = routes;
  max_products_ = products;
  max_changed_ = changed;
  num_experts_ = static_cast<int>(experts);
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
