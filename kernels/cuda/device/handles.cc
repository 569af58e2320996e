#include "kernels/cuda/device/handles.h"

#include <string>

namespace moeserve::cuda {

Status CudaStatus(cudaError_t error, std::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  std::string message = "CUDA: " + std::string(call) + ": " + cudaGetErrorString(error) + " (" +
                        cudaGetErrorName(error) + ")";
  // Clears the error; otherwise a later cudaGetLastError() would report it again.
  static_cast<void>(cudaGetLastError());
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

Result<DeviceMemory> DeviceMemory::Allocate(size_t bytes) {
  DeviceMemory memory;
  if (bytes == 0) return memory;
  void* pointer = nullptr;
  MOESERVE_RETURN_IF_ERROR(
      CudaStatus(cudaMalloc(&pointer, bytes), "cudaMalloc of " + std::to_string(bytes) + " bytes"));
  memory.handle_ = Handle<void*, cudaFree>(pointer);
  memory.bytes_ = bytes;
  return memory;
}

Result<PinnedMemory> PinnedMemory::Allocate(size_t bytes) {
  PinnedMemory memory;
  if (bytes == 0) return memory;
  void* pointer = nullptr;
  MOESERVE_RETURN_IF_ERROR(CudaStatus(cudaHostAlloc(&pointer, bytes, cudaHostAllocDefault),
                                      "cudaHostAlloc of " + std::to_string(bytes) + " bytes"));
  memory.handle_ = Handle<void*, cudaFreeHost>(pointer);
  memory.bytes_ = bytes;
  return memory;
}

Result<Stream> Stream::Create() {
  cudaStream_t handle = nullptr;
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
  Stream stream;
  stream.handle_ = Handle<cudaStream_t, cudaStreamDestroy>(handle);
  return stream;
}

Status Stream::Synchronize() const {
  return CudaStatus(cudaStreamSynchronize(get()), "cudaStreamSynchronize");
}

Result<Event> Event::Create(bool timing) {
  cudaEvent_t handle = nullptr;
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaEventCreateWithFlags(&handle, timing ? cudaEventDefault : cudaEventDisableTiming));
  Event event;
  event.handle_ = Handle<cudaEvent_t, cudaEventDestroy>(handle);
  return event;
}

Status Event::Record(cudaStream_t stream) const {
  return CudaStatus(cudaEventRecord(get(), stream), "cudaEventRecord");
}

Status Event::Synchronize() const {
  return CudaStatus(cudaEventSynchronize(get()), "cudaEventSynchronize");
}

Status Event::MakeWait(cudaStream_t stream) const {
  return CudaStatus(cudaStreamWaitEvent(stream, get(), 0), "cudaStreamWaitEvent");
}

Result<float> Event::MillisecondsSince(const Event& begin) const {
  float milliseconds = 0.0f;
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&milliseconds, begin.get(), get()));
  return milliseconds;
}

Status GraphExec::BeginCapture(cudaStream_t stream) {
  // Thread-local mode allows other threads to call the runtime during the capture.
  return CudaStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                    "cudaStreamBeginCapture");
}

Result<GraphExec> GraphExec::EndCapture(cudaStream_t stream, Status status) {
  cudaGraph_t captured = nullptr;
  const Status end = CudaStatus(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  const Handle<cudaGraph_t, cudaGraphDestroy> graph(captured);
  MOESERVE_RETURN_IF_ERROR(status);
  MOESERVE_RETURN_IF_ERROR(end);
  cudaGraphExec_t handle = nullptr;
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(&handle, graph.get(), 0));
  GraphExec exec;
  exec.handle_ = Handle<cudaGraphExec_t, cudaGraphExecDestroy>(handle);
  // Allocates the graph's device memory now, when an error can still be returned, instead of at the
  // first launch.
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaGraphUpload(handle, stream));
  return exec;
}

Status GraphExec::Launch(cudaStream_t stream) const {
  return CudaStatus(cudaGraphLaunch(handle_.get(), stream), "cudaGraphLaunch");
}

}  // namespace moeserve::cuda
