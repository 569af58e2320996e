#include "tests/bench/cuda/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace moeserve::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kReplays = 40;
// The accuracy of CUDA events is about half a microsecond, so a timed graph must run much longer.
constexpr double kMinGraphSeconds = 300e-6;
constexpr double kWarmUpSeconds = 0.02;
constexpr double kMaxCaseSeconds = 2.5;
constexpr int kMinReplays = 30;
constexpr int64_t kMaxNodes = 4096;

double Seconds(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double Quantile(const std::vector<double>& sorted, double q) {
  return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5)];
}

}  // namespace

Result<std::unique_ptr<Bench>> Bench::Create(bool tiny) {
  std::unique_ptr<Bench> bench(new Bench);
  bench->tiny_ = tiny;
  cudaDeviceProp properties{};
  MOESERVE_RETURN_IF_ERROR(
      cuda::CudaStatus(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties"));
  bench->rates_.device = properties.name;
  bench->rates_.l2_bytes = properties.l2CacheSize;
  bench->rates_.multiprocessors = properties.multiProcessorCount;
  MOESERVE_ASSIGN_OR_RETURN(bench->stream_, cuda::Stream::Create());
  size_t free = 0, total = 0;
  MOESERVE_RETURN_IF_ERROR(cuda::CudaStatus(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  bench->weight_budget_ = std::min<int64_t>(int64_t{24} << 30, static_cast<int64_t>(free) / 2);
  return bench;
}

Result<Timing> Bench::Time(int items, const std::function<void(int)>& enqueue) {
  MOESERVE_RETURN_IF_ERROR(Synchronize());
  const auto capture = [&](int repeats) {
    return cuda::GraphExec::Capture(stream(), [&] {
      for (int r = 0; r < repeats; ++r) {
        for (int i = 0; i < items; ++i) enqueue(i);
      }
      return absl::OkStatus();
    });
  };
  MOESERVE_ASSIGN_OR_RETURN(const cuda::Event begin, cuda::Event::Create(true));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::Event end, cuda::Event::Create(true));
  MOESERVE_ASSIGN_OR_RETURN(cuda::GraphExec graph, capture(1));
  const auto replay = [&]() -> Result<double> {
    MOESERVE_RETURN_IF_ERROR(begin.Record(stream()));
    MOESERVE_RETURN_IF_ERROR(graph.Launch(stream()));
    MOESERVE_RETURN_IF_ERROR(end.Record(stream()));
    MOESERVE_RETURN_IF_ERROR(end.Synchronize());
    MOESERVE_ASSIGN_OR_RETURN(const float milliseconds, end.MillisecondsSince(begin));
    return milliseconds * 1e-3;
  };
  MOESERVE_ASSIGN_OR_RETURN(double once, replay());
  int repeats = 1;
  if (!tiny_) {
    MOESERVE_ASSIGN_OR_RETURN(once, replay());  // again, without the costs of the first launch
    if (once < kMinGraphSeconds) {
      repeats = static_cast<int>(
          std::clamp<double>(std::ceil(kMinGraphSeconds / std::max(once, 1e-6)), 1.0,
                             std::max<double>(1.0, static_cast<double>(kMaxNodes) / items)));
    }
    if (repeats > 1) {
      MOESERVE_ASSIGN_OR_RETURN(graph, capture(repeats));
    }
    const auto start = Clock::now();
    for (int i = 0; i < 3 || Seconds(start) < kWarmUpSeconds; ++i) {
      MOESERVE_RETURN_IF_ERROR(replay().status());
    }
  }
  const auto start = Clock::now();
  std::vector<double> seconds;
  for (int i = 0; i < (tiny_ ? 2 : kReplays); ++i) {
    MOESERVE_ASSIGN_OR_RETURN(const double s, replay());
    seconds.push_back(s / (static_cast<double>(items) * repeats));
    if (i + 1 >= kMinReplays && Seconds(start) > kMaxCaseSeconds) break;
  }
  std::sort(seconds.begin(), seconds.end());
  return Timing{.median = Quantile(seconds, 0.5),
                .p10 = Quantile(seconds, 0.1),
                .p90 = Quantile(seconds, 0.9),
                .items = items * repeats,
                .replays = static_cast<int>(seconds.size())};
}

Result<cuda::DeviceMemory> Bench::Random(DType dtype, int64_t count, uint64_t seed, float scale) {
  MOESERVE_ASSIGN_OR_RETURN(cuda::DeviceMemory memory,
                            cuda::DeviceMemory::Allocate(
                                std::max<size_t>(16, static_cast<size_t>(count) * SizeOf(dtype))));
  LaunchFill(memory.data(), dtype, count, seed, scale, stream());
  return memory;
}

Result<cuda::DeviceMemory> Bench::Poisoned(size_t bytes) {
  MOESERVE_ASSIGN_OR_RETURN(cuda::DeviceMemory memory,
                            cuda::DeviceMemory::Allocate(std::max<size_t>(16, bytes)));
  MOESERVE_RETURN_IF_ERROR(cuda::CudaStatus(
      cudaMemsetAsync(memory.data(), 0xff, memory.bytes(), stream()), "cudaMemsetAsync"));
  return memory;
}

absl::Status Bench::CopyTo(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  MOESERVE_RETURN_IF_ERROR(cuda::CudaStatus(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream()), "cudaMemcpyAsync"));
  return Synchronize();
}

absl::Status Bench::CopyFrom(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  MOESERVE_RETURN_IF_ERROR(cuda::CudaStatus(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream()), "cudaMemcpyAsync"));
  return Synchronize();
}

Result<std::vector<float>> Bench::DownloadRow(const void* data, DType dtype, int64_t begin,
                                              int64_t count) {
  const char* from = static_cast<const char*>(data) + begin * static_cast<int64_t>(SizeOf(dtype));
  if (dtype == DType::kF32) return Download<float>(from, count);
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<Bf16> bits, Download<Bf16>(from, count));
  std::vector<float> values;
  for (const Bf16 b : bits) values.push_back(F32FromBf16(b));
  return values;
}

double MemorySeconds(const Rates& rates, const Work& work) {
  const double read = work.bytes - work.written;
  const double copied = 2 * std::min(read, work.written);
  const double rest = work.bytes - copied;
  const double rest_rate = read > work.written && rates.read > 0 ? rates.read : rates.copy;
  return rates.copy > 0 ? copied / rates.copy + rest / rest_rate : 0;
}

double Floor(const Rates& rates, const Work& work) {
  const double products = rates.bf16 > 0 ? work.flops / rates.bf16 : 0;
  return std::max(MemorySeconds(rates, work), products);
}

double LatencyFloor(const Rates& rates, const Work& work) {
  return Floor(rates, work) + work.phases * rates.node;
}

absl::Status CheckValue(double value, double expected, double spread, const std::string& what) {
  // This comparison is false for NaN.
  if (std::abs(value - expected) <= 0.016 * (std::abs(expected) + spread) && spread > 0) {
    return absl::OkStatus();
  }
  return absl::InternalError("wrong value, " + what + ": " + std::to_string(value) + ", expected " +
                             std::to_string(expected) + " (values around are " +
                             std::to_string(spread) + ")");
}

}  // namespace moeserve::bench
