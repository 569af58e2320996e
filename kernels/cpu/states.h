// The operations on states of sequences.
#pragma once

#include "kernels/backend.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/workers.h"

namespace moeserve::cpu {

// See the functions of Backend with the same names. States are CpuStates. Only the
// backend's thread calls these functions.
class StateOps {
 public:
  // All arguments must outlive this object. `step` has the inputs of the current step.
  StateOps(const KernelTable& table, Workers& workers, const StepInputs& step)
      : table_(table), workers_(workers), step_(step) {}

  void ShortConvolution(const ShortConvolutionArgs& args);
  void Recurrence(const RecurrenceArgs& args);

 private:
  const KernelTable& table_;
  Workers& workers_;
  const StepInputs& step_;
};

}  // namespace moeserve::cpu
