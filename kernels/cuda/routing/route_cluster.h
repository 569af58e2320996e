// Routing of few rows by one cluster of blocks.
#pragma once

#include "kernels/cuda/routing/route_kernel.cuh"
#include "kernels/cuda/rows/rows.h"

namespace moeserve::cuda {

// Returns the largest number of blocks (8 or 16) of the clusters that the current device can run
// with all of its shared memory; 0 if it has no clusters.
int MostRouteClusterBlocks();

// Launches the kernel of a variant with clusters; `dtype` is the type of the rows, f32 or bf16. If
// `norm` is not null, the launch computes it first; its output must be the rows, and `kind` must be
// kTopOfDots.
void LaunchRouteCluster(const RouteKernelArgs& args, DType dtype, RouteKernelKind kind, int blocks,
                        const NormLaunch* norm, cudaStream_t stream);

}  // namespace moeserve::cuda
