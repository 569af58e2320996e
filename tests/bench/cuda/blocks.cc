// Measures whole attention blocks in a decode step: routed attention (MoA), and standard attention
// with as many parameters in its projections.

#include <algorithm>
#include <cmath>

#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/positions/norm_rope_append.h"
#include "kernels/cuda/positions/rope.h"
#include "kernels/cuda/positions/rope_tables.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/cuda/rows/rows.h"
#include "tests/bench/cuda/attention.h"
#include "tests/bench/cuda/banks.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {
namespace {

struct BlockShape {
  std::string name;
  int width = 512;
  bool routed = false;
  ExpertShape experts;  // the experts' query and output projections; used only if `routed`
  AttentionShape attention;
};

class BlockRun {
 public:
  BlockRun(Bench& bench, const BlockShape& shape, int batch, int context)
      : bench_(bench), s_(shape), batch_(batch), context_(context) {}

  Result<Measured> Run() {
    const AttentionShape& a = s_.attention;
    const double kv_bytes = a.kv_bytes_per_token() * batch_ * context_;
    int layers = 2;
    if (!bench_.tiny()) {
      layers = static_cast<int>(std::clamp(
          std::ceil(4.0 * static_cast<double>(bench_.rates().l2_bytes) / kv_bytes), 4.0,
          std::clamp(static_cast<double>(bench_.weight_budget()) / kv_bytes, 2.0, 16.0)));
    }
    MOESERVE_ASSIGN_OR_RETURN(cache_, RandomCache::Create(bench_, a, layers, batch_, context_));
    MOESERVE_ASSIGN_OR_RETURN(step_, cache_->Step(bench_, false));
    for (int i = 0; i < layers; ++i) MOESERVE_RETURN_IF_ERROR(MakeLayer(i));
    MOESERVE_RETURN_IF_ERROR(MakeRows());
    cuda::LaunchAttentionWork(step_, batch_, {}, cuda::SplitTokens(a.query_heads() / a.kv_heads),
                              work_, bench_.stream());
    const RopeSettings rope{.head_dim = a.head_dim, .dimensions = a.head_dim};
    MOESERVE_RETURN_IF_ERROR(rope_tables_.Reserve(rope, batch_, bench_.stream()));
    angles_ = rope_tables_.Angles(rope, step_, bench_.stream());
    for (int i = 0; i < layers; ++i) Enqueue(i);
    MOESERVE_RETURN_IF_ERROR(Check());
    Measured m;
    MOESERVE_ASSIGN_OR_RETURN(m.timing, bench_.Time(layers, [this](int i) { Enqueue(i); }));
    const double d = s_.width, kv = 2.0 * a.kv_heads * a.head_dim;
    const double q = static_cast<double>(a.query_heads()) * a.head_dim;
    double weights = 2 * d * kv;  // bytes
    weights +=
        s_.routed ? s_.experts.expected_bytes(batch_) + 4 * d * s_.experts.experts() : 4 * d * q;
    m.work.bytes = weights + kv_bytes + 8 * d * batch_;
    m.work.written = 4 * d * batch_;
    // Projections of the normed rows, of routed queries, attention, and the output's projection.
    m.work.phases = s_.routed ? 4 : 3;
    m.work.flops = 2 * batch_ * (d * kv + 2 * d * q) + 4 * q * batch_ * context_;
    m.rotated_bytes = m.work.bytes * layers;
    m.more = {{"batch", batch_},
              {"context", context_},
              {"kv_mb", kv_bytes / 1e6},
              {"projection_macs", d * kv + 2 * d * q}};
    return m;
  }

 private:
  struct Layer {
    std::unique_ptr<RandomBank> projection, query, output;  // `query` only if routed
    std::unique_ptr<cuda::CudaRouter> router;
  };

  absl::Status MakeLayer(int i) {
    const AttentionShape& a = s_.attention;
    const int q = s_.routed ? 0 : a.heads * a.head_dim;
    const uint64_t seed = 700 + 10 * static_cast<uint64_t>(i);
    Layer layer;
    MOESERVE_ASSIGN_OR_RETURN(
        layer.projection,
        RandomBank::Create(
            bench_, {.in_features = {s_.width}, .out_features = {q + 2 * a.kv_heads * a.head_dim}},
            seed));
    if (s_.routed) {
      MOESERVE_ASSIGN_OR_RETURN(
          layer.query,
          RandomBank::Create(bench_, {.in_features = {s_.width}, .out_features = s_.experts.hidden},
                             seed + 1));
      MOESERVE_ASSIGN_OR_RETURN(
          layer.output,
          RandomBank::Create(bench_,
                             {.in_features = s_.experts.hidden,
                              .out_features = std::vector<int>(s_.experts.hidden.size(), s_.width)},
                             seed + 2));
      MOESERVE_ASSIGN_OR_RETURN(layer.router, RandomRouter(s_.experts, seed + 3, 0.0f));
    } else {
      MOESERVE_ASSIGN_OR_RETURN(
          layer.output,
          RandomBank::Create(bench_, {.in_features = {q}, .out_features = {s_.width}}, seed + 2));
    }
    layers_.push_back(std::move(layer));
    return absl::OkStatus();
  }

  Result<RowsView> NewRows(int64_t rows, int64_t cols, DType dtype) {
    MOESERVE_ASSIGN_OR_RETURN(cuda::DeviceMemory memory,
                              bench_.Poisoned(static_cast<size_t>(rows * cols) * SizeOf(dtype)));
    const RowsView view{memory.data(), dtype, rows, cols, cols};
    memory_.push_back(std::move(memory));
    return view;
  }

  absl::Status MakeRows() {
    const AttentionShape& a = s_.attention;
    const int k = a.rows_per_token;
    const int64_t rows = int64_t{batch_} * k;
    const int64_t query_width = int64_t{a.heads} * a.head_dim;
    kv_width_ = a.kv_heads * a.head_dim;
    query_columns_ = s_.routed ? 0 : static_cast<int>(query_width);
    MOESERVE_ASSIGN_OR_RETURN(x_, NewRows(batch_, s_.width, DType::kF32));
    LaunchFill(x_.data, DType::kF32, x_.rows * x_.cols, 5, 1.0f, bench_.stream());
    MOESERVE_ASSIGN_OR_RETURN(normed_, NewRows(batch_, s_.width, DType::kBF16));
    MOESERVE_ASSIGN_OR_RETURN(projected_,
                              NewRows(batch_, query_columns_ + 2 * kv_width_, DType::kF32));
    MOESERVE_ASSIGN_OR_RETURN(query_, NewRows(rows, query_width, DType::kF32));
    MOESERVE_ASSIGN_OR_RETURN(heads_, NewRows(rows, query_width, DType::kBF16));
    MOESERVE_ASSIGN_OR_RETURN(results_, NewRows(rows, s_.width, DType::kBF16));
    MOESERVE_ASSIGN_OR_RETURN(branch_, NewRows(batch_, s_.width, DType::kF32));
    MOESERVE_ASSIGN_OR_RETURN(scales_, bench_.Random(DType::kF32, s_.width, 6, 1.0f));
    MOESERVE_ASSIGN_OR_RETURN(groups_, bench_.Upload(std::vector<int32_t>{0, s_.width}));
    const int64_t partial = cuda::PartialFloats(a.query_heads(), a.head_dim);
    const int slots = cuda::AttentionSlots(partial);
    MOESERVE_ASSIGN_OR_RETURN(work_memory_, cuda::DeviceMemory::Allocate(static_cast<size_t>(
                                                cuda::AttentionWorkBytes(batch_, slots, partial))));
    work_ = cuda::LayOutAttentionWork(work_memory_.data(), batch_, slots);
    if (!s_.routed) return absl::OkStatus();
    MOESERVE_ASSIGN_OR_RETURN(plan_memory_,
                              cuda::PlanMemory::Create(batch_, k, s_.experts.experts()));
    MOESERVE_ASSIGN_OR_RETURN(scratch_,
                              cuda::RouteScratch::Create(batch_, k, s_.experts.experts(),
                                                         std::max(s_.experts.experts(), 64)));
    return absl::OkStatus();
  }

  // Applies RoPE to the queries of attention experts.
  void RopeQueries() {
    const int d = s_.attention.head_dim;
    cuda::LaunchRope({.head_dim = d,
                      .dimensions = d,
                      .angles = angles_,
                      .step = step_,
                      .token_of_row = plan_.row_of_assignment,
                      .valid_rows = plan_.expert_offsets + plan_.num_experts,
                      .rows = static_cast<float*>(query_.data),
                      .num_rows = static_cast<int>(query_.rows),
                      .heads = static_cast<int>(query_.cols) / d,
                      .stride = query_.stride},
                     bench_.stream());
  }

  void Attend(int layer, const RowsView& query, const RoutingPlan* plan) {
    const AttentionShape& a = s_.attention;
    cuda::AttentionLaunch launch;
    launch.cache = cache_->layer(layer);
    launch.step = step_;
    if (plan != nullptr) {
      launch.rows = {plan->row_offsets, plan->assignments_of_row, plan->row_of_assignment,
                     a.rows_per_token, a.rows_per_token};
    }
    launch.query = static_cast<const float*>(query.data);
    launch.query_stride = query.stride;
    launch.output = heads_.data;
    launch.output_stride = heads_.stride;
    launch.output_dtype = DType::kBF16;
    launch.heads = a.heads;
    launch.tile_order = a.tile_order;
    launch.scale = 1.0f / std::sqrt(static_cast<float>(a.head_dim));
    launch.tiled_from = batch_;
    launch.work = work_;
    cuda::LaunchAttention(launch, bench_.stream());
  }

