// Computes narrow experts (those of the sub-tokens of a multi-head MoE layer) in one kernel: first
// matrix, activation, second matrix. The hidden units of a row stay on the multiprocessor.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// Computes results[a] = act(input[source_row(a)] * W_up^T + b_up) * W_down^T + b_down for every
// assignment a; with a gated up bank, act(gate) * up instead of act(up). The hidden units are
// rounded to bf16, and both sums have the order of LaunchLinear(), so the results are bit-identical
// to those of two LaunchLinear() calls.
struct FusedExpertArgs {
  const LinearBank* up = nullptr;
  const LinearBank* down = nullptr;
  const RoutingPlan* plan = nullptr;  // null: every row of `input` uses the only expert
  bool gather = false;                // source_row(a) is plan->row_of_assignment[a] if true, else a
  RowsView input;                     // bf16
  RowsView output;                    // f32 or bf16, [A, out_features of down]
  Activation activation = {};
};

// Returns whether the kernel supports these banks: both have bf16 weights; every expert has at most
// 256 inputs and as many outputs as inputs; `down` is not gated; and a block of the current device
// has enough shared memory. The number of hidden units is not limited.
bool FusedExpertFits(const LinearBank& up, const LinearBank& down);

// Returns whether the kernel is expected to be faster than two products for `rows` assignments.
bool FusedExpertPays(const LinearBank& up, const LinearBank& down, int64_t rows);

// Requires FusedExpertFits().
void LaunchFusedExpert(const FusedExpertArgs& args, cudaStream_t stream);

}  // namespace moeserve::cuda
