#define MOESERVE_ROUNDING avx2
#define MOESERVE_ROUNDING_LANES 8

#include "kernels/base/quantization.h"
#include "kernels/base/rounding/rounding_kernels.h"
//
#include "kernels/base/rounding/rounding_kernels.inl"

namespace moeserve::rounding {

const RoundingKernels kAvx2Kernels = avx2::MakeKernels("avx2");

}  // namespace moeserve::rounding
