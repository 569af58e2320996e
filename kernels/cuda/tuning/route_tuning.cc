#include "kernels/cuda/tuning/route_tuning.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/error_text.h"
#include "base/kinds.h"
#include "kernels/base/routing.h"
#include "kernels/cuda/tuning/graph_device.h"

namespace moeserve::cuda {
namespace {

// A candidate is a form by which the plan is built, times what computes the products: one of
// kRouteTiles or a cluster.
constexpr std::string_view kProductNames[] = {"8x4",   "8x8",  "8x16",     "16x16",
                                              "32x16", "64x8", "cluster8", "cluster16"};
constexpr int kTiles = static_cast<int>(std::size(kRouteTiles));
constexpr int kProducts = static_cast<int>(std::size(kProductNames));
static_assert(kProducts == kTiles + 2);

Choices::Names RouteFormNames() {
  Choices::Names names;
  for (const std::string_view name : kProductNames) names.emplace_back(name);
  for (const std::string_view name : kProductNames) names.push_back(Concat(name, " chunks"));
  return names;
}

int IdOf(const RouteVariant& v) {
  const int products = v.cluster_blocks > 0
                           ? kTiles + (v.cluster_blocks == 16 ? 1 : 0)
                           : static_cast<int>(v.tile) - static_cast<int>(kRouteTiles[0]);
  return products + (v.plan == PlanForm::kChunks ? kProducts : 0);
}

RouteVariant VariantOf(int id) {
  RouteVariant v{.plan = id >= kProducts ? PlanForm::kChunks : PlanForm::kSameLaunch};
  const int products = id % kProducts;
  if (products < kTiles) {
    v.tile = kRouteTiles[products];
  } else {
    v.cluster_blocks = products == kTiles ? 8 : 16;
  }
  return v;
}

// Returns whether a form may be the fastest for so many rows. Tall tiles would mostly have rows
// that do not exist; low ones read the weights of the router too often, and narrow ones the rows.
// Two further launches for the plan pay only if they have several blocks.
bool FormIsPlausible(const RouteVariant& v, int64_t rows) {
  constexpr int64_t kMostRowsOfSmallTiles = 4096;
  if (v.plan == PlanForm::kChunks && rows <= kPlanChunk) return false;
  if (v.cluster_blocks > 0) return true;
  const int tile_rows = ShapeOf(v.tile).rows();
  return tile_rows == kFewestTileRows ? rows <= kMostRowsOfSmallTiles : rows > tile_rows / 2;
}

}  // namespace

// The device memory of measurements.
class RouteTuning::Operands {
 public:
  static Result<Operands> Create(const RouteLaunch& recorded, cudaStream_t stream) {
    Operands o;
    RouteLaunch& a = o.launch_;
    a = {.router = recorded.router,
         .input = recorded.input,
         .rows_per_token = recorded.rows_per_token,
         .k_max = recorded.k_max};
    const auto rows = static_cast<int>(a.input.rows);
    const RouterTables& router = a.router->tables();
    const int experts = router.settings.num_experts;
    const size_t bytes = static_cast<size_t>(rows * a.input.stride) * SizeOf(a.input.dtype);
    MOESERVE_ASSIGN_OR_RETURN(o.input_, DeviceMemory::Allocate(bytes));
    MOESERVE_RETURN_IF_ERROR(FillWithNumbers(o.input_, stream));
    a.input.data = o.input_.data();
    MOESERVE_ASSIGN_OR_RETURN(o.plan_, PlanMemory::Create(rows, a.k_max, experts));
    MOESERVE_ASSIGN_OR_RETURN(o.scratch_,
                              RouteScratch::Create(rows, a.k_max, experts, router.columns,
                                                   ChangedWidth(router.settings)));
    size_t results = ScoreBytes(a);
    for (const Part& part : PartsOf(o.plan_, a)) results += part.bytes;
    MOESERVE_ASSIGN_OR_RETURN(o.output_, DeviceMemory::Allocate((results + 3) / 4 * 4));
    return o;
  }

  // Routes the first `rows` rows in the form `variant`.
  void Route(const CudaRouter* router, int64_t rows, const RouteVariant& variant,
             cudaStream_t stream) {
    LaunchRoute(With(router, rows, variant), stream);
  }
  // The same, with the scores and the plan in output().
  Status RouteToOutput(const CudaRouter* router, int64_t rows, const RouteVariant& variant,
                       cudaStream_t stream) {
    RouteLaunch a = With(router, rows, variant);
    a.scores = output_.as<float>();
    a.scores_stride = router->settings().num_experts;
    const std::vector<Part> parts = PartsOf(plan_, a);
    for (const Part& part : parts) {
      MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(part.data, 0xff, part.bytes, stream));
    }
    LaunchRoute(a, stream);
    char* to = output_.as<char>() + ScoreBytes(a);
    for (const Part& part : parts) {
      MOESERVE_CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(to, part.data, part.bytes, cudaMemcpyDeviceToDevice, stream));
      to += part.bytes;
    }
    return absl::OkStatus();
  }

  // Returns a launch of `rows` rows.
  RouteLaunch With(const CudaRouter* router, int64_t rows, const RouteVariant& variant) {
    RouteLaunch a = launch_;
    a.router = router;
    a.input.rows = rows;
    a.variant = variant;
    a.plan = &plan_;
    a.scratch = &scratch_;
    return a;
  }

  const DeviceMemory& output() const { return output_; }

 private:
  struct Part {
    void* data;
    size_t bytes;
  };

  static size_t ScoreBytes(const RouteLaunch& a) {
    return static_cast<size_t>(a.input.rows * a.router->settings().num_experts) * sizeof(float);
  }
  // Returns the arrays of the launch's plan.
  static std::vector<Part> PartsOf(const PlanMemory& plan, const RouteLaunch& a) {
    const PlanArrays p = plan.arrays();
    const auto rows = static_cast<size_t>(a.input.rows);
    const size_t routes = rows * static_cast<size_t>(a.k_max) * 4;
    const auto experts = static_cast<size_t>(a.router->settings().num_experts);
    return {{p.expert_offsets, (experts + 1) * 4},
            {p.expert_of_assignment, routes},
            {p.row_of_assignment, routes},
            {p.weight_of_assignment, routes},
            {p.row_offsets, (rows + 1) * 4},
            {p.assignments_of_row, routes},
            {p.row_nonfinite, rows}};
  }

  RouteLaunch launch_;
  DeviceMemory input_, output_;
  PlanMemory plan_;
  RouteScratch scratch_;
};

