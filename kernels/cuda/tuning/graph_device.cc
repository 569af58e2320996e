#include "kernels/cuda/tuning/graph_device.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/base/dtype.h"
#include "kernels/cuda/dense/dense_layers.h"

namespace moeserve::cuda {
namespace {

// A measurement takes about this long, so that the time to start a graph does not count.
constexpr double kMicrosecondsOfGraph = 500.0;
constexpr int kFewestLaunches = 2, kMostLaunches = 32;

struct PreparedGraph {
  GraphExec graph;
  Event begin, end;
  int launches = 0;
};

Result<double> Measure(const PreparedGraph& prepared, cudaStream_t stream) {
  MOESERVE_RETURN_IF_ERROR(prepared.begin.Record(stream));
  MOESERVE_RETURN_IF_ERROR(prepared.graph.Launch(stream));
  MOESERVE_RETURN_IF_ERROR(prepared.end.Record(stream));
  MOESERVE_RETURN_IF_ERROR(prepared.end.Synchronize());
  MOESERVE_ASSIGN_OR_RETURN(const float milliseconds,
                            prepared.end.MillisecondsSince(prepared.begin));
  return static_cast<double>(milliseconds) * 1e3 / prepared.launches;
}

}  // namespace

Result<std::function<Result<double>()>> GraphTuneDevice::Prepare(
    const std::function<void(int turn)>& enqueue) {
  auto prepared = std::make_shared<PreparedGraph>();
  MOESERVE_ASSIGN_OR_RETURN(prepared->begin, Event::Create(true));
  MOESERVE_ASSIGN_OR_RETURN(prepared->end, Event::Create(true));
  const auto capture = [&](int launches) -> Status {
    prepared->launches = launches;
    MOESERVE_ASSIGN_OR_RETURN(prepared->graph, GraphExec::Capture(stream_, [&] {
                                for (int turn = 0; turn < launches; ++turn) enqueue(turn);
                                return absl::OkStatus();
                              }));
    return absl::OkStatus();
  };
  MOESERVE_RETURN_IF_ERROR(capture(kFewestLaunches));
  MOESERVE_RETURN_IF_ERROR(Measure(*prepared, stream_).status());
  MOESERVE_ASSIGN_OR_RETURN(const double once, Measure(*prepared, stream_));
  const double wanted = kMicrosecondsOfGraph / std::max(once, 0.1);
  MOESERVE_RETURN_IF_ERROR(
      capture(std::clamp(static_cast<int>(std::ceil(wanted)), kFewestLaunches, kMostLaunches)));
  MOESERVE_RETURN_IF_ERROR(Measure(*prepared, stream_).status());
  return std::function<Result<double>()>(
      [prepared, stream = stream_] { return Measure(*prepared, stream); });
}

Status GraphTuneDevice::Run(const std::function<void(int turn)>& enqueue) {
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(output_, 0xff, output_bytes_, stream_));
  enqueue(0);
  return absl::OkStatus();
}

Status GraphTuneDevice::RunDefault(const std::function<void(int turn)>& enqueue) {
  if (expected_.bytes() < output_bytes_) {
    MOESERVE_ASSIGN_OR_RETURN(expected_, DeviceMemory::Allocate(output_bytes_));
  }
  MOESERVE_ASSIGN_OR_RETURN(differences_, DeviceMemory::Allocate(sizeof(unsigned long long)));
  MOESERVE_RETURN_IF_ERROR(Run(enqueue));
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(expected_.data(), output_, output_bytes_, cudaMemcpyDeviceToDevice, stream_));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
  return absl::OkStatus();
}

Result<bool> GraphTuneDevice::EqualsDefault(const std::function<void(int turn)>& enqueue) {
  MOESERVE_RETURN_IF_ERROR(Run(enqueue));
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(differences_.data(), 0, differences_.bytes(), stream_));
  internal::LaunchCountDifferences(static_cast<const float*>(output_), expected_.as<float>(),
                                   static_cast<int64_t>(output_bytes_ / 4),
                                   differences_.as<unsigned long long>(), stream_);
  unsigned long long differences = 0;
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(
      &differences, differences_.data(), sizeof(differences), cudaMemcpyDeviceToHost, stream_));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
  return differences == 0;
}

Status FillWithNumbers(const DeviceMemory& memory, cudaStream_t stream) {
  // The pattern repeats, so that filling takes little time.
  constexpr size_t kPattern = size_t{1} << 20;
  std::vector<Bf16> values(kPattern);
  std::mt19937 random(1);
  for (Bf16& v : values) {
    v = Bf16FromF32(static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f);
  }
  const size_t bytes = kPattern * sizeof(Bf16);
  for (size_t at = 0; at < memory.bytes(); at += bytes) {
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(memory.as<char>() + at, values.data(),
                                                  std::min(bytes, memory.bytes() - at),
                                                  cudaMemcpyHostToDevice, stream));
  }
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
