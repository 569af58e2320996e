// Rounds input rows to int8 for products with int8 weights.

#include <algorithm>

#include "base/check.h"
#include "kernels/base/int8_rows.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_image.h"
#include "kernels/cuda/quantized/linear_int8.h"
#include "kernels/cuda/quantized/round_rows.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
// Rows of more inputs are rounded by a whole block, others by a warp.
constexpr int kInputsOfWarp = 1024;
constexpr int kPiece = kRoundedPiece;

struct RoundRowsParams {
  const char* input;
  int64_t stride;   // bytes
  int64_t segment;  // bytes from the segment of an expert to that of the next
  bool wide;        // every row starts at a multiple of 16 bytes
  int rows;         // of each segment
  int segments;
  const LinearBankEntry* entries;
  const int32_t* expert_of_row;  // null: the number of the segment
  const int32_t* valid_rows;     // rows beyond that many are not read; null: all are
  int8_t* values;
  int64_t row_bytes;
  float* scales;
};

// Returns the largest of the threads' values, to all threads of the row.
template <int kThreadsPerRow>
__device__ inline uint32_t LargestOfRow(uint32_t own) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    own = max(own, __shfl_xor_sync(kFullMask, own, step));
  }
  if constexpr (kThreadsPerRow > 32) {
    uint32_t* const of_warps = DynamicShared<uint32_t>();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread % 32 == 0) of_warps[thread / 32] = own;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreadsPerRow / 32; ++i) own = max(own, of_warps[i]);
  }
  return own;
}

// Row `index` of the rounded rows.
struct RowToRound {
  const char* row = nullptr;  // null if it is not rounded
  int inputs = 0, k_blocks = 0;

  __device__ RowToRound(const RoundRowsParams& p, int index) {
    if (index >= p.rows * p.segments) return;
    if (p.valid_rows != nullptr && index >= *p.valid_rows) return;
    const int segment = p.segments == 1 ? 0 : index / p.rows;
    const LinearBankEntry& m =
        p.entries[p.expert_of_row == nullptr ? segment : p.expert_of_row[index]];
    inputs = m.in_features;
    k_blocks = m.k_blocks;
    row = p.input + static_cast<int64_t>(index - segment * p.rows) * p.stride + segment * p.segment;
  }
};

// Stores the parts of the sum of 32 integers, of which each of four adjacent lanes has 8, packed in
// two words. `to` is the block of sums of `first`, the lane's first input.
__device__ inline void StoreSum(const uint32_t (&integers)[2], int first, int8_t* to) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    sum += static_cast<int8_t>(integers[i / 4] >> (i % 4 * 8) & 0xffu);
  }
  sum += __shfl_xor_sync(kFullMask, sum, 1);
  sum += __shfl_xor_sync(kFullMask, sum, 2);
  // At most 32 * 127 in magnitude, so both summands of the high part fit in a byte.
  const int high = sum >> 4, half = high >> 1;
  const int plane = static_cast<int>(threadIdx.x) % 4;
  const int part = plane == 0 ? half : plane == 1 ? high - half : plane == 2 ? sum & 15 : 0;
  to[plane * 32 + first / 32 % 32] = static_cast<int8_t>(part);
}

// The second reading of a row finds it in the first-level cache. kSums: the row has sums, for
// int4-k.
template <bool kBf16, int kThreadsPerRow, bool kSums>
__global__ void __launch_bounds__(kThreads) RoundRowsKernel(const RoundRowsParams p) {
  GridDependencyPass();
  constexpr int kRows = kThreads / kThreadsPerRow;
  const int thread = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const int index =
      static_cast<int>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x) / kThreadsPerRow;
  const RowToRound from(p, index);
  if (from.row == nullptr) return;
  const char* const row = from.row;
  const int inputs = from.inputs, k_blocks = from.k_blocks;

  uint32_t largest = 0;
  for (int first = thread * kPiece; first < inputs; first += kThreadsPerRow * kPiece) {
    float values[kPiece];
    ReadPiece<kBf16>(row, first, inputs, p.wide, values);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) largest = max(largest, MagnitudeBits(values[i]));
  }
  const Int8Scale scale = Int8ScaleOf(LargestOfRow<kThreadsPerRow>(largest));
  if (thread == 0) p.scales[index] = scale.scale;

  const int padded = k_blocks * kInt8BlockInputs;
  const int sum_blocks = kSums ? Int4MinimaBlocks(k_blocks) : 0;
  int8_t* const sums = p.values + index * p.row_bytes;
  int8_t* const to = sums + sum_blocks * kInt8BlockInputs;
  // A warp has whole blocks of sums, or none.
  const int end = kSums ? sum_blocks * kInt4MinimaInputs : padded;
  for (int first = thread * kPiece; first < end; first += kThreadsPerRow * kPiece) {
    float values[kPiece];
    ReadPiece<kBf16>(row, first, inputs, p.wide, values);
    const uint2 piece = RoundPiece(values, scale);
    if (!kSums || first < padded) *reinterpret_cast<uint2*>(to + first) = piece;
    if constexpr (kSums) {
      const uint32_t integers[2] = {piece.x, piece.y};
      StoreSum(integers, first, sums + first / kInt4MinimaInputs * kInt8BlockInputs);
    }
  }
}

