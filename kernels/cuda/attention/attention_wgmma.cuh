// Parts that the kernels for tiles of tokens by wgmma share (compute capability 9.0). A warpgroup
// computes 64 rows. Rows have the bits of the other kernels, because each element is the same
// sequence of products: tensor cores add the products of wgmma and of mma.sync in the same order
// (tests/cuda/attention_test.cc).
#pragma once

#include "kernels/cuda/attention/attention_tiled.cuh"
#include "kernels/cuda/device/wgmma.cuh"

namespace moeserve::cuda {

// Views a thread's accumulators of wgmma as the fragments of mma.sync: both have the same layout.
template <int kColumns>
__device__ __forceinline__ float (&AsFragments(float (&d)[kColumns]))[kColumns / 4][4] {
  return reinterpret_cast<float(&)[kColumns / 4][4]>(d);
}

// Descriptors of planes: the upper half, and the lower halves for queries or keys and for values,
// which are stored transposed.
inline constexpr uint32_t kPlanesHigh =
    (8 * kPlaneRowBytes >> 4) | static_cast<uint32_t>(Swizzle::k128Bytes) << 30;

__device__ __forceinline__ uint32_t RowsDescriptor(const void* planes) {
  return static_cast<uint32_t>(MatrixDescriptor(planes, Swizzle::k128Bytes, 0));
}
__device__ __forceinline__ uint32_t ValuesDescriptor(const void* planes) {
  return static_cast<uint32_t>(TransposedDescriptor(planes, kTileKeys * kPlaneRowBytes));
}
// Returns the descriptor of what is `bytes` behind the beginning of the planes.
__device__ __forceinline__ uint64_t PlanesDescriptor(uint32_t low, int bytes) {
  return JoinDescriptor(low + static_cast<uint32_t>(bytes / 16), kPlanesHigh);
}

// Starts the product of 64 queries and a tile of keys. The planes of the queries have kRows rows.
// Takes the RowsDescriptor() of both.
template <int kDim, int kRows>
__device__ __forceinline__ void StartScores(uint32_t queries, uint32_t keys,
                                            float (&scores)[kTileKeys / 2]) {
  WgmmaKeepInPlace(scores);
  WgmmaFence();
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    const int plane = d / 4;
    Wgmma<kTileKeys>::Shared(
        scores, PlanesDescriptor(queries, plane * kRows * kPlaneRowBytes + d % 4 * 32),
        PlanesDescriptor(keys, plane * kTileKeys * kPlaneRowBytes + d % 4 * 32), d > 0);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(scores);
}

// Waits for all products. Until then, nothing may access the registers that they use.
template <int kColumns>
__device__ __forceinline__ void FinishValues(uint32_t (&weights)[kTileSteps][4],
                                             float (&sums)[kColumns]) {
  WgmmaWait<0>();
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(weights);
}

// Starts the product of the weights of a tile and its values, of which it takes the
// ValuesDescriptor().
template <int kDim>
__device__ __forceinline__ void StartValues(uint32_t (&weights)[kTileSteps][4], uint32_t values,
                                            float (&sums)[kDim / 2]) {
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(weights);
  WgmmaFence();
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) {
    Wgmma<kDim>::RegistersTransposed(sums, weights[step],
                                     PlanesDescriptor(values, step * 16 * kPlaneRowBytes), true);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(sums);
}

// Keeps the compiler from moving the computation of the weights behind the wait that follows,
// during which the tensor cores would be idle: the branch depends on all of them. Sums of weights
// are not negative, so the highest bit is never set and the kernel does not stop.
__device__ __forceinline__ void ComputeBefore([[maybe_unused]] const RowState<kTileSteps>& state) {
#if !defined(MOESERVE_CUDA_EMULATION)
  uint32_t all = 0;
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) {
    all |= __float_as_uint(state.sum[step][0]) | __float_as_uint(state.sum[step][1]);
  }
  if (all == 0xffffffffu) __trap();
#endif
}

// Rounds the weights of a tile to the left operand of the second product. This must not happen
// while a product reads that operand.
__device__ __forceinline__ void PackTile(float (&scores)[kTileKeys / 2],
                                         uint32_t (&weights)[kTileSteps][4]) {
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) {
    PackWeights(AsFragments(scores), step, weights[step]);
  }
}

// Replaces the scores of the tile whose keys begin at `key` by weights and adds these to their
// sums. The warp's rows are those of `rows` from `row` on. Returns how the weighted values so far
// must be rescaled.
template <ScoreKind kKind = ScoreKind::kAny, int kRows>
__device__ __forceinline__ Rescaling Softmax(const AttentionLaunch& a, const ScoreFactor& score,
                                             const BlockRows<kRows>& rows, int row,
                                             const SeenByAll& seen, int key,
                                             float (&scores)[kTileKeys / 2],
                                             RowState<kTileSteps>* state) {
  auto& fragments = AsFragments(scores);
  float maximum[2] = {state->maximum[0], state->maximum[1]};
  MaskAndMaximum<kKind>(a, score.scale, rows, row, seen, key, fragments, maximum);
  const Rescaling rescaling = RaiseMaximum(maximum, score.factor, state);
  const float reference[2] = {Reference(maximum[0] * score.factor),
                              Reference(maximum[1] * score.factor)};
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) {
    Weigh(fragments, step, score.factor, reference, state->sum[step]);
  }
  return rescaling;
}

}  // namespace moeserve::cuda
