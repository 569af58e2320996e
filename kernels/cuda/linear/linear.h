// Dense and grouped linear layers on the device.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// Computes the product documented at LinearArgs (kernels/backend.h) with device pointers; args.bank
// must be a CudaLinearBank without integer weights (linear_int8.h), MXFP4 or FP8. With a plan, the
// number of assignments is read from plan->expert_offsets on the device and may be anything up to
// plan->capacity; `output` (and `input` without gather) must have plan->capacity rows.
//
// bf16 rows need bf16 weights and are multiplied on the tensor cores. f32 rows accept weights of
// any type: with f32 and f16 weights, one fused multiply-add per input adds the products in
// ascending order; with bf16 weights, the tensor cores multiply the rows without rounding them. A
// row's result depends on the row and its matrix alone, because tiles of all shapes sum in the same
// order.
void LaunchLinear(const LinearArgs& args, cudaStream_t stream);

// The kernel that multiplies bf16 rows; tests and measurements select one explicitly. kAuto lets
// LaunchLinear() choose. kRows*: mma.sync with tiles of that many rows. kStream*: mma.sync with a
// stream of weights, with tiles of so many rows x packed outputs. kWarpgroup128, kWarpgroup192 and
// kWarpgroup256: wgmma with tiles of 128 rows by that many outputs. kWarpgroup192x192: the same
// with 192 rows, for the common epilogues (linear_params.h), otherwise kWarpgroup192. kWarpgroup:
// wgmma with the number of outputs chosen by layer, and 128 rows. kStationary: wgmma with weights
// that stay in shared memory, for at most 512 inputs and the common epilogues, otherwise
// kWarpgroup. kWarpgroup256Pair and kWarpgroup192x192Pair: the tiles of two blocks share their
// weights, for the common epilogues, otherwise the same tiles without pairs. kRows128 is used
// instead of wgmma if the device or the alignment of the rows does not permit wgmma, and kRows8 or
// kRows32 likewise instead of kStream*. Sums with slices (linear_bank.h) use kRows64 instead of
// kRows128, kWarpgroup128 instead of wider tiles, and kRows64 instead of kWarpgroup* with an
// activation.
enum class LinearTile : uint8_t {
  kAuto,
  kRows8,
  kRows16,
  kRows32,
  kRows64,
  kRows128,
  kStream8x16,
  kStream8x64,
  kStream32x16,
  kStream32x64,
  kWarpgroup,
  kWarpgroup128,
  kWarpgroup192,
  kWarpgroup256,
  kWarpgroup192x192,
  kStationary,
  kWarpgroup256Pair,
  kWarpgroup192x192Pair
};
// How the blocks of a wgmma kernel share more tiles than there are multiprocessors. kFixed: block b
// takes every n-th tile from the b-th one on. kDynamic: a block takes the first tile that is left;
// kFixed is used instead if too many streams use the bank (tile_counters.h). kAuto is kDynamic.
// kStationary has an order of its own. Results do not depend on the order.
enum class TileOrder : uint8_t { kAuto, kFixed, kDynamic };
void LaunchLinear(const LinearArgs& args, LinearTile tile, cudaStream_t stream,
                  TileOrder order = TileOrder::kAuto);

// The names of the tiles, in the order of LinearTile.
inline constexpr std::string_view kLinearTileNames[] = {"auto",
                                                        "rows8",
                                                        "rows16",
                                                        "rows32",
                                                        "rows64",
                                                        "rows128",
                                                        "stream8x16",
                                                        "stream8x64",
                                                        "stream32x16",
                                                        "stream32x64",
                                                        "warpgroup",
                                                        "warpgroup128",
                                                        "warpgroup192",
                                                        "warpgroup256",
                                                        "warpgroup192x192",
                                                        "stationary",
                                                        "warpgroup256pair",
                                                        "warpgroup192x192pair"};

// Returns the tiles that compute the product on the current device with the same bits, or none if
// it is not one of bf16 rows and bf16 weights, or if its rows are not 16-byte aligned. Weights of
// type int8-channel have functions of their own (quantized/linear_int8.h).
std::vector<LinearTile> LinearTilesThatFit(const LinearArgs& args);
// Returns the tile that kAuto stands for.
LinearTile DefaultLinearTile(const LinearArgs& args);
// Returns about how many rows the product has; the number of assignments if there is a plan.
int64_t ExpectedRows(const LinearArgs& args);

}  // namespace moeserve::cuda
