// Routes the rows of a step: memory of plans, overrides and given routes, and the launch.

#include <cstring>
#include <map>
#include <vector>

#include "base/check.h"
#include "kernels/base/routing.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

bool TooSmall(const PlanMemory& memory, int64_t rows, int k_max, int experts) {
  return rows > memory.max_rows() || rows * k_max > memory.capacity() ||
         experts > memory.num_experts();
}

bool TooSmall(const RouteScratch& memory, int64_t rows, int k_max, int experts, int columns,
              int width) {
  return rows > memory.max_rows() || rows * k_max > memory.max_routes() ||
         rows * columns > memory.max_products() || rows * width > memory.max_changed() ||
         experts > memory.num_experts();
}

}  // namespace

const RouteOverride* CudaBackend::UploadOverrides(std::span<const RouteOverride> overrides,
                                                  int experts) {
  // Rows of one request share their bias, so each distinct bias is copied once.
  std::map<const float*, size_t> biases;
  for (const RouteOverride& o : overrides) {
    if (o.bias != nullptr) biases.try_emplace(o.bias, biases.size());
  }
  const size_t head = (overrides.size() * sizeof(RouteOverride) + 15) / 16 * 16;
  const size_t bytes = head + biases.size() * static_cast<size_t>(experts) * sizeof(float);
  if (overrides_.bytes() < bytes) {
    Synchronize();
    overrides_ = {};
    overrides_ = AllocateForStep(2 * bytes, "memory for changed routing");
  }
  std::vector<char> host(bytes);
  float* const device_biases = reinterpret_cast<float*>(overrides_.as<char>() + head);
  for (size_t i = 0; i < overrides.size(); ++i) {
    const RouteOverride& o = overrides[i];
    RouteOverride d{.k = o.k, .p = o.p, .bias = nullptr, .allowed = o.allowed};
    if (o.bias != nullptr) {
      const size_t at = biases[o.bias] * static_cast<size_t>(experts);
      d.bias = device_biases + at;
      std::memcpy(host.data() + head + at * sizeof(float), o.bias,
                  static_cast<size_t>(experts) * sizeof(float));
    }
    std::memcpy(host.data() + i * sizeof(d), &d, sizeof(d));
  }
  CopyIn(overrides_.data(), host.data(), bytes);
  return overrides_.as<RouteOverride>();
}

RoutingPlan CudaBackend::Route(const RouteArgs& args) {
  const auto& router = static_cast<const CudaRouter&>(*args.router);
  const RouteSettings& settings = router.settings();
  const int rows = static_cast<int>(args.input.rows);
  int widest = WidestRow(settings, args.overrides);
  if (args.given != nullptr) {
    widest = 1;
    for (size_t r = 0; r + 1 < args.given->offsets.size(); ++r) {
      widest = std::max(widest, args.given->offsets[r + 1] - args.given->offsets[r]);
    }
  }
  if (slots_.size() <= static_cast<size_t>(args.slot)) {
    slots_.resize(static_cast<size_t>(args.slot) + 1);
  }
  PlanSlot& slot = slots_[args.slot];
  if (TooSmall(slot.memory, rows, widest, settings.num_experts)) {
    DropRecordings();
    CheckStatus(slot.memory.Reserve(rows, widest, settings.num_experts), "memory for a plan");
  }
  const int columns = router.tables().columns;
  const int width = ChangedWidth(settings);
  if (TooSmall(route_scratch_, rows, widest, settings.num_experts, columns, width)) {
    DropRecordings();
    CheckStatus(route_scratch_.Reserve(rows, widest, settings.num_experts, columns, width),
                "memory for routing");
  }
  slot.copied = false;
  if (args.given != nullptr) {
    if (args.norm != nullptr) AddNorm(*args.norm);
    const GivenRoutes& given = *args.given;
    const size_t offsets = given.offsets.size() * sizeof(int32_t);
    const size_t routes = given.experts.size() * sizeof(int32_t);
    if (given_.bytes() < offsets + 2 * routes) {
      Synchronize();
      given_ = {};
      given_ = AllocateForStep(2 * (offsets + 2 * routes), "memory for given routes");
    }
    char* const base = given_.as<char>();
    CopyIn(base, given.offsets.data(), offsets);
    CopyIn(base + offsets, given.experts.data(), routes);
    CopyIn(base + offsets + routes, given.weights.data(), routes);
    slot.plan = LaunchGivenPlan({.rows = rows,
                                 .num_experts = settings.num_experts,
                                 .k_max = widest,
                                 .offsets = reinterpret_cast<const int32_t*>(base),
                                 .experts = reinterpret_cast<const int32_t*>(base + offsets),
                                 .weights = reinterpret_cast<const float*>(base + offsets + routes),
                                 .plan = &slot.memory,
                                 .scratch = &route_scratch_},
                                stream_.get());
    return slot.plan;
  }
  // `sequence` is passed even if this step has no padding rows, because its recording may be
  // replayed for a step that has padding rows.
  const int tokens = static_cast<int>(shape_.rows.tokens);
  const int rows_per_token = tokens > 0 && rows % tokens == 0 ? rows / tokens : 0;
  RouteLaunch launch{.router = &router,
                     .input = args.input,
                     .sequence = replayable_ ? step_.sequence : nullptr,
                     .token_ids = rows_per_token > 0 ? step_.token_ids : nullptr,
                     .rows_per_token = std::max(rows_per_token, 1),
                     .failed = rows_per_token > 0 ? step_.failed : nullptr,
                     .k_max = widest,
                     .plan = &slot.memory,
                     .scratch = &route_scratch_};
  NormLaunch norm;
  if (args.norm != nullptr) {
    norm = LaunchOf(*args.norm);
    launch.norm = &norm;
    if (!args.overrides.empty() || !CanRouteNorm(launch)) {
      AddNorm(*args.norm);
      launch.norm = nullptr;
    }
  }
  if (args.scores != nullptr) {
    launch.scores = static_cast<float*>(args.scores->data);
    launch.scores_stride = args.scores->stride;
  }
  if (!args.overrides.empty()) {
    launch.overrides = UploadOverrides(args.overrides, settings.num_experts);
  }
  if (route_tuning_ != nullptr) launch.variant = route_tuning_->Variant(launch);
  slot.plan = LaunchRoute(launch, stream_.get());
  if (settings.select == SelectKind::kTopP) {
    slot.plan.expected = std::max(1, static_cast<int>(slot.plan.capacity * route_share_));
  }
  return slot.plan;
}

}  // namespace moeserve::cuda
