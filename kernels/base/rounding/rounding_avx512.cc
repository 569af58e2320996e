#define MOESERVE_ROUNDING avx512
#define MOESERVE_ROUNDING_LANES 16

#include "kernels/base/quantization.h"
#include "kernels/base/rounding/rounding_kernels.h"
//
#include "kernels/base/rounding/rounding_kernels.inl"

namespace moeserve::rounding {

const RoundingKernels kAvx512Kernels = avx512::MakeKernels("avx512");

}  // namespace moeserve::rounding
