// Selects the kernels that round weights to integers.
#pragma once

#include <vector>

#include "kernels/base/rounding/rounding_kernels.h"

namespace moeserve::rounding {

// Returns the kernels for the instruction sets of this processor, the fastest first.
std::vector<const RoundingKernels*> SupportedKernels();

// Returns the fastest kernels. Can be called from all threads.
const RoundingKernels& SelectedKernels();

}  // namespace moeserve::rounding
