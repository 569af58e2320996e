// Attention over the latent vectors of a bf16 cache on the tensor cores.
#pragma once

#include "kernels/cuda/attention/attention.h"

namespace moeserve::cuda {

// Returns the shared memory in bytes that the largest thread block of these kernels needs for a
// layer over latent vectors; 0 if the vectors are wider than what the kernels are compiled for.
int64_t LatentMmaSharedBytes(const KvLayerView& cache);

// As LaunchSplitMma(), for a layer with FitsLatentMma(). With `only_without_slots`, only tokens
// that have several splits but no slots.
void LaunchLatentSplitMma(const AttentionLaunch& args, bool only_without_slots,
                          cudaStream_t stream);
// As LaunchLatentSplitMma() for all tokens, by wgmma in blocks of 64 rows: the same bits.
// LatentWgmmaFits() returns whether the current device has wgmma (compute capability 9.0) and the
// kernel is compiled for the width of the vectors.
bool LatentWgmmaFits(const KvLayerView& cache);
void LaunchLatentSplitWgmma(const AttentionLaunch& args, cudaStream_t stream);
// As LaunchTiledMma(), for a layer with FitsLatentMma().
void LaunchLatentTiledMma(const AttentionLaunch& args, cudaStream_t stream);
// As LaunchLatentTiledMma(), by wgmma: the same bits, if LatentWgmmaFits(). `args.tile_sums` has
// LatentTileSumsBytes(), which is 0 if the kernel cannot be used.
int64_t LatentTileSumsBytes(const KvLayerView& cache);
void LaunchLatentTiledWgmma(const AttentionLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda
