// Products with weights of MXFP4: 4-bit floats with a common power of two for 32 inputs.
#pragma once

#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear.h"

namespace moeserve::cuda {

// Computes the product documented at LinearArgs with device pointers; args.bank must be a
// CudaLinearBank with LinearBankShape::mxfp4, and args.input must be bf16. The weights are widened
// to bf16 in registers, and the results have the bits of LaunchLinear() with a bank of these
// weights in bf16, whatever the tile. `tile` is kAuto, kRows*, kStream* or kWarpgroup (wgmma
// with tiles of 128 rows x 256 packed outputs), for which linear.h has the substitutes. kAuto does
// not choose kWarpgroup, which has not run on a GPU.
void LaunchLinearMxfp4(const LinearArgs& args, LinearTile tile, cudaStream_t stream);

// Returns the tiles that compute the product on the current device, kWarpgroup included, or none if
// the bank is not one of MXFP4 or the rows are not 16-byte aligned bf16.
std::vector<LinearTile> Mxfp4TilesThatFit(const LinearArgs& args);
// Returns the tile that kAuto stands for.
LinearTile DefaultMxfp4Tile(const LinearArgs& args);

}  // namespace moeserve::cuda
