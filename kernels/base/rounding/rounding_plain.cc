#define MOESERVE_ROUNDING plain
#define MOESERVE_ROUNDING_LANES 8

#include "kernels/base/quantization.h"
#include "kernels/base/rounding/rounding_kernels.h"
//
#include "kernels/base/rounding/rounding_kernels.inl"

namespace moeserve::rounding {

const RoundingKernels kPlainKernels = plain::MakeKernels("plain");

}  // namespace moeserve::rounding
