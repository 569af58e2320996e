#include <algorithm>

#include "base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/soft_cap.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/rows/norm.cuh"
#include "kernels/cuda/rows/rows.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;     // elements per access of a thread, if widths and addresses allow
                               // vectors
constexpr int kNormWarps = 4;  // warps per block if each warp normalises one vector

// A RowsView in the form that kernels take.
struct Rows {
  char* data;
  int64_t stride;  // elements
  int dtype;
};

Rows RowsOf(const RowsView& v) {
  return {static_cast<char*>(v.data), v.stride, static_cast<int>(v.dtype)};
}

__device__ __forceinline__ float LoadElement(const void* data, int dtype, int64_t i) {
  if (dtype == static_cast<int>(DType::kF32)) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == static_cast<int>(DType::kBF16) ? F32FromBf16(bits) : F32FromF16(bits);
}

__device__ __forceinline__ float Load(const Rows& rows, int64_t r, int64_t c) {
  return LoadElement(rows.data, rows.dtype, r * rows.stride + c);
}

__device__ __forceinline__ void Store(const Rows& rows, int64_t r, int64_t c, float v) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    reinterpret_cast<float*>(rows.data)[i] = v;
  } else {
    reinterpret_cast<uint16_t*>(rows.data)[i] = Bf16FromF32(v);
  }
}

// Loads kVector adjacent elements; the address must be a multiple of their total size.
__device__ __forceinline__ float4 LoadVector(const Rows& rows, int64_t r, int64_t c) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    return *reinterpret_cast<const float4*>(rows.data + i * 4);
  }
  const uint2 bits = *reinterpret_cast<const uint2*>(rows.data + i * 2);
  return make_float4(F32FromBits(bits.x << 16), F32FromBits(bits.x & 0xffff0000u),
                     F32FromBits(bits.y << 16), F32FromBits(bits.y & 0xffff0000u));
}

// The address must be a multiple of the elements' total size.
__device__ __forceinline__ void Store(const Rows& rows, int64_t r, int64_t c, float4 v) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    *reinterpret_cast<float4*>(rows.data + i * 4) = v;
    return;
  }
  uint2 bits;
  bits.x = Bf16FromF32(v.x) | static_cast<uint32_t>(Bf16FromF32(v.y)) << 16;
  bits.y = Bf16FromF32(v.z) | static_cast<uint32_t>(Bf16FromF32(v.w)) << 16;
  *reinterpret_cast<uint2*>(rows.data + i * 2) = bits;
}

// Loads kVector elements, as LoadVector(), or one.
template <bool kVectors>
__device__ __forceinline__ auto Load(const Rows& rows, int64_t r, int64_t c) {
  if constexpr (kVectors) {
    return LoadVector(rows, r, c);
  } else {
    return Load(rows, r, c);
  }
}
template <bool kVectors>
__device__ __forceinline__ auto Load(const float* p) {
  if constexpr (kVectors) {
    return *reinterpret_cast<const float4*>(p);
  } else {
    return *p;
  }
}

bool TakesVectors(const RowsView& v) {
  return v.cols % kVector == 0 && v.stride % kVector == 0 &&
         reinterpret_cast<uintptr_t>(v.data) % (kVector * SizeOf(v.dtype)) == 0;
}

// The grid for row-wise kernels: one thread per `per_thread` columns, and separate blocks for every
// row.
struct RowGrid {
  dim3 grid;
  dim3 block;
};

RowGrid GridOver(int64_t rows, int64_t cols, int per_thread) {
  const int64_t units = (cols + per_thread - 1) / per_thread;
  const int threads = units >= kThreads ? kThreads : static_cast<int>((units + 31) / 32 * 32);
  // The rows are the grid's x dimension, because only that one can be as large as 2^31.
  return {dim3(static_cast<unsigned>(rows), static_cast<unsigned>((units + threads - 1) / threads)),
          dim3(static_cast<unsigned>(threads))};
}

// Launches Kernel<true> or Kernel<false> over all columns of `view`; launches nothing if `view` is
// empty.
#define MOESERVE_LAUNCH_ROWS(Kernel, vectors, view, stream, ...)                        \
  do {                                                                                  \
    if ((view).rows == 0 || (view).cols == 0) break;                                    \
    const bool by_vectors = (vectors);                                                  \
    const RowGrid shape = GridOver((view).rows, (view).cols, by_vectors ? kVector : 1); \
    const LaunchShape launch{shape.grid, shape.block, 0, stream, true};                 \
    by_vectors ? Launch(Kernel<true>, launch, __VA_ARGS__)                              \
               : Launch(Kernel<false>, launch, __VA_ARGS__);                            \
  } while (false)

