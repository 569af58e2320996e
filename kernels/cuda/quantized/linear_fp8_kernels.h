// The kernel by wgmma that LaunchLinearFp8() selects.
#pragma once

#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/linear/linear_params.h"

namespace moeserve::cuda::internal {

// Products of many bf16 rows with FP8 weights. LinearFp8WgmmaFits() returns whether the current
// device and these rows permit it.
bool LinearFp8WgmmaFits(const LinearParams& params);
void LaunchLinearFp8Wgmma(const CudaLinearBank& bank, LinearParams params, cudaStream_t stream);

}  // namespace moeserve::cuda::internal