// Rounds groups of kGroup inputs, each with its own scale.
template <bool kBf16, int kThreadsPerRow, int kGroup>
__global__ void __launch_bounds__(kThreads) RoundGroupsKernel(const RoundRowsParams p) {
  GridDependencyPass();
  constexpr int kRows = kThreads / kThreadsPerRow;
  const int thread = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const int index =
      static_cast<int>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x) / kThreadsPerRow;
  const RowToRound from(p, index);
  if (from.row == nullptr) return;
  char* const to = reinterpret_cast<char*>(p.values) + index * p.row_bytes;
  const int padded = from.k_blocks * kInt8BlockInputs;
  // All lanes of a warp take part in the exchange, also those behind the row's end.
  for (int piece = thread; piece - thread % 32 < padded / kPiece; piece += kThreadsPerRow) {
    const int first = piece * kPiece;
    float values[kPiece];
    ReadPiece<kBf16>(from.row, first, from.inputs, p.wide, values);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) largest = max(largest, MagnitudeBits(values[i]));
#pragma unroll
    for (int step = kGroup / kPiece / 2; step > 0; step /= 2) {
      largest = max(largest, __shfl_xor_sync(kFullMask, largest, step));
    }
    if (first >= padded) continue;
    const Int8Scale scale = Int8ScaleOf(largest);
    char* const block = to + first / kInt8BlockInputs * kGroupedRowBytes;
    const int in_block = first % kInt8BlockInputs;
    *reinterpret_cast<uint2*>(block + in_block) = RoundPiece(values, scale);
    if (in_block % kGroup == 0) {
      reinterpret_cast<float*>(block + kInt8BlockInputs)[in_block / kGroup] = scale.scale;
    }
  }
}

template <bool kBf16>
void LaunchGroupsKernel(bool int4, bool by_warps, const LaunchShape& shape,
                        const RoundRowsParams& params) {
  if (int4) {
    by_warps ? Launch(RoundGroupsKernel<kBf16, 32, 32>, shape, params)
             : Launch(RoundGroupsKernel<kBf16, kThreads, 32>, shape, params);
  } else {
    by_warps ? Launch(RoundGroupsKernel<kBf16, 32, 64>, shape, params)
             : Launch(RoundGroupsKernel<kBf16, kThreads, 64>, shape, params);
  }
}

template <bool kBf16, bool kSums>
void LaunchKernel(bool by_warps, const LaunchShape& shape, const RoundRowsParams& params) {
  by_warps ? Launch(RoundRowsKernel<kBf16, 32, kSums>, shape, params)
           : Launch(RoundRowsKernel<kBf16, kThreads, kSums>, shape, params);
}

int SegmentsOf(const LinearArgs& args) { return args.segments ? args.bank->num_experts() : 1; }

// Returns the number of rows of each segment that are rounded.
int64_t RowsOf(const LinearArgs& args) {
  const bool of_assignments = args.plan != nullptr && !args.gather;
  return of_assignments ? args.plan->capacity : args.input.rows;
}

const CudaLinearBank& BankOf(const LinearArgs& args) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  MOESERVE_CHECK(bank.has_integers(), "a bank of integers");
  return bank;
}

}  // namespace

