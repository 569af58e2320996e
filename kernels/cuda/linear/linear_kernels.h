// The kernels behind LaunchLinear().
#pragma once

#include <cstdint>

#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/linear/linear_params.h"

namespace moeserve::cuda::internal {

// Most tiles of `tile_rows` rows x `tile_image_rows` outputs that a routing of `rows` rows can
// have; the surplus exits at once.
inline int64_t MaxLinearTiles(const CudaLinearBank& bank, int64_t rows, int tile_rows,
                              int tile_image_rows) {
  // Sum over experts of ceil(r / tile_rows) * columns: one row tile for every expert that has rows,
  // and at most rows / tile_rows more.
  const int64_t experts = rows < bank.num_experts() ? rows : bank.num_experts();
  const int64_t per_block = tile_image_rows < kImageBlock ? kImageBlock / tile_image_rows : 1;
  // An odd last block takes a whole tile where tiles span two.
  const int64_t blocks_per_tile = tile_image_rows > kImageBlock ? tile_image_rows / kImageBlock : 1;
  const int64_t first =
      (bank.largest_row_blocks(experts) + experts * (blocks_per_tile - 1)) / blocks_per_tile;
  const int64_t widest = (bank.max_row_blocks() + blocks_per_tile - 1) / blocks_per_tile;
  const int64_t more =
      bank.num_experts() == 1 ? (rows + tile_rows - 1) / tile_rows - 1 : rows / tile_rows;
  return (first + more * widest) * per_block;
}

// bf16 rows and weights, any device.
void LaunchLinearMma(const CudaLinearBank& bank, const LinearParams& params, LinearTile tile,
                     cudaStream_t stream);

// bf16 rows and weights by wgmma: whether the current device and these rows can, and the launch.
bool LinearWgmmaFits(const LinearParams& params);
void LaunchLinearWgmma(const CudaLinearBank& bank, const LinearParams& params, LinearTile tile,
                       cudaStream_t stream);

// f32 rows by bf16 weights, on the tensor cores.
void LaunchLinearSplitMma(const CudaLinearBank& bank, const LinearParams& params,
                          cudaStream_t stream);

// f32 rows, weights of any type.
void LaunchLinearF32(const CudaLinearBank& bank, const LinearParams& params, cudaStream_t stream);

}  // namespace moeserve::cuda::internal
