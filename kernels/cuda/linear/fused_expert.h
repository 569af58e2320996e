// Narrow experts (the sub-tokens of a multi-head layer) in one kernel: first matrix, activation,
// second matrix. The hidden units of a row never leave the multiprocessor.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// results[a] = act(input[source_row(a)] * W_up^T + b_up) * W_down^T + b_down for every assignment
// a, with a gated up bank (act(gate) * up). The hidden units are rounded to bf16 in between, and
// both sums run in the order of LaunchLinear(): the results have the bits of the pair of products.
struct FusedExpertArgs {
  const LinearBank* up = nullptr;
  const LinearBank* down = nullptr;
  const RoutingPlan* plan = nullptr;  // null: one expert, every row of `input`
  bool gather = false;                // as in LinearArgs
  RowsView input;                     // bf16
  RowsView output;                    // f32 or bf16, [A, out_features of down]
  ActivationKind activation = ActivationKind::kNone;
};

// Whether the kernel exists for these banks: bf16, every expert from at most 256 inputs to as many
// outputs, `down` not gated and as wide as `up`, and enough shared memory in a block of the current
// device. Any number of hidden units.
bool FusedExpertFits(const LinearBank& up, const LinearBank& down);

// Whether it is expected to be faster than two products for `rows` assignments: where the traffic
// of the hidden units exceeds that of the weights and there are rows for every multiprocessor.
bool FusedExpertPays(const LinearBank& up, const LinearBank& down, int64_t rows);

// FusedExpertFits() must hold.
void LaunchFusedExpert(const FusedExpertArgs& args, cudaStream_t stream);

}  // namespace moeserve::cuda
