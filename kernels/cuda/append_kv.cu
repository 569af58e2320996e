#include "kernels/base/check.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnit = 4;  // elements that one thread moves at a time

// One token per thread block. Padding columns are written too: blocks may hold anything before.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads)
    AppendKernel(const AppendKvLaunch a, const bool vectors) {
  const int token = blockIdx.x;
  const int sequence = a.step.sequence[token];
  if (sequence < 0) return;
  const int position = a.step.position[token];
  const int dim = a.cache.head_dim, padded = a.cache.padded_dim;
  const int64_t block =
      a.step.block_tables[int64_t{sequence} * a.step.table_stride + position / kKvBlockTokens];
  const int64_t base = block * a.cache.block_stride + int64_t{position % kKvBlockTokens} * padded;
  const int units = padded / kUnit;
  for (int n = threadIdx.x; n < 2 * a.cache.num_kv_heads * units; n += kThreads) {
    const bool values = n >= a.cache.num_kv_heads * units;
    const int m = values ? n - a.cache.num_kv_heads * units : n;
    const int head = m / units, d = m % units * kUnit;
    const float* from =
        (values ? a.values + token * a.value_stride : a.keys + token * a.key_stride) + head * dim +
        d;
    float4 f = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (vectors) {
      if (d < dim) f = *reinterpret_cast<const float4*>(from);
    } else {
      if (d < dim) f.x = from[0];
      if (d + 1 < dim) f.y = from[1];
      if (d + 2 < dim) f.z = from[2];
      if (d + 3 < dim) f.w = from[3];
    }
    void* cache = values ? a.cache.values : a.cache.keys;
    const int64_t at = base + head * a.cache.head_stride + d;
    if constexpr (kBf16) {
      *reinterpret_cast<uint2*>(static_cast<Bf16*>(cache) + at) =
          make_uint2(PackBf16(f.x, f.y), PackBf16(f.z, f.w));
    } else {
      *reinterpret_cast<float4*>(static_cast<float*>(cache) + at) = f;
    }
  }
}

bool Aligned(const float* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 4 == 0;
}

}  // namespace

void LaunchAppendKv(const AppendKvLaunch& args, cudaStream_t stream) {
  const bool vectors = args.cache.head_dim % 4 == 0 && Aligned(args.keys, args.key_stride) &&
                       Aligned(args.values, args.value_stride);
  const bool bf16 = args.cache.dtype == DType::kBF16;
  MOESERVE_CHECK(bf16 || args.cache.dtype == DType::kF32, "cache type");
  Launch(bf16 ? AppendKernel<true> : AppendKernel<false>,
         {.grid = dim3(args.step.tokens), .block = dim3(kThreads), .stream = stream}, args,
         vectors);
}

}  // namespace moeserve::cuda