int64_t Int8RowBytes(const LinearArgs& args) {
  const CudaLinearBank& bank = BankOf(args);
  const int k_blocks = bank.max_k_blocks();
  if (bank.is_grouped()) return int64_t{k_blocks} * kGroupedRowBytes;
  return int64_t{k_blocks + (bank.is_int4() ? Int4MinimaBlocks(k_blocks) : 0)} * kInt8BlockInputs;
}

bool Int8Rows::MustGrow(const LinearArgs& args) const {
  const int64_t rows = RowsOf(args) * SegmentsOf(args);
  return static_cast<size_t>(rows * Int8RowBytes(args)) > values_.bytes() ||
         static_cast<size_t>(rows) * sizeof(float) > scales_.bytes();
}

absl::Status Int8Rows::Reserve(const LinearArgs& args) {
  const int64_t rows = RowsOf(args) * SegmentsOf(args);
  const size_t values = std::max(values_.bytes(), static_cast<size_t>(rows * Int8RowBytes(args)));
  const size_t scales = std::max(scales_.bytes(), static_cast<size_t>(rows) * sizeof(float));
  if (values > values_.bytes()) {
    values_ = {};
    MOESERVE_ASSIGN_OR_RETURN(values_, DeviceMemory::Allocate(values));
  }
  if (scales > scales_.bytes()) {
    scales_ = {};
    MOESERVE_ASSIGN_OR_RETURN(scales_, DeviceMemory::Allocate(scales));
  }
  return absl::OkStatus();
}

void LaunchRoundRows(const LinearArgs& args, const Int8Rows& rows, cudaStream_t stream) {
  const CudaLinearBank& bank = BankOf(args);
  MOESERVE_CHECK(!rows.MustGrow(args), "memory of rounded rows");
  const bool of_assignments = args.plan != nullptr && !args.gather;
  const int segments = SegmentsOf(args);
  const int64_t bytes = static_cast<int64_t>(SizeOf(args.input.dtype));
  const int64_t segment = args.segments ? args.input.cols / segments * bytes : 0;
  const auto starts = reinterpret_cast<uintptr_t>(args.input.data) |
                      static_cast<uintptr_t>(args.input.stride * bytes) |
                      static_cast<uintptr_t>(segment);
  for (int e = 0; args.gather && e < bank.num_experts(); ++e) {
    MOESERVE_CHECK(bank.entry(e).in_features == bank.entry(0).in_features,
                   "gathered rows of one width");
  }
  const RoundRowsParams params{
      .input = static_cast<const char*>(args.input.data),
      .stride = args.input.stride * bytes,
      .segment = segment,
      .wide = starts % 16 == 0,
      .rows = static_cast<int>(RowsOf(args)),
      .segments = segments,
      .entries = bank.entries(),
      .expert_of_row = of_assignments ? args.plan->expert_of_assignment : nullptr,
      .valid_rows = of_assignments ? args.plan->expert_offsets + args.plan->num_experts : nullptr,
      .values = rows.values(),
      .row_bytes = Int8RowBytes(args),
      .scales = rows.scales()};
  const bool by_warps = bank.max_k_blocks() * kInt8BlockInputs <= kInputsOfWarp;
  const int per_block = by_warps ? kThreads / 32 : 1;
  const int64_t all = RowsOf(args) * segments;
  MOESERVE_CHECK(all <= INT32_MAX, "rows of a linear layer");
  const LaunchShape shape{dim3(static_cast<unsigned>((all + per_block - 1) / per_block)),
                          dim3(kThreads), by_warps ? 0 : kThreads / 32 * sizeof(uint32_t), stream,
                          true};
  const bool bf16 = args.input.dtype == DType::kBF16;
  if (bank.is_grouped()) {
    const bool int4 = bank.shape().quantization == Quantization::kInt4;
    bf16 ? LaunchGroupsKernel<true>(int4, by_warps, shape, params)
         : LaunchGroupsKernel<false>(int4, by_warps, shape, params);
  } else if (bank.is_int4()) {
    bf16 ? LaunchKernel<true, true>(by_warps, shape, params)
         : LaunchKernel<false, true>(by_warps, shape, params);
  } else {
    bf16 ? LaunchKernel<true, false>(by_warps, shape, params)
         : LaunchKernel<false, false>(by_warps, shape, params);
  }
}

}  // namespace moeserve::cuda
