#include <algorithm>

#include "kernels/cuda/device/bandwidth.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 8;  // number of independent 16-byte loads per thread

// Each block reads pieces of kThreads * kLoads vectors of 16 bytes. The sum keeps the compiler from
// removing the loads.
__global__ void ReadKernel(const uint4* data, int64_t pieces, unsigned* sums) {
  unsigned sum = 0;
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const uint4* from = data + piece * kThreads * kLoads + threadIdx.x;
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = __ldg(from + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (sum == 0x12345678u) sums[blockIdx.x] = sum;
}

}  // namespace

Result<double> MeasureReadBandwidth(int64_t bytes, int rounds, cudaStream_t stream) {
  constexpr int64_t kPiece = int64_t{kThreads} * kLoads * 16;
  const int64_t pieces = bytes / kPiece;
  if (pieces < 1) return absl::InvalidArgumentError("bandwidth: expected 64 KiB or more");
  cudaDeviceProp properties{};
  MOESERVE_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties"));
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>(pieces, int64_t{properties.multiProcessorCount} * 3));
  MOESERVE_ASSIGN_OR_RETURN(DeviceMemory memory,
                            DeviceMemory::Allocate(static_cast<size_t>(pieces * kPiece)));
  MOESERVE_ASSIGN_OR_RETURN(DeviceMemory sums, DeviceMemory::Allocate(blocks * sizeof(unsigned)));
  MOESERVE_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(memory.data(), 1, memory.bytes(), stream), "cudaMemsetAsync"));
  MOESERVE_ASSIGN_OR_RETURN(const Event start, Event::Create(true));
  MOESERVE_ASSIGN_OR_RETURN(const Event end, Event::Create(true));
  double best = 0.0;
  for (int round = 0; round <= rounds; ++round) {  // the first round is a warm-up
    MOESERVE_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(start.get(), stream), "cudaEventRecord"));
    Launch(ReadKernel, LaunchShape{dim3(blocks), dim3(kThreads), 0, stream}, memory.as<uint4>(),
           pieces, sums.as<unsigned>());
    MOESERVE_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end.get(), stream), "cudaEventRecord"));
    MOESERVE_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(end.get()), "cudaEventSynchronize"));
    float milliseconds = 0.0f;
    MOESERVE_RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&milliseconds, start.get(), end.get()),
                                        "cudaEventElapsedTime"));
    if (round > 0) {
      best = std::max(best, static_cast<double>(pieces * kPiece) / (milliseconds * 1e-3));
    }
  }
  return best;
}

}  // namespace moeserve::cuda
