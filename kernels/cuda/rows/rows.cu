#include <algorithm>

#include "base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/soft_cap.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/rows/row_access.cuh"
#include "kernels/cuda/rows/rows.h"

namespace moeserve::cuda {
namespace {

template <typename Id>
__global__ void EmbedKernel(const void* table, int dtype, const Id* ids, float scale, int cols,
                            bool add, Rows out) {
  GridDependencyPass();
  const int64_t t = blockIdx.x;
  const int64_t id = ids[t];
  ForColumns<false>(cols, [&](int c) {
    const float v = LoadElement(table, dtype, id * cols + c) * scale;
    Store(out, t, c, add ? Load(out, t, c) + v : v);
  });
}

template <typename Id>
void LaunchTableRows(const TableView& table, const Id* ids, float scale, bool add,
                     const RowsView& output, cudaStream_t stream) {
  if (output.rows == 0) return;
  const RowGrid shape = GridOver(output.rows, output.cols, 1);
  Launch(EmbedKernel<Id>, LaunchShape{shape.grid, shape.block, 0, stream, true}, table.data,
         static_cast<int>(table.dtype), ids, scale, static_cast<int>(output.cols), add,
         RowsOf(output));
}

// Column i of a half of the columns has the frequency 10000^(-i / divisor).
__global__ void SinusoidKernel(const int32_t* position, int first, int divisor, int cols,
                               Rows out) {
  GridDependencyPass();
  const int64_t t = blockIdx.x;
  const int half = cols / 2;
  ForColumns<false>(half, [&](int i) {
    const double f = pow(10000.0, -static_cast<double>(i) / static_cast<double>(divisor));
    const double angle = (position[t] + first) * f;
    Store(out, t, i, Load(out, t, i) + static_cast<float>(sin(angle)));
    Store(out, t, half + i, Load(out, t, half + i) + static_cast<float>(cos(angle)));
  });
}

struct AssignParams {
  const int32_t* expert_offsets;
  const int32_t* expert_of_assignment;
  const int32_t* row_of_assignment;
  const int32_t* sources;  // null: the input for all
  int first, experts;
  const float* constants;
  const float* weights;  // factors of input rows; null: none
  Rows input;
  Rows output;
  int cols;
};

template <bool kVectors>
__global__ void AssignRowsKernel(AssignParams p) {
  GridDependencyPass();
  const int64_t a = blockIdx.x;
  if (a < p.expert_offsets[p.first] || a >= p.expert_offsets[p.experts]) return;
  const int32_t source = p.sources == nullptr ? kAssignInput : p.sources[p.expert_of_assignment[a]];
  if (source == kAssignNothing) return;
  const int64_t row = p.row_of_assignment[a];
  const float* constant =
      source < 0 ? nullptr : p.constants + static_cast<int64_t>(source) * p.cols;
  ForColumns<kVectors>(p.cols, [&](int c) {
    decltype(Load<kVectors>(constant)) v = {};
    if (constant != nullptr) {
      v = Load<kVectors>(constant + c);
    } else if (source == kAssignInput) {
      v = Load<kVectors>(p.input, row, c);
      if (p.weights != nullptr) v = p.weights[a] * v;
    }
    Store(p.output, a, c, v);
  });
}

template <bool kVectors>
__global__ void ConvertKernel(Rows in, Rows out, int cols) {
  GridDependencyPass();
  const int64_t r = blockIdx.x;
  ForColumns<kVectors>(cols, [&](int c) { Store(out, r, c, Load<kVectors>(in, r, c)); });
}

template <bool kVectors>
__global__ void AddScaledKernel(Rows x, Rows branch, const float* bias, float scale, int cols) {
  GridDependencyPass();
  const int64_t r = blockIdx.x;
  ForColumns<kVectors>(cols, [&](int c) {
    auto v = Load<kVectors>(branch, r, c);
    if (bias != nullptr) v = v + Load<kVectors>(bias + c);
    Store(x, r, c, Load<kVectors>(x, r, c) + scale * v);
  });
}

// Computes x[r] *= sigmoid(gate[r]), or x[r] *= factor if gate.data is null.
template <bool kVectors>
__global__ void ScaleKernel(Rows x, Rows gate, float factor, int cols) {
  GridDependencyPass();
  const int64_t r = blockIdx.x;
  const float f = gate.data == nullptr ? factor : 1.0f / (1.0f + expf(-Load(gate, r, 0)));
  ForColumns<kVectors>(cols, [&](int c) { Store(x, r, c, f * Load<kVectors>(x, r, c)); });
}

// Returns what a gate multiplies by.
struct GateFactor {
  GateActivation activation;

