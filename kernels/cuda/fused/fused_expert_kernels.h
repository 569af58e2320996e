// The kernels that LaunchFusedExpert() selects from.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/linear/linear_params.h"

namespace moeserve::cuda {

struct FusedParams {
  LinearParams up;
  LinearParams down;
};

namespace internal {

// Products by wgmma, for many rows per expert. FusedWgmmaFits() returns whether the current device,
// the rows and the activation permit it, for banks that FusedExpertFits() accepts.
bool FusedWgmmaFits(const CudaLinearBank& down, const FusedParams& params);
void LaunchFusedWgmma(const CudaLinearBank& down, const FusedParams& params, cudaStream_t stream);

}  // namespace internal
}  // namespace moeserve::cuda
