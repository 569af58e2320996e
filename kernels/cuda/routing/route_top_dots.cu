#include "kernels/cuda/routing/route_kernel.cuh"

namespace moeserve::cuda {

template void LaunchRouteKernel<RouteKernelKind::kTopOfDots>(const RouteKernelArgs&, DType,
                                                             RouteTile, int64_t, cudaStream_t);

}  // namespace moeserve::cuda
