// Products with weights of type int4-k: the input rows are rounded to int8 (W4A8).
#pragma once

#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/quantized/linear_int8.h"

namespace moeserve::cuda {

// Computes the product documented at LinearArgs with device pointers; args.bank must be a
// CudaLinearBank of type int4-k, and args.input may be f32 or bf16. Rounds the input rows into
// `rows`, which must be large enough; the next product may use the same memory. Sums are exact, so
// all tiles compute the same bits; without an activation, f32 results have the bits of the CPU
// backend. `tile` is kAuto or kRows*.
void LaunchLinearInt4(const LinearArgs& args, LinearTile tile, const Int8Rows& rows,
                      cudaStream_t stream);

// Returns the tiles, all of which compute the product.
std::vector<LinearTile> Int4TilesThatFit();
// Returns the tile that kAuto stands for.
LinearTile DefaultInt4Tile(const LinearArgs& args);

}  // namespace moeserve::cuda
