// The kernels that LaunchLinearInt8() selects from, and their parameters.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/linear/linear_params.h"

namespace moeserve::cuda {

struct LinearInt8Params {
  LinearParams linear;         // `input` are the rounded rows, unless the kernel rounds them
  const float* output_scales;  // of the packed rows, each at the offset of its bias
  const float* row_scales;     // of the rounded rows
  int64_t scale_segment;       // rounded rows from the segment of an expert to that of the next
};

// Returns a sum of products of integers times the scales of its output and its row, with the bits
// of the CPU.
__device__ inline float ScaledSum(int32_t sum, float output_scale, float row_scale) {
  return __fmaf_rn(__int2float_rn(sum), __fmul_rn(output_scale, row_scale), 0.0f);
}

namespace internal {

// Products of many rounded rows per expert, by wgmma. `tile` is kWarpgroup128, kWarpgroup192,
// kWarpgroup256 or kWarpgroup192x192; the first is used instead of the others with rare
// activations. Int8WgmmaFits() returns whether the current device and the activation permit it.
bool Int8WgmmaFits(const LinearParams& params);
void LaunchInt8Wgmma(const CudaLinearBank& bank, const LinearInt8Params& params, LinearTile tile,
                     TileOrder order, cudaStream_t stream);

// Products of few rows per expert by a tile kStream*. Those of 8 rows round the rows themselves:
// `params.linear.input` are the rows as they are. kStream32x64 takes rounded rows. Int8StreamFits()
// returns whether the current device and the memory that a tile takes permit it.
struct Int8StreamRows {
  int most;   // about the largest number of rows of an expert; a tile has no more
  bool bf16;  // the type of rows that are not rounded yet; else f32
};
bool Int8StreamFits(const CudaLinearBank& bank, const LinearParams& params, LinearTile tile,
                    const Int8StreamRows& rows);
void LaunchInt8Stream(const CudaLinearBank& bank, const LinearInt8Params& params, LinearTile tile,
                      const Int8StreamRows& rows, cudaStream_t stream);

}  // namespace internal
}  // namespace moeserve::cuda
