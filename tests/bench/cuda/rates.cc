// Measures what the device does at best: moving bytes, multiplying matrices, starting kernels.

#include <algorithm>
#include <chrono>
#include <string>

#include "kernels/cuda/dense/dense_library.h"
#include "kernels/cuda/device/bandwidth.h"
#include "kernels/cuda/linear/linear.h"
#include "tests/bench/cuda/banks.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {
namespace {

constexpr double kSustainedSeconds = 2.0;

// The faster of cudaMemcpyAsync and a copy kernel.
absl::Status MeasureCopy(Bench& bench, int64_t bytes) {
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory from,
                            bench.Random(DType::kBF16, bytes / 2, 1, 1.0f));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory to,
                            cuda::DeviceMemory::Allocate(static_cast<size_t>(bytes)));
  for (const bool kernel : {false, true}) {
    const auto copy = [&](int) {
      if (kernel) {
        LaunchCopy(from.data(), to.data(), bytes, bench.stream());
      } else {
        static_cast<void>(cudaMemcpyAsync(to.data(), from.data(), static_cast<size_t>(bytes),
                                          cudaMemcpyDeviceToDevice, bench.stream()));
      }
    };
    copy(0);
    MOESERVE_ASSIGN_OR_RETURN(const Timing timing, bench.Time(1, copy));
    Rates& rates = bench.rates();
    rates.copy = std::max(rates.copy, 2.0 * static_cast<double>(bytes) / timing.median);
  }
  return absl::OkStatus();
}

// Repeats `multiply` for a while and returns its rate in the last quarter of that time.
Result<double> Sustained(Bench& bench, double flops, const std::function<void(int)>& multiply) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double rate = 0;
  do {
    MOESERVE_ASSIGN_OR_RETURN(const Timing timing, bench.Time(1, multiply));
    rate = flops / timing.median;
  } while (!bench.tiny() &&
           std::chrono::duration<double>(Clock::now() - start).count() < kSustainedSeconds);
  return rate;
}

// The product of two square matrices of random numbers: by the kernels of linear.h, and by cuBLASLt
// if it is installed. The rate is that of the faster one.
absl::Status MeasureProducts(Bench& bench) {
  const int n = bench.tiny() ? 64 : 8192;
  const int64_t count = int64_t{n} * n;
  MOESERVE_ASSIGN_OR_RETURN(
      const std::unique_ptr<RandomBank> bank,
      RandomBank::Create(bench, {.in_features = {n}, .out_features = {n}}, 5));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory input,
                            bench.Random(DType::kBF16, count, 6, 1.0f));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory output,
                            bench.Poisoned(static_cast<size_t>(count) * 4));
  const auto own = [&](int) {
    cuda::LaunchLinear({.bank = &bank->bank(),
                        .input = {input.data(), DType::kBF16, n, n, n},
                        .output = {output.data(), DType::kBF16, n, n, n}},
                       bench.stream());
  };
  own(0);
  const double flops = 2.0 * n * static_cast<double>(count);
  Rates& rates = bench.rates();
  const auto measure = [&](const char* method,
                           const std::function<void(int)>& multiply) -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(const Timing timing, bench.Time(1, multiply));
    if (flops / timing.median <= rates.bf16) return absl::OkStatus();
    rates.bf16 = flops / timing.median;
    rates.bf16_method = method;
    MOESERVE_ASSIGN_OR_RETURN(rates.bf16_sustained, Sustained(bench, flops, multiply));
    return absl::OkStatus();
  };
  MOESERVE_RETURN_IF_ERROR(measure("moeserve", own));
  Result<std::unique_ptr<cuda::DenseLibrary>> library = cuda::OpenDenseLibrary();
  if (!library.ok()) return absl::OkStatus();
  const cuda::DenseShape shape{
      .out_features = n, .in_features = n, .input_stride = n, .output_stride = n};
  const Result<int> algorithms = (*library)->FindAlgorithms(shape, n);
  if (!algorithms.ok() || *algorithms == 0) return absl::OkStatus();
  // The input serves as the weights, too.
  absl::Status status;
  const auto multiply = [&](int) {
    status.Update((*library)->Multiply(shape, 0, input.data(), input.data(), n,
                                       static_cast<float*>(output.data()), bench.stream()));
  };
  multiply(0);
  MOESERVE_RETURN_IF_ERROR(status);
  MOESERVE_RETURN_IF_ERROR(measure("cuBLASLt", multiply));
  return status;
}

}  // namespace

absl::Status Bench::MeasureRates() {
  const int64_t bytes = tiny_ ? int64_t{1} << 20 : int64_t{4} << 30;
  MOESERVE_ASSIGN_OR_RETURN(rates_.read, cuda::MeasureReadBandwidth(bytes, 10, stream()));
  MOESERVE_RETURN_IF_ERROR(MeasureCopy(*this, bytes));
  MOESERVE_RETURN_IF_ERROR(MeasureProducts(*this));
  LaunchEmpty(stream());
  MOESERVE_ASSIGN_OR_RETURN(const Timing node,
                            Time(tiny_ ? 4 : 1000, [&](int) { LaunchEmpty(stream()); }));
  rates_.node = node.median;
  return absl::OkStatus();
}

}  // namespace moeserve::bench
