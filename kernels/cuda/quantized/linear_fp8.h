// Products with weights of FP8: 8-bit floats with an f32 scale for 128 inputs of an output.
#pragma once

#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear.h"

namespace moeserve::cuda {

// Computes the product documented at LinearArgs with device pointers; args.bank must be a
// CudaLinearBank with LinearBankShape::fp8, which states the order of the sums, and args.input must
// be bf16. The weights are widened to bf16 in registers, without their scales, which is exact; the
// products of 128 inputs are a chain of products of the tensor cores in ascending order, as in
// LaunchLinear(). All tiles compute the same bits, whatever the other rows. `tile` is kAuto,
// kRows*, kStream* or kWarpgroup (wgmma with tiles of 128 rows x 128 packed outputs), for which
// linear.h has the substitutes. kAuto does not choose kWarpgroup, which has not run on a GPU.
void LaunchLinearFp8(const LinearArgs& args, LinearTile tile, cudaStream_t stream);

// Returns the tiles that compute the product on the current device, kWarpgroup included, or none if
// the bank is not one of FP8 or the rows are not 16-byte aligned bf16.
std::vector<LinearTile> Fp8TilesThatFit(const LinearArgs& args);
// Returns the tile that kAuto stands for.
LinearTile DefaultFp8Tile(const LinearArgs& args);

}  // namespace moeserve::cuda