RouteTuning::SiteKey RouteTuning::KeyOf(const RouteLaunch& launch) {
  const RouteSettings& s = launch.router->settings();
  return {.experts = s.num_experts,
          .width = s.input_width,
          .dim = s.dim,
          .k = s.k,
          .k_max = launch.k_max,
          .groups = s.groups,
          .best_groups = s.best_groups,
          .score = s.score,
          .gate = s.gate,
          .select = s.select,
          .row_norm = s.row_norm,
          .changes_row = ChangesRow(s),
          .choice_bias = s.choice_bias,
          .bf16 = launch.input.dtype == DType::kBF16};
}

int RouteTuning::SiteOf(const SiteKey& key) {
  const auto [at, added] = sites_.try_emplace(key, -1);
  if (added) {
    at->second = choices_->Site(
        Concat("router ", key.width, " to ", key.experts, " ", KindName(key.score), " ", key.dim,
               ", ", KindName(key.gate), ", ", KindName(key.select), " ", key.k, " of ", key.k_max,
               ", groups ", key.best_groups, " of ", key.groups, ", norm ", KindName(key.row_norm),
               key.changes_row ? " changed" : "", key.choice_bias ? " choice bias" : "",
               key.bf16 ? " bf16" : " f32"),
        RouteFormNames());
  }
  return at->second;
}

RouteVariant RouteTuning::Variant(const RouteLaunch& launch) {
  const RouteSettings& s = launch.router->settings();
  if (launch.overrides != nullptr || s.select == SelectKind::kTable || launch.input.rows == 0) {
    return {};
  }
  const SiteKey key = KeyOf(launch);
  const int site = SiteOf(key);
  if (records_) {
    Recorded& r = recorded_[key];
    if (launch.input.rows > r.launch.input.rows) r.launch = launch;
    if (std::find(r.routers.begin(), r.routers.end(), launch.router) == r.routers.end()) {
      r.routers.push_back(launch.router);
    }
  }
  const std::optional<int> chosen = choices_->Find(site, launch.input.rows);
  return chosen ? VariantOf(*chosen) : RouteVariant{};
}

Status RouteTuning::MeasureSite(const Recorded& recorded, const TuningSettings& settings,
                                const TuneDeviceFactory& devices, cudaStream_t stream) {
  const int site = SiteOf(KeyOf(recorded.launch));
  std::optional<Operands> operands;
  std::unique_ptr<TuneDevice> device;
  for (const int64_t rows : NumbersOfRows(recorded.launch.input.rows, settings.rows_factor)) {
    if (!IsWanted(site, rows, settings)) continue;
    if (device == nullptr) {
      MOESERVE_ASSIGN_OR_RETURN(operands, Operands::Create(recorded.launch, stream));
      device = devices(stream, operands->output().data(), operands->output().bytes());
    }
    TuneCase tune_case{.name = Concat("routing of ", rows, " rows"), .candidates = {}};
    std::vector<int> ids;
    Status copied;
    Operands& o = *operands;
    const std::vector<const CudaRouter*>& routers = recorded.routers;
    for (const RouteVariant& v : RouteVariantsThatFit(o.With(routers[0], rows, {}))) {
      if (!ids.empty() && !FormIsPlausible(v, rows)) continue;
      ids.push_back(IdOf(v));
      tune_case.candidates.push_back(
          {.name = RouteFormNames()[static_cast<size_t>(ids.back())],
           .enqueue =
               [&o, &routers, rows, v, stream](int turn) {
                 o.Route(routers[static_cast<size_t>(turn) % routers.size()], rows, v, stream);
               },
           .enqueue_to_output =
               [&o, &routers, &copied, rows, v, stream](int) {
                 copied.Update(o.RouteToOutput(routers[0], rows, v, stream));
               }});
    }
    MOESERVE_RETURN_IF_ERROR(MeasureCase(site, rows, tune_case, ids, *device));
    MOESERVE_RETURN_IF_ERROR(copied);
  }
  return absl::OkStatus();
}

Status RouteTuning::MeasureRecorded(const TuningSettings& settings,
                                    const TuneDeviceFactory& devices, cudaStream_t stream) {
  for (const auto& [key, recorded] : recorded_) {
    MOESERVE_RETURN_IF_ERROR(MeasureSite(recorded, settings, devices, stream));
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
