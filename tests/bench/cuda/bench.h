// What all device benchmarks share: the device's own rates, timing of replayed graphs, results.
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

// What the device does at best, as measured; 0: not known. Bytes and operations per second.
struct Rates {
  std::string device;
  double copy = 0;  // bytes read and written
  double read = 0;  // bytes read alone
  double bf16 = 0;  // matrix products on random data
  double node = 0;  // seconds of an empty kernel in a graph
  int64_t l2_bytes = 0;
  int multiprocessors = 0;
};

// The least that one item must do (kernels move at least these bytes, compute at least these
// operations).
struct Work {
  double bytes = 0;
  double flops = 0;
};

struct Timing {
  double median = 0, p10 = 0, p90 = 0;  // seconds of one item
  int items = 0;                        // in the graph
  int replays = 0;
};

struct Measured {
  Timing timing;
  Work work;
  // Bytes that the items of a graph touch; below twice the L2 cache, a kernel may read from there.
  double rotated_bytes = 0;
  nlohmann::json more = nlohmann::json::object();  // further fields of the result
};

class Bench;

struct Case {
  std::string name;  // family/shape/size; the baselines use the same names
  // 0: with the first ones; larger: later, as far as time allows.
  int priority = 0;
  // InternalError: a value is wrong, or the device failed.
  std::function<Result<Measured>(Bench&)> run;
};

// One thread at a time.
class Bench {
 public:
  // `tiny`: for devices that are emulated; no number counts.
  static Result<std::unique_ptr<Bench>> Create(bool tiny);

  bool tiny() const { return tiny_; }
  cudaStream_t stream() const { return stream_.get(); }
  Rates& rates() { return rates_; }
  const Rates& rates() const { return rates_; }
  // Bytes that weights of one case may take.
  int64_t weight_budget() const { return weight_budget_; }

  absl::Status MeasureRates();

  // Times a graph in which `enqueue(i)` runs for item 0 to items - 1, several times in turn where
  // that is too short to be timed; items differ in the memory that they touch. `enqueue` must have
  // run before the call.
  Result<Timing> Time(int items, const std::function<void(int)>& enqueue);

  absl::Status Synchronize() const { return stream_.Synchronize(); }
  Result<cuda::DeviceMemory> Random(DType dtype, int64_t count, uint64_t seed, float scale);
  Result<cuda::DeviceMemory> Poisoned(size_t bytes);  // all NaN
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
  // Rows of f32 or bf16 memory, widened.
  Result<std::vector<float>> DownloadRow(const void* data, DType dtype, int64_t begin,
                                         int64_t count);

  // What `make` returns, kept until another key is asked for.
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
  // Memory that was kept goes.
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

// Seconds that `work` takes at least; what is not known about the device does not count.
double Floor(const Rates& rates, const Work& work);

// OK if |value - expected| is small for a product of bf16 numbers; `spread` is the size of values
// around.
absl::Status CheckValue(double value, double expected, double spread, const std::string& what);

void AddExpertCases(bool tiny, std::vector<Case>& cases);
void AddRoutingCases(bool tiny, std::vector<Case>& cases);
void AddAttentionCases(bool tiny, std::vector<Case>& cases);
void AddBlockCases(bool tiny, std::vector<Case>& cases);
void AddRowCases(bool tiny, std::vector<Case>& cases);
void AddCountingCases(bool tiny, std::vector<Case>& cases);

}  // namespace moeserve::bench
