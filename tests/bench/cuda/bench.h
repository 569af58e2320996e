// Code that all device benchmarks share: the device's rates, timing by replayed graphs, and
// results.
#pragma once

#include <any>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"
#include "tests/bench/cuda/data.h"

namespace moeserve::bench {

// The device's best measured rates, in bytes and operations per second. 0 means unknown.
struct Rates {
  std::string device;
  double copy = 0;            // bytes read plus bytes written per second, in a copy
  double read = 0;            // bytes per second, in a kernel that only reads
  double bf16 = 0;            // operations per second, in bf16 matrix products
  std::string bf16_method;    // what reached that rate
  double bf16_sustained = 0;  // the same after two seconds, when a limit of the power may apply
  double node = 0;            // seconds that an empty kernel takes in a graph
  int64_t l2_bytes = 0;
  int multiprocessors = 0;
};

// A lower bound on the work of one item, whatever the algorithm: the bytes that kernels must move
// and the operations that they must compute.
struct Work {
  double bytes = 0;    // read and written
  double written = 0;  // those of `bytes` that are written
  double flops = 0;
  int phases = 1;  // steps of which each needs results of the whole step before
};

struct Timing {
  double median = 0, p10 = 0, p90 = 0;  // seconds per item
  int items = 0;                        // items in the graph
  int replays = 0;
};

struct Measured {
  Timing timing;
  Work work;
  // Bytes that all items of a graph access. If they are less than twice the L2 cache, kernels may
  // read from the cache.
  double rotated_bytes = 0;
  nlohmann::json more = nlohmann::json::object();  // further fields of the result
};

class Bench;

struct Case {
  std::string name;  // family/shape/size; the PyTorch baselines have the same names
  // Cases with priority 0 run first. Cases with larger numbers run later, if there is time.
  int priority = 0;
  // Returns InternalError if a value is wrong or the device failed.
  std::function<Result<Measured>(Bench&)> run;
};

// Must be used by one thread at a time.
class Bench {
 public:
  // `tiny` is for emulated devices, on which timings are meaningless.
  static Result<std::unique_ptr<Bench>> Create(bool tiny);

  bool tiny() const { return tiny_; }
  cudaStream_t stream() const { return stream_.get(); }
  Rates& rates() { return rates_; }
  const Rates& rates() const { return rates_; }
  // Returns the limit on the bytes of one case's weights.
  int64_t weight_budget() const { return weight_budget_; }

  // Measures all rates (rates.cc). ResourceExhausted if memory runs out.
  absl::Status MeasureRates();

  // Times a graph that runs `enqueue(i)` for the items i = 0 to items - 1. If the graph is too
  // short to be timed, it runs all items several times. Different items must access different
  // memory. `enqueue` must have run once before the call.
  Result<Timing> Time(int items, const std::function<void(int)>& enqueue);

  absl::Status Synchronize() const { return stream_.Synchronize(); }
  Result<cuda::DeviceMemory> Random(DType dtype, int64_t count, uint64_t seed, float scale);
  Result<cuda::DeviceMemory> Poisoned(size_t bytes);  // filled with NaN
  template <typename T>
  Result<cuda::DeviceMemory> Upload(const std::vector<T>& values) {
    MOESERVE_ASSIGN_OR_RETURN(
        cuda::DeviceMemory memory,
        cuda::DeviceMemory::Allocate(std::max<size_t>(16, values.size() * sizeof(T))));
    MOESERVE_RETURN_IF_ERROR(CopyTo(memory.data(), values.data(), values.size() * sizeof(T)));
    return memory;
  }
  template <typename T>
  Result<std::vector<T>> Download(const void* data, int64_t count) {
    std::vector<T> values(static_cast<size_t>(count));
    MOESERVE_RETURN_IF_ERROR(CopyFrom(values.data(), data, values.size() * sizeof(T)));
    return values;
  }
  // Returns a part of a row of f32 or bf16 memory, widened.
  Result<std::vector<float>> DownloadRow(const void* data, DType dtype, int64_t begin,
                                         int64_t count);

  // Returns the result of `make`, which is cached until another key is requested.
  template <typename T>
  Result<std::shared_ptr<T>> Keep(const std::string& key,
                                  const std::function<Result<std::shared_ptr<T>>()>& make) {
    if (key != kept_key_) {
      kept_.reset();
      kept_key_.clear();
      MOESERVE_ASSIGN_OR_RETURN(std::shared_ptr<T> value, make());
      kept_ = value;
      kept_key_ = key;
    }
    return std::any_cast<std::shared_ptr<T>>(kept_);
  }
  // Frees the cached object.
  void Forget() {
    kept_.reset();
    kept_key_.clear();
  }

 private:
  Bench() = default;
  absl::Status CopyTo(void* to, const void* from, size_t bytes);
  absl::Status CopyFrom(void* to, const void* from, size_t bytes);

  bool tiny_ = false;
  cuda::Stream stream_;
  Rates rates_;
  int64_t weight_budget_ = 0;
  std::string kept_key_;
  std::any kept_;
};

// Returns the seconds that `bytes`, of which `written` are written, take at these rates: as many
// bytes as are written are moved at the rate of a copy, the rest at the rate of reading alone.
// Unknown rates are ignored.
double MemorySeconds(const Rates& rates, const Work& work);
// Returns a lower bound on the seconds that `work` takes at these rates: the larger of the time of
// its bytes and the time of its operations.
double Floor(const Rates& rates, const Work& work);
// Returns Floor() and the time of an empty kernel for every phase, which kernels of one launch per
// phase cannot avoid.
double LatencyFloor(const Rates& rates, const Work& work);

// Returns OK if |value - expected| is small for a product of bf16 numbers. `spread` is the typical
// magnitude of such products.
absl::Status CheckValue(double value, double expected, double spread, const std::string& what);

void AddExpertCases(bool tiny, std::vector<Case>& cases);
void AddRoutingCases(bool tiny, std::vector<Case>& cases);
void AddAttentionCases(bool tiny, std::vector<Case>& cases);
void AddBlockCases(bool tiny, std::vector<Case>& cases);
void AddRowCases(bool tiny, std::vector<Case>& cases);
void AddCountingCases(bool tiny, std::vector<Case>& cases);

}  // namespace moeserve::bench
