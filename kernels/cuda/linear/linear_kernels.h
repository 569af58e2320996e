// The kernels that LaunchLinear() selects from.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/linear/linear_params.h"

namespace moeserve::cuda::internal {

// Returns the largest number of tiles of `tile_rows` rows x `tile_image_rows` packed rows that a
// routing plan with `rows` assignments can need, or a product in segments with `rows` rows of all
// experts together (LinearArgs::segments). Blocks of the grid without a tile exit
// immediately.
inline int64_t MaxLinearTiles(const CudaLinearBank& bank, int64_t rows, int tile_rows,
                              int tile_image_rows) {
  // The number of tiles is the sum over experts of ceil(rows of the expert / tile_rows) * column
  // tiles. Every expert that has rows needs at least one row tile; all experts together need at
  // most rows / tile_rows further row tiles.
  const int64_t experts = rows < bank.num_experts() ? rows : bank.num_experts();
  const int64_t per_block = tile_image_rows < kImageBlock ? kImageBlock / tile_image_rows : 1;
  // If a tile spans two blocks, an odd last block takes a whole tile.
  const int64_t blocks_per_tile = tile_image_rows > kImageBlock ? tile_image_rows / kImageBlock : 1;
  const int64_t first =
      (bank.largest_row_blocks(experts) + experts * (blocks_per_tile - 1)) / blocks_per_tile;
  const int64_t widest = (bank.max_row_blocks() + blocks_per_tile - 1) / blocks_per_tile;
  const int64_t more =
      bank.num_experts() == 1 ? (rows + tile_rows - 1) / tile_rows - 1 : rows / tile_rows;
  return (first + more * widest) * per_block;
}

// Products of bf16 rows with bf16 weights, on any device.
void LaunchLinearMma(const CudaLinearBank& bank, const LinearParams& params, LinearTile tile,
                     cudaStream_t stream);

// Products of few bf16 rows per expert with bf16, MXFP4 or FP8 weights, by a tile kStream*.
// LinearStreamFits() returns whether the current device and these rows permit it.
bool LinearStreamFits(const CudaLinearBank& bank, const LinearParams& params);
void LaunchLinearStream(const CudaLinearBank& bank, const LinearParams& params, LinearTile tile,
                        cudaStream_t stream);

// Products of bf16 rows with bf16 weights by wgmma. LinearWgmmaFits() returns whether the current
// device and these rows permit it.
bool LinearWgmmaFits(const LinearParams& params);
// Returns whether they also permit paired tiles, which have no slices and no general epilogue.
bool LinearPairsFit(const CudaLinearBank& bank, const LinearParams& params);
void LaunchLinearWgmma(const CudaLinearBank& bank, const LinearParams& params, LinearTile tile,
                       TileOrder order, cudaStream_t stream);

// Products of short bf16 rows with bf16 weights that stay in shared memory. LinearStationaryFits()
// returns whether the current device, these rows, the bank (at most 512 inputs) and the epilogue
// (any but the general one) permit it.
bool LinearStationaryFits(const CudaLinearBank& bank, const LinearParams& params);
void LaunchLinearStationary(const CudaLinearBank& bank, const LinearParams& params,
                            cudaStream_t stream);

// Products of f32 rows with bf16 weights, on the tensor cores.
void LaunchLinearSplitMma(const CudaLinearBank& bank, const LinearParams& params,
                          cudaStream_t stream);

// Products of f32 rows with weights of any type.
void LaunchLinearF32(const CudaLinearBank& bank, const LinearParams& params, cudaStream_t stream);

}  // namespace moeserve::cuda::internal
