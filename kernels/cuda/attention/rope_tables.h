// Cosines and sines of a step's positions in device memory.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "kernels/backend.h"
#include "kernels/cuda/attention/rope.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Computed once per step for all layers with the same rotation. Used by the backend's thread.
class RopeTables {
 public:
  // Whether the angles of such a step do not fit, so that Reserve() would move them.
  bool MustGrow(const RopeSettings& settings, int64_t tokens) const;
  // The stream must be idle: tables of these settings may move. ResourceExhausted.
  absl::Status Reserve(const RopeSettings& settings, int64_t tokens, cudaStream_t stream);

  // Called before the operations of a step are issued, for capture too.
  void BeginStep();
  // [step.tokens, dimensions / 2] (cosine, sine); valid until Reserve(). The first call in
  // a step enqueues the kernel that computes them. Needs a Reserve() for as many tokens before.
  const float2* Angles(const RopeSettings& settings, const StepView& step, cudaStream_t stream);

 private:
  struct Table {
    DeviceMemory frequencies;  // double [dimensions / 2]
    DeviceMemory angles;
    int64_t tokens = 0;     // capacity of `angles`
    bool laid_out = false;  // in this step
  };
  using Key = std::pair<double, int>;  // theta, dimensions
  static Key KeyOf(const RopeSettings& s) { return {s.theta, s.dimensions}; }

  std::map<Key, Table> tables_;
};

}  // namespace moeserve::cuda
