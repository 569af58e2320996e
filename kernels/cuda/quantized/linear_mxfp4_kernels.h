// The kernel by wgmma that LaunchLinearMxfp4() selects.
#pragma once

#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/linear/linear_params.h"

namespace moeserve::cuda::internal {

// Products of many bf16 rows with MXFP4 weights. LinearMxfp4WgmmaFits() returns whether the current
// device, these rows and the bank, whose sums must have one slice, permit it.
bool LinearMxfp4WgmmaFits(const CudaLinearBank& bank, const LinearParams& params);
void LaunchLinearMxfp4Wgmma(const CudaLinearBank& bank, LinearParams params, cudaStream_t stream);

}  // namespace moeserve::cuda::internal
