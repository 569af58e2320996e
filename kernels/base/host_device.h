// MOESERVE_HOST_DEVICE marks functions that run on the host and in CUDA kernels.
#pragma once

#if defined(__CUDACC__)
#define MOESERVE_HOST_DEVICE __host__ __device__
#else
#define MOESERVE_HOST_DEVICE
#endif
