// The launch is one cluster of blocks. Each block copies the weights of its outputs to shared
// memory before it waits for earlier kernels. The blocks compute the rows together and write them
// to device memory; after a barrier of the cluster, each reads all rows. A warp computes 16 outputs
// of all rows as one chain of products in ascending order of the inputs, like all kernels for bf16
// rows.
#include <algorithm>
#include <map>
#include <type_traits>

#include "base/check.h"
#include "base/mutex.h"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/joined/joined_linear.h"
#include "kernels/cuda/joined/joined_stream.h"
#include "kernels/cuda/linear/activation.cuh"
#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/rows/norm_row.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kJoinedThreads = kNormBlock;
constexpr int kStripOutputs = 16;  // of a warp
constexpr int kInputRowBytes = kImageBlock * 2;
constexpr int kStripBlockBytes = kStripOutputs * kInputRowBytes;  // 16 outputs x 64 inputs
constexpr int kRowsBlockBytes = kMostJoinedRows * kInputRowBytes;
constexpr int kJoinedHeaderBytes = 256;
// Two launches read larger weights by more multiprocessors, in less time than a launch takes.
constexpr int64_t kMostJoinedBytes = 96 << 10;  // per block

struct JoinedParams {
  const char* weights = nullptr;  // of the matrix
  const float* bias = nullptr;    // of the packed rows; null if there is none
  const char* input = nullptr;
  char* output = nullptr;
  int64_t input_stride = 0, output_stride = 0;  // bytes
  int rows = 0, in_features = 0, out_features = 0, k_blocks = 0;
  int block_strips = 0;  // strips of 16 outputs per block, at most
  ActivationKind activation = ActivationKind::kNone;
  bool output_bf16 = false;
};

// Starts the copies of the block's weights by the first warp: for each strip, 2 KiB per 64 inputs.
__device__ __forceinline__ void StartJoinedWeights(const JoinedParams& p, int first_strip,
                                                   int strips, char* weights, uint64_t* copied) {
  const int pieces = strips * p.k_blocks;
  if (threadIdx.x == 0) {
    MbarrierInit(copied, 1);
    MbarrierInitFence();
    MbarrierArriveExpect(copied, static_cast<uint32_t>(pieces * kStripBlockBytes));
  }
  __syncwarp();
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += 32) {
    const int strip = i / p.k_blocks, k = i - strip * p.k_blocks;
    const int image_row = (first_strip + strip) * kStripOutputs;
    const int64_t block = int64_t{image_row / kImageBlock} * p.k_blocks + k;
    const char* const from =
        p.weights + (block * kImageBlock + image_row % kImageBlock) * kInputRowBytes;
    CopyBulkAsync(weights + i * kStripBlockBytes, from, kStripBlockBytes, copied);
  }
}

// Computes the rows of a norm: each by one block, or by one warp if it is short.
__device__ __forceinline__ void MakeRows(const NormParams& p, float* shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const int rank = static_cast<int>(ClusterRank()), blocks = static_cast<int>(ClusterBlocks());
  const bool sums = p.sum.row_offsets != nullptr;
  if (NormTeam(p.width) == kNormBlock) {
    for (int row = rank; row < p.rows; row += blocks) {
      if (row != rank) __syncthreads();  // the last row has used `shared`
      if (sums) {
        NormVectorOf<true, true>(p, row, thread, shared);
      } else {
        NormVectorOf<true, false>(p, row, thread, shared);
      }
    }
    return;
  }
  for (int row = rank + thread / 32 * blocks; row < p.rows; row += kJoinedThreads / 32 * blocks) {
    if (sums) {
      NormVectorOf<false, true>(p, row, thread % 32, shared);
    } else {
      NormVectorOf<false, false>(p, row, thread % 32, shared);
    }
  }
}

// Computes weighted sums; the threads of the cluster divide the columns among them.
__device__ __forceinline__ void MakeRows(const CombineParams& p, float* /*shared*/, int rows) {
  const int fours = (p.cols + 3) / 4;
  const int threads = static_cast<int>(ClusterBlocks()) * kJoinedThreads;
  for (int i = static_cast<int>(ClusterRank()) * kJoinedThreads + static_cast<int>(threadIdx.x);
       i < rows * fours; i += threads) {
    const int row = i / fours, c = (i - row * fours) * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    SumRow(p, row, [&](const auto& add) { add(sum, c, p.cols - c); });
    StoreRowFour(p.output, row, c, p.cols - c, sum);
  }
}

// Copies all rows by loads and stores, because bulk copies do not see what the cluster has written
// without a fence. A row's 16-byte piece c of each 64 inputs is at piece index c ^ (row % 8);
// pieces behind the last input are zeros.
__device__ __forceinline__ void CopyJoinedRows(const JoinedParams& p, char* rows) {
  const int pieces = p.k_blocks * 8;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < p.rows * pieces; i += kJoinedThreads) {
    const int row = i / pieces, piece = i - row * pieces;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (piece * 8 < p.in_features) {
      values = *reinterpret_cast<const uint4*>(p.input + row * p.input_stride + piece * 16);
    }
    *reinterpret_cast<uint4*>(rows + piece / 8 * kRowsBlockBytes + row * kInputRowBytes +
                              ((piece % 8) ^ row) * 16) = values;
  }
}

