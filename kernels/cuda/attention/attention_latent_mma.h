// Attention over the latent vectors of a bf16 cache on the tensor cores.
#pragma once

#include "kernels/cuda/attention/attention.h"

namespace moeserve::cuda {

// Returns the shared memory in bytes that the largest thread block of these kernels needs for a
// layer over latent vectors; 0 if the vectors are wider than what the kernels are compiled for.
int64_t LatentMmaSharedBytes(const KvLayerView& cache);

// As LaunchSplitMma(), for a layer with FitsLatentMma().
void LaunchLatentSplitMma(const AttentionLaunch& args, cudaStream_t stream);
// As LaunchTiledMma(), for a layer with FitsLatentMma().
void LaunchLatentTiledMma(const AttentionLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda
