// Norms of rows, also together with the sum of a residual branch, and weighted sums of experts'
// results.
#include "base/check.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/rows/norm_row.cuh"
#include "kernels/cuda/rows/row_access.cuh"
#include "kernels/cuda/rows/rows.h"

namespace moeserve::cuda {
namespace {

constexpr int kNormWarps = 4;  // warps per block if each warp normalises one vector

// With kBlock, a block normalises one vector; otherwise each of its warps normalises one.
template <bool kBlock, bool kSum>
__global__ void __launch_bounds__(kBlock ? kNormBlock : kNormWarps * 32)
    NormKernel(const NormParams p) {
  GridDependencyPass();
  constexpr int kTeam = kBlock ? kNormBlock : 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kTeam) +
                       static_cast<int>(threadIdx.x) / kTeam;
  if (item >= static_cast<int64_t>(p.rows) * p.segments) return;
  const int64_t row = item / p.segments;
  if (p.valid_rows != nullptr && row >= *p.valid_rows) return;
  NormVectorOf<kBlock, kSum>(p, item, static_cast<int>(threadIdx.x) % kTeam,
                             DynamicShared<float>());
}

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

}  // namespace

void LaunchNorm(const NormLaunch& args, cudaStream_t stream) {
  const NormParams p = NormParamsOf(args);
  const int64_t vectors = args.input.rows * p.segments;
  if (vectors == 0) return;
  const bool sums = args.sum != nullptr;
  if (NormTeam(p.width) == kNormBlock) {
    Launch(sums ? NormKernel<true, true> : NormKernel<true, false>,
           LaunchShape{dim3(static_cast<unsigned>(vectors)), dim3(kNormBlock),
                       kNormSharedFloats * sizeof(float), stream, true},
           p);
  } else {
    const unsigned blocks = static_cast<unsigned>((vectors + kNormWarps - 1) / kNormWarps);
    Launch(sums ? NormKernel<false, true> : NormKernel<false, false>,
           LaunchShape{dim3(blocks), dim3(kNormWarps * 32), 0, stream, true}, p);
  }
}

void LaunchCombine(const CombineArgs& args, cudaStream_t stream) {
  const bool vectors = TakesVectors(args.output) && TakesVectors(args.results) &&
                       (args.residual == nullptr || TakesVectors(*args.residual));
  MOESERVE_LAUNCH_ROWS(CombineKernel, vectors, args.output, stream, CombineParamsOf(args));
}

}  // namespace moeserve::cuda