// Computes the products of 16 outputs, whose weights for 64 inputs each are at `weights`.
__device__ __forceinline__ void MultiplyStrip(const char* weights, const char* rows, int k_blocks,
                                              float (&sums)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 2
  for (int k = 0; k < k_blocks; ++k) {
    const char* const w = weights + k * kStripBlockBytes + lane % 16 * kInputRowBytes;
    const char* const r = rows + k * kRowsBlockBytes + lane % 8 * kInputRowBytes;
    uint32_t a[4][4], b[2][4];
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      LoadMatrix4(a[k16], w + ((k16 * 2 + lane / 16) ^ (lane & 7)) * 16);
    }
#pragma unroll
    for (int k32 = 0; k32 < 2; ++k32) {
      LoadMatrix4(b[k32], r + ((k32 * 4 + lane / 8) ^ (lane & 7)) * 16);
    }
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      const uint32_t both[2] = {b[k16 / 2][k16 % 2 * 2], b[k16 / 2][k16 % 2 * 2 + 1]};
      MmaBf16(sums, a[k16], both);
    }
  }
}

// Stores a warp's outputs with the bits of StoreLinearTile().
__device__ __forceinline__ void StoreJoined(const JoinedParams& p, int first, float (&sums)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = first + lane / 4 + half * 8;
    const float bias = p.bias == nullptr ? 0.0f : p.bias[column];
    float values[2] = {sums[half * 2] + bias, sums[half * 2 + 1] + bias};
    Activate(p.activation, p.output_bf16, values);
    if (column >= p.out_features) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane % 4 * 2 + i;
      if (row >= p.rows) continue;
      char* const to = p.output + row * p.output_stride;
      if (p.output_bf16) {
        reinterpret_cast<Bf16*>(to)[column] = static_cast<Bf16>(PackBf16(values[i], 0.0f));
      } else {
        reinterpret_cast<float*>(to)[column] = values[i];
      }
    }
  }
}

// `first` is NormParams or CombineParams, of `first_rows` rows.
template <typename First>
__global__ void __launch_bounds__(kJoinedThreads, 1)
    JoinedLinearKernel(const JoinedParams p, const First first, const int first_rows) {
  char* const shared = DynamicShared<char>();
  auto* const copied = reinterpret_cast<uint64_t*>(shared);
  auto* const of_norm = reinterpret_cast<float*>(shared + kJoinedHeaderBytes / 2);
  char* const weights = shared + kJoinedHeaderBytes;
  char* const rows = weights + p.block_strips * p.k_blocks * kStripBlockBytes;
  static_assert(kNormSharedFloats * 4 <= kJoinedHeaderBytes / 2);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_strip = static_cast<int>(ClusterRank()) * p.block_strips;
  const int all_strips = (p.out_features + kStripOutputs - 1) / kStripOutputs;
  const int strips = max(min(p.block_strips, all_strips - first_strip), 0);
  // Weights do not depend on earlier kernels.
  if (strips > 0 && warp == 0) StartJoinedWeights(p, first_strip, strips, weights, copied);
  __syncwarp();
  GridDependencyPass();
  if constexpr (std::is_same_v<First, NormParams>) {
    MakeRows(first, of_norm);
  } else {
    MakeRows(first, of_norm, first_rows);
  }
  __syncwarp();
  ClusterSync();
  if (strips == 0) return;
  CopyJoinedRows(p, rows);
  __syncthreads();
  if (warp >= strips) return;
  MbarrierWait(copied, 0);
  float sums[4] = {};
  MultiplyStrip(weights + warp * p.k_blocks * kStripBlockBytes, rows, p.k_blocks, sums);
  StoreJoined(p, (first_strip + warp) * kStripOutputs, sums);
}

struct JoinedShape {
  int blocks = 0;  // of the cluster; 0: the launch is not possible
  int block_strips = 0;
  int64_t shared_bytes = 0;
};

JoinedShape ShapeOfJoined(const CudaLinearBank& bank, int blocks) {
  const LinearBankEntry& entry = bank.entry(0);
  const int strips = (entry.out_features + kStripOutputs - 1) / kStripOutputs;
  JoinedShape s{.blocks = blocks, .block_strips = (strips + blocks - 1) / blocks};
  const int64_t weights = int64_t{s.block_strips} * entry.k_blocks * kStripBlockBytes;
  s.shared_bytes = kJoinedHeaderBytes + weights + int64_t{entry.k_blocks} * kRowsBlockBytes;
  if (s.block_strips > kJoinedThreads / 32 || weights > kMostJoinedBytes ||
      s.shared_bytes > static_cast<int64_t>(SharedMemoryLimit())) {
    s.blocks = 0;
  }
  return s;
}