template <bool kVectors, typename Body>
__device__ __forceinline__ void ForColumns(int cols, const Body& body) {
  const int unit = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const int c = kVectors ? unit * kVector : unit;
  if (c < cols) body(c);
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 operator*(float a, float4 b) {
  return make_float4(a * b.x, a * b.y, a * b.z, a * b.w);
}
__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 MultiplyAdd(float a, float4 x, float4 y) {
  return make_float4(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w));
}
__device__ __forceinline__ float MultiplyAdd(float a, float x, float y) { return fmaf(a, x, y); }

// Returns f of each element.
template <typename F>
__device__ __forceinline__ float Map(const F& f, float v) {
  return f(v);
}
template <typename F>
__device__ __forceinline__ float4 Map(const F& f, float4 v) {
  return make_float4(f(v.x), f(v.y), f(v.z), f(v.w));
}

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

struct NormParams {
  bool layer;
  float eps;
  const float* scales;
  const float* shifts;
  const int32_t* group_begin;
  const int32_t* expert_of_row;  // null: every row uses group 0
  const int32_t* valid_rows;     // number of rows to process, in device memory; null: all rows
  int rows;
  int width;  // used if expert_of_row is null
  int segments;
  int parts;  // NormShape::parts; a part of a vector is a segment
  Rows input;
  Rows output;
  Rows branch;  // null data if there is none
  const float* bias;
  float scale;
};

__device__ __forceinline__ void StoreRowFour(const Rows& rows, int64_t r, int64_t c, int count,
                                             const float4& v) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    float* out = reinterpret_cast<float*>(rows.data) + i;
    StoreFour(out, count, Aligned16(out), v);
  } else if (count >= 4 && reinterpret_cast<uintptr_t>(rows.data + i * 2) % 8 == 0) {
    Store(rows, r, c, v);
  } else {
    Store(rows, r, c, v.x);
    if (count > 1) Store(rows, r, c + 1, v.y);
    if (count > 2) Store(rows, r, c + 2, v.z);
    if (count > 3) Store(rows, r, c + 3, v.w);
  }
}

