// Products with weights of types int8 and int4: the input rows are rounded to int8, and groups of
// inputs have scales of their own.
#pragma once

#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/quantized/linear_int8.h"

namespace moeserve::cuda {

// Computes the product documented at LinearArgs with device pointers; args.bank must be a
// CudaLinearBank of type int8 or int4, and args.input may be f32 or bf16. Rounds the input rows
// into `rows`, which must be large enough; the next product may use the same memory. The groups of
// a sum are added in ascending order, so all tiles compute the same bits; without an activation,
// f32 results have the bits of the CPU backend. `tile` is kAuto or kRows*.
void LaunchLinearGrouped(const LinearArgs& args, LinearTile tile, const Int8Rows& rows,
                         cudaStream_t stream);

// Returns the tiles, all of which compute the product.
std::vector<LinearTile> GroupedTilesThatFit();
// Returns the tile that kAuto stands for.
LinearTile DefaultGroupedTile(const LinearArgs& args);

}  // namespace moeserve::cuda
