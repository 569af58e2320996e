// Computes narrow experts (those of the sub-tokens of a multi-head MoE layer) in one kernel: first
// matrix, activation, second matrix. The hidden units of a row stay on the multiprocessor.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// Computes results[a] = act(input[source_row(a)] * W_up^T + b_up) * W_down^T + b_down for every
// assignment a; with a gated up bank, act(gate) * up instead of act(up). The input rows are bf16.
// The hidden units are rounded to bf16, and both sums have the order of LaunchLinear(), so the
// results are bit-identical to those of two LaunchLinear() calls.
using FusedExpertArgs = FeedForwardArgs;

// Returns whether the kernels support these banks: both have bf16 weights; every expert has at most
// 256 inputs and as many outputs as inputs; `down` is not gated; and a block of the current device
// has enough shared memory. The number of hidden units is not limited.
bool FusedExpertFits(const LinearBank& up, const LinearBank& down);

// The kernel that computes the experts; all of them have the same bits. kAuto lets
// LaunchFusedExpert() choose. kMma: mma.sync with tiles of 16 or 64 rows, for all settings.
// kWarpgroup: wgmma with tiles of 128 rows, for the common activations; kMma is used instead if the
// device, the settings or the alignment of the rows do not permit it.
enum class FusedTile : uint8_t { kAuto, kMma, kWarpgroup };

// The names of the tiles, in the order of FusedTile.
inline constexpr std::string_view kFusedTileNames[] = {"auto", "mma", "warpgroup"};

// Require FusedExpertFits().
void LaunchFusedExpert(const FusedExpertArgs& args, cudaStream_t stream);
void LaunchFusedExpert(const FusedExpertArgs& args, FusedTile tile, cudaStream_t stream);
// Returns the kernels that compute the experts on the current device.
std::vector<FusedTile> FusedTilesThatFit(const FusedExpertArgs& args);
// Returns the kernel that is expected to be faster than two products, or nothing if two products
// are.
std::optional<FusedTile> FusedTileThatPays(const FusedExpertArgs& args);

}  // namespace moeserve::cuda