// Returns the largest number of blocks (8 or 16) of the clusters that the current device can run;
// 0 if it has no clusters.
int MostJoinedBlocks() {
  static Mutex mutex;
  static auto* const known ABSL_PT_GUARDED_BY(mutex) = new std::map<int, int>;
  if (!HasClusters()) return 0;
  int device = 0;
  MOESERVE_CHECK(cudaGetDevice(&device) == cudaSuccess, "no current CUDA device");
  MutexLock lock(mutex);
  const auto [entry, is_new] = known->try_emplace(device, 0);
  for (const unsigned blocks : {16u, 8u}) {
    if (!is_new || entry->second > 0) break;
    const LaunchShape shape{.grid = dim3(blocks),
                            .block = dim3(kJoinedThreads),
                            .shared_bytes = SharedMemoryLimit(),
                            .cluster = dim3(blocks)};
    if (MaxActiveClusters(JoinedLinearKernel<NormParams>, shape) > 0) {
      entry->second = static_cast<int>(blocks);
    }
  }
  return entry->second;
}

bool SameRows(const RowsView& a, const RowsView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rows == b.rows && a.cols == b.cols &&
         a.stride == b.stride;
}

// Whether `parts` are the rows, each divided into adjacent parts.
bool DividesRows(const RowsView& parts, const RowsView& rows) {
  return SameRows(parts, rows) ||
         (parts.data == rows.data && parts.dtype == rows.dtype && parts.stride == parts.cols &&
          rows.stride == rows.cols && parts.rows * parts.cols == rows.rows * rows.cols);
}

// Whether the settings and the rows are those of one of the forms.
bool MayJoin(const JoinedLinear& joined) {
  const LinearArgs& args = joined.linear;
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  const RowsView& input = args.input;
  if (args.plan != nullptr || args.segments || args.pad_output || bank.num_experts() != 1 ||
      bank.shape().gated || bank.has_integers() || bank.is_mxfp4() || bank.is_fp8() ||
      bank.row_major() || bank.shape().weight_dtype != DType::kBF16 ||
      input.dtype != DType::kBF16) {
    return false;
  }
  if (input.rows == 0 || input.rows > kMostJoinedRows || bank.entry(0).in_features % 8 != 0 ||
      reinterpret_cast<uintptr_t>(input.data) % 16 != 0 || input.stride % 8 != 0) {
    return false;
  }
  if (joined.norm != nullptr) {
    const NormLaunch& norm = *joined.norm;
    if (!SameRows(norm.output, input) || norm.plan != nullptr || norm.segments != 1 ||
        norm.shape.parts != 1) {
      return false;
    }
  } else if (!DividesRows(joined.sum->output, input)) {
    return false;
  }
  return true;
}

// Whether one cluster can compute this.
bool ClusterFits(const JoinedLinear& joined) {
  if (joined.form == JoinedForm::kStream) return false;
  const auto& bank = static_cast<const CudaLinearBank&>(*joined.linear.bank);
  const int most = MostJoinedBlocks();
  return most > 0 && ShapeOfJoined(bank, most).blocks > 0;
}

}  // namespace

bool CanJoin(const JoinedLinear& joined, cudaStream_t stream) {
  if (!MayJoin(joined)) return false;
  return ClusterFits(joined) ||
         (joined.form != JoinedForm::kCluster && internal::JoinedStreamFits(joined, stream));
}

void LaunchJoinedLinear(const JoinedLinear& joined, cudaStream_t stream) {
  MOESERVE_CHECK(CanJoin(joined, stream), "CanJoin() allows a joined linear layer");
  if (!ClusterFits(joined)) return internal::LaunchJoinedStream(joined, stream);
  const LinearArgs& args = joined.linear;
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  const LinearBankEntry& entry = bank.entry(0);
  const JoinedShape shape = ShapeOfJoined(bank, MostJoinedBlocks());
  const auto bytes = [](const RowsView& v) {
    return v.stride * static_cast<int64_t>(SizeOf(v.dtype));
  };
  const JoinedParams p{.weights = bank.weights() + entry.weights,
                       .bias = bank.bias() == nullptr ? nullptr : bank.bias() + entry.bias,
                       .input = static_cast<const char*>(args.input.data),
                       .output = static_cast<char*>(args.output.data),
                       .input_stride = bytes(args.input),
                       .output_stride = bytes(args.output),
                       .rows = static_cast<int>(args.input.rows),
                       .in_features = entry.in_features,
                       .out_features = entry.out_features,
                       .k_blocks = entry.k_blocks,
                       .block_strips = shape.block_strips,
                       .activation = args.activation.kind,
                       .output_bf16 = args.output.dtype == DType::kBF16};
  const auto blocks = static_cast<unsigned>(shape.blocks);
  const LaunchShape launch{.grid = dim3(blocks),
                           .block = dim3(kJoinedThreads),
                           .shared_bytes = static_cast<size_t>(shape.shared_bytes),
                           .stream = stream,
                           .overlaps_predecessor = true,
                           .cluster = dim3(blocks)};
  if (joined.norm != nullptr) {
    Launch(JoinedLinearKernel<NormParams>, launch, p, NormParamsOf(*joined.norm), p.rows);
  } else {
    Launch(JoinedLinearKernel<CombineParams>, launch, p, CombineParamsOf(*joined.sum),
           static_cast<int>(joined.sum->output.rows));
  }
}

}  // namespace moeserve::cuda