  __device__ __forceinline__ float operator()(float g) const {
    if (activation == GateActivation::kNone) return g;
    if (activation == GateActivation::kSoftplus2) {
      constexpr float kLn2 = 0x1.62e430p-1f, kLog2E = 0x1.715476p+0f;
      return ContractSoftplus(g * kLn2) * kLog2E;
    }
    const float sigmoid = 1.0f / (1.0f + expf(-g));
    return activation == GateActivation::kSilu ? g * sigmoid : sigmoid;
  }
};

// Each column of the gate is that of `share` columns of x; vectors have a column of their own.
template <bool kVectors>
__global__ void MultiplyByGateKernel(Rows x, Rows gate, GateFactor factor, int share, int cols) {
  GridDependencyPass();
  const int64_t r = blockIdx.x;
  ForColumns<kVectors>(cols, [&](int c) {
    const int at = kVectors ? c : c / share;
    Store(x, r, c, Load<kVectors>(x, r, c) * Map(factor, Load<kVectors>(gate, r, at)));
  });
}

template <bool kVectors>
__global__ void SoftCapKernel(Rows x, float cap, int cols) {
  GridDependencyPass();
  const int64_t r = blockIdx.x;
  const auto capped = [cap](float v) { return SoftCap(v, cap); };
  ForColumns<kVectors>(cols, [&](int c) { Store(x, r, c, Map(capped, Load<kVectors>(x, r, c))); });
}

template <bool kVectors>
__global__ void ClampKernel(Rows x, float limit, int cols) {
  GridDependencyPass();
  const int64_t r = blockIdx.x;
  const auto clamp = [limit](float v) { return v > limit ? limit : v < -limit ? -limit : v; };
  ForColumns<kVectors>(cols, [&](int c) { Store(x, r, c, Map(clamp, Load<kVectors>(x, r, c))); });
}

template <bool kVectors>
__global__ void GatherKernel(Rows in, const int32_t* rows, Rows out, int cols) {
  GridDependencyPass();
  const int64_t r = blockIdx.x;
  const int64_t from = rows[r];
  ForColumns<kVectors>(cols, [&](int c) { Store(out, r, c, Load<kVectors>(in, from, c)); });
}

// A thread computes one column, so that elements are added in the order of rows.
__global__ void PoolKernel(Rows in, const RowRange* ranges, PoolKind kind, int cols, Rows out) {
  GridDependencyPass();
  const int64_t p = blockIdx.x;
  const RowRange range = ranges[p];
  ForColumns<false>(cols, [&](int c) {
    float value = Load(in, range.begin, c);
    for (int64_t r = range.begin + 1; r < range.end; ++r) {
      const float x = Load(in, r, c);
      value = kind == PoolKind::kMean ? value + x : PoolMax(value, x);
    }
    if (kind == PoolKind::kMean) value /= static_cast<float>(range.end - range.begin);
    Store(out, p, c, value);
  });
}

}  // namespace

void LaunchEmbed(const TableView& table, const int32_t* ids, float scale, const RowsView& output,
                 cudaStream_t stream) {
  LaunchTableRows(table, ids, scale, false, output, stream);
}

void LaunchAddEmbedding(const TableView& table, const int32_t* ids, const RowsView& output,
                        cudaStream_t stream) {
  LaunchTableRows(table, ids, 1.0f, true, output, stream);
}
void LaunchAddEmbedding(const TableView& table, const uint8_t* ids, const RowsView& output,
                        cudaStream_t stream) {
  LaunchTableRows(table, ids, 1.0f, true, output, stream);
}

void LaunchAddSinusoids(const int32_t* position, int first, bool half_spacing,
                        const RowsView& output, cudaStream_t stream) {
  if (output.rows == 0) return;
  const int half = static_cast<int>(output.cols / 2);
  const RowGrid shape = GridOver(output.rows, output.cols / 2, 1);
  Launch(SinusoidKernel, LaunchShape{shape.grid, shape.block, 0, stream, true}, position, first,
         half_spacing ? half : half - 1, static_cast<int>(output.cols), RowsOf(output));
}

void LaunchAssignRows(const AssignRowsArgs& args, cudaStream_t stream) {
  const RoutingPlan& plan = *args.plan;
  MOESERVE_CHECK(args.output.rows == plan.capacity, "rows of plan and output");
  // Rows of constants begin at multiples of their width, so they are aligned where it is a multiple
  // of a vector.
  const bool vectors = TakesVectors(args.output) && TakesVectors(args.input) &&
                       reinterpret_cast<uintptr_t>(args.constants) % sizeof(float4) == 0;
  const AssignParams p{plan.expert_offsets,
                       plan.expert_of_assignment,
                       plan.row_of_assignment,
                       args.sources,
                       args.first,
                       plan.num_experts,
                       args.constants,
                       args.weighted ? plan.weight_of_assignment : nullptr,
                       RowsOf(args.input),
                       RowsOf(args.output),
                       static_cast<int>(args.output.cols)};
  MOESERVE_LAUNCH_ROWS(AssignRowsKernel, vectors, args.output, stream, p);
}

void LaunchConvert(const RowsView& input, const RowsView& output, cudaStream_t stream) {
  MOESERVE_LAUNCH_ROWS(ConvertKernel, TakesVectors(input) && TakesVectors(output), output, stream,
                       RowsOf(input), RowsOf(output), static_cast<int>(output.cols));
}

void LaunchAddScaled(const RowsView& x, const RowsView& branch, const float* bias, float scale,
                     cudaStream_t stream) {
  MOESERVE_LAUNCH_ROWS(AddScaledKernel, TakesVectors(x) && TakesVectors(branch), x, stream,
                       RowsOf(x), RowsOf(branch), bias, scale, static_cast<int>(x.cols));
}

void LaunchScaleBySigmoid(const RowsView& x, const RowsView& gate, cudaStream_t stream) {
  MOESERVE_LAUNCH_ROWS(ScaleKernel, TakesVectors(x), x, stream, RowsOf(x), RowsOf(gate), 1.0f,
                       static_cast<int>(x.cols));
}

void LaunchScale(const RowsView& x, float factor, cudaStream_t stream) {
  MOESERVE_LAUNCH_ROWS(ScaleKernel, TakesVectors(x), x, stream, RowsOf(x), RowsOf(RowsView{}),
                       factor, static_cast<int>(x.cols));
}

void LaunchMultiplyByGate(const RowsView& x, const RowsView& gate, GateActivation activation,
                          cudaStream_t stream) {
  const int share = static_cast<int>(x.cols / std::max<int64_t>(gate.cols, 1));
  MOESERVE_LAUNCH_ROWS(MultiplyByGateKernel, share == 1 && TakesVectors(x) && TakesVectors(gate), x,
                       stream, RowsOf(x), RowsOf(gate), GateFactor{activation}, share,
                       static_cast<int>(x.cols));
}

void LaunchSoftCap(const RowsView& x, float cap, cudaStream_t stream) {
  MOESERVE_LAUNCH_ROWS(SoftCapKernel, TakesVectors(x), x, stream, RowsOf(x), cap,
                       static_cast<int>(x.cols));
}

void LaunchClamp(const RowsView& x, float limit, cudaStream_t stream) {
  MOESERVE_LAUNCH_ROWS(ClampKernel, TakesVectors(x), x, stream, RowsOf(x), limit,
                       static_cast<int>(x.cols));
}

void LaunchGather(const RowsView& input, const int32_t* rows, const RowsView& output,
                  cudaStream_t stream) {
  MOESERVE_LAUNCH_ROWS(GatherKernel, TakesVectors(input) && TakesVectors(output), output, stream,
                       RowsOf(input), rows, RowsOf(output), static_cast<int>(output.cols));
}

void LaunchPool(const PoolArgs& args, const RowRange* ranges, cudaStream_t stream) {
  MOESERVE_CHECK(args.input.dtype == DType::kF32 && args.output.dtype == DType::kF32,
                 "pools read and write f32 rows");
  if (args.output.rows == 0) return;
  const RowGrid shape = GridOver(args.output.rows, args.output.cols, 1);
  Launch(PoolKernel, LaunchShape{shape.grid, shape.block, 0, stream, true}, RowsOf(args.input),
         ranges, args.kind, static_cast<int>(args.output.cols), RowsOf(args.output));
}

}  // namespace moeserve::cuda
