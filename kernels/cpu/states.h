// States of sequences, and the operations on them.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/workers.h"

namespace moeserve::cpu {

Result<std::unique_ptr<StateStorage>> NewCpuStates(std::vector<StateShape> shapes, int num_slots,
                                                   int pending_rows);

// See the functions of Backend with the same names. States are those of NewCpuStates(). Only the
// backend's thread calls these functions.
class StateOps {
 public:
  // All arguments must outlive this object. `step` has the inputs of the current step.
  StateOps(const KernelTable& table, Workers& workers, const StepInputs& step)
      : table_(table), workers_(workers), step_(step) {}

  void ShortConvolution(const ShortConvolutionArgs& args);

 private:
  const KernelTable& table_;
  Workers& workers_;
  const StepInputs& step_;
};

}  // namespace moeserve::cpu