// With kBlock, a block normalises one vector; otherwise each of its warps normalises one. All loads
// are issued before the first loaded value is used, and a row is read once.
template <bool kBlock>
__global__ void __launch_bounds__(kBlock ? kNormBlock : kNormWarps * 32)
    NormKernel(const NormParams p) {
  GridDependencyPass();
  constexpr int kTeam = kBlock ? kNormBlock : 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kTeam) +
                       static_cast<int>(threadIdx.x) / kTeam;
  if (item >= static_cast<int64_t>(p.rows) * p.segments) return;
  const int64_t row = item / p.segments;
  if (p.valid_rows != nullptr && row >= *p.valid_rows) return;
  int begin = 0, n = p.width;
  if (p.expert_of_row != nullptr) {
    const int group = p.expert_of_row[row];
    begin = p.group_begin[group];
    n = p.group_begin[group + 1] - begin;
  }
  if (p.parts > 1) begin = static_cast<int>(item % p.parts) * n;
  const int64_t first = item % p.segments * n;
  const auto start = [&](const Rows& rows) {
    return reinterpret_cast<float*>(rows.data) + row * rows.stride + first;
  };
  NormVector vector;
  vector.x = start(p.input);
  vector.n = n;
  vector.lane = static_cast<int>(threadIdx.x) % kTeam;
  vector.threads = kTeam;
  vector.aligned = Aligned16(vector.x);
  vector.Load();
  const float* scales = p.scales + begin;
  float4 scale[NormVector::kHeld] = {};
  vector.Load(scales, scale);
  const auto other = [n](const float* from, int c) {
    return LoadFour(from + c, n - c, Aligned16(from));
  };
  if (p.branch.data != nullptr) {
    const float* branch = start(p.branch);
    const float* bias = p.bias == nullptr ? nullptr : p.bias + first;
    float4 sums[NormVector::kHeld] = {}, biases[NormVector::kHeld] = {};
    vector.Load(branch, sums);
    if (bias != nullptr) vector.Load(bias, biases);
    vector.ForFours([&](int j, int c, float4& x) {
      const bool held = j < NormVector::kHeld;
      float4 v = held ? sums[j] : other(branch, c);
      if (bias != nullptr) v = v + (held ? biases[j] : other(bias, c));
      x = x + p.scale * v;
      StoreFour(vector.x + c, n - c, vector.aligned, x);
    });
  }
  const NormFactors factors = FactorsOf<kBlock>(vector, n, p.layer, p.eps, DynamicShared<float>());
  vector.ForFours([&](int j, int c, const float4& x) {
    float4 v = factors(x, j < NormVector::kHeld ? scale[j] : other(scales, c));
    if (p.shifts != nullptr) v = v + other(p.shifts + begin, c);
    StoreRowFour(p.output, row, first + c, n - c, v);
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

struct CombineParams {
  const int32_t* row_offsets;
  const int32_t* assignments_of_row;
  const float* weights;  // null: all are 1
  Rows results;
  Rows residual;  // null data if there is none
  Rows output;
  int cols;
};

template <bool kVectors>
__global__ void CombineKernel(CombineParams p) {
  GridDependencyPass();
  const int64_t r = blockIdx.x;
  const int32_t begin = p.row_offsets[r];
  const int32_t end = p.row_offsets[r + 1];
  ForColumns<kVectors>(p.cols, [&](int c) {
    decltype(Load<kVectors>(p.residual, r, c)) sum = {};
    if (p.residual.data != nullptr) sum = Load<kVectors>(p.residual, r, c);
    for (int32_t i = begin; i < end; ++i) {
      const int32_t a = p.assignments_of_row[i];
      sum = MultiplyAdd(p.weights == nullptr ? 1.0f : p.weights[a], Load<kVectors>(p.results, a, c),
                        sum);
    }
    Store(p.output, r, c, sum);
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

void LaunchNorm(const NormLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(args.input.dtype == DType::kF32, "norms read f32 rows");
  const int parts = args.shape.parts;
  MOESERVE_CHECK(parts == 1 || args.plan == nullptr, "norms of experts have one part");
  const int width = args.width / parts;
  const int segments = args.segments * parts;
  const int64_t vectors = args.input.rows * segments;
  if (vectors == 0) return;
  NormParams p{args.shape.layer,
               args.shape.eps,
               args.scales,
               args.shifts,
               args.group_begin,
               args.plan == nullptr ? nullptr : args.plan->expert_of_assignment,
               args.plan == nullptr ? nullptr : args.plan->expert_offsets + args.plan->num_experts,
               static_cast<int>(args.input.rows),
               width,
               segments,
               parts,
               RowsOf(args.input),
               RowsOf(args.output),
               RowsOf(args.branch),
               args.bias,
               args.scale};
  if (NormTeam(width) == kNormBlock) {
    Launch(NormKernel<true>,
           LaunchShape{dim3(static_cast<unsigned>(vectors)), dim3(kNormBlock),
                       kNormSharedFloats * sizeof(float), stream, true},
           p);
  } else {
    const unsigned blocks = static_cast<unsigned>((vectors + kNormWarps - 1) / kNormWarps);
    Launch(NormKernel<false>, LaunchShape{dim3(blocks), dim3(kNormWarps * 32), 0, stream, true}, p);
  }
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

void LaunchCombine(const CombineArgs& args, cudaStream_t stream) {
  const RoutingPlan& plan = *args.plan;
  MOESERVE_CHECK(args.output.rows == plan.rows, "rows of plan and sum");
  const RowsView none;
  const RowsView& residual = args.residual == nullptr ? none : *args.residual;
  const bool vectors = TakesVectors(args.output) && TakesVectors(args.results) &&
                       (args.residual == nullptr || TakesVectors(residual));
  const CombineParams p{plan.row_offsets,
                        plan.assignments_of_row,
                        args.weighted ? plan.weight_of_assignment : nullptr,
                        RowsOf(args.results),
                        RowsOf(residual),
                        RowsOf(args.output),
                        static_cast<int>(args.output.cols)};
  MOESERVE_LAUNCH_ROWS(CombineKernel, vectors, args.output, stream, p);
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