  // Enqueues the operations of the engine's attention block, in its order.
  void Enqueue(int i) {
    const cudaStream_t stream = bench_.stream();
    const Layer& layer = layers_[i];
    cuda::LaunchNorm({.shape = {.layer = false, .eps = 1e-5f},
                      .scales = scales_.as<float>(),
                      .group_begin = groups_.as<int32_t>(),
                      .width = s_.width,
                      .input = x_,
                      .output = normed_},
                     stream);
    cuda::LaunchLinear({.bank = &layer.projection->bank(), .input = normed_, .output = projected_},
                       stream);
    const RowsView keys = projected_.Columns(query_columns_, kv_width_);
    const RowsView values = projected_.Columns(query_columns_ + kv_width_, kv_width_);
    cuda::LaunchNormRopeAppend({.cache = cache_->layer(i),
                                .step = step_,
                                .query = static_cast<float*>(projected_.data),
                                .keys = static_cast<const float*>(keys.data),
                                .values = static_cast<const float*>(values.data),
                                .query_stride = projected_.stride,
                                .key_stride = keys.stride,
                                .value_stride = values.stride,
                                .heads = s_.routed ? 0 : s_.attention.heads,
                                .dimensions = s_.attention.head_dim,
                                .angles = angles_},
                               stream);
    if (!s_.routed) {
      Attend(i, projected_.Columns(0, query_columns_), nullptr);
      cuda::LaunchLinear({.bank = &layer.output->bank(), .input = heads_, .output = branch_},
                         stream);
    } else {
      plan_ = cuda::LaunchRoute({.router = layer.router.get(),
                                 .input = normed_,
                                 .k_max = s_.attention.rows_per_token,
                                 .plan = &plan_memory_,
                                 .scratch = &scratch_},
                                stream);
      cuda::LaunchLinear({.bank = &layer.query->bank(),
                          .plan = &plan_,
                          .gather = true,
                          .input = normed_,
                          .output = query_},
                         stream);
      RopeQueries();
      Attend(i, query_, &plan_);
      cuda::LaunchLinear(
          {.bank = &layer.output->bank(), .plan = &plan_, .input = heads_, .output = results_},
          stream);
      cuda::LaunchCombine({.plan = &plan_, .results = results_, .output = branch_}, stream);
    }
    cuda::LaunchAddScaled(x_, branch_, nullptr, 1e-3f, stream);
  }

  // Checks only that results are finite; other cases check the parts of the block.
  absl::Status Check() {
    for (const RowsView& rows : {branch_, x_}) {
      MOESERVE_ASSIGN_OR_RETURN(const std::vector<float> values,
                                bench_.Download<float>(rows.data, rows.rows * rows.cols));
      double largest = 0;
      for (const float v : values) {
        if (!std::isfinite(v)) return absl::InternalError("a value is not finite");
        largest = std::max<double>(largest, std::abs(v));
      }
      if (largest < 1e-4) return absl::InternalError("all values are 0");
    }
    return absl::OkStatus();
  }

  Bench& bench_;
  const BlockShape& s_;
  const int batch_, context_;
  int kv_width_ = 0, query_columns_ = 0;
  std::unique_ptr<RandomCache> cache_;
  cuda::StepView step_;
  std::vector<Layer> layers_;
  std::vector<cuda::DeviceMemory> memory_;
  RowsView x_, normed_, projected_, query_, heads_, results_, branch_;
  cuda::DeviceMemory scales_, groups_, work_memory_;
  cuda::AttentionWork work_;
  cuda::RopeTables rope_tables_;
  const float2* angles_ = nullptr;
  cuda::PlanMemory plan_memory_;
  cuda::RouteScratch scratch_;
  RoutingPlan plan_;
};

}  // namespace

void AddBlockCases(bool tiny, std::vector<Case>& cases) {
  BlockShape moa{.name = "moa",
                 .width = tiny ? 64 : 512,
                 .routed = true,
                 .experts = ExpertShapeOf("moa", tiny),
                 .attention = AttentionShapeOf("moa", tiny)};
  // The projections of 17 heads of 128 have as many parameters as those of MoA with 16 of 32
  // experts and one kv head of 256, for d = 512.
  BlockShape mha{.name = "mha",
                 .width = moa.width,
                 .routed = false,
                 .experts = {},
                 .attention = {.name = "mha17",
                               .kv_heads = tiny ? 3 : 17,
                               .heads = tiny ? 3 : 17,
                               .head_dim = tiny ? 32 : 128}};
  const std::vector<std::array<int, 2>> sizes =
      tiny ? std::vector<std::array<int, 2>>{{2, 20}}
           : std::vector<std::array<int, 2>>{
                 {32, 4096}, {32, 1024}, {32, 16384}, {1, 4096}, {128, 1024}};
  for (const auto& [batch, context] : sizes) {
    for (const BlockShape& shape : {moa, mha}) {
      cases.push_back(
          {"block/" + shape.name + "/B" + std::to_string(batch) + "L" + std::to_string(context),
           context == 4096 ? 0 : 1, [shape, batch, context](Bench& bench) {
             bench.Forget();
             return BlockRun(bench, shape, batch, context).Run();
           }});
    }
  }
}

}  // namespace moeserve::bench
