// Cosines and sines of a step's positions in device memory.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "kernels/backend.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Computed once per step for all layers whose dimensions turn alike. Used by the backend's thread.
class RopeTables {
 public:
  // True where there is no room for the angles of such a step and Reserve() would make it.
  bool MustGrow(const RopeSettings& settings, int64_t tokens) const;
  // The stream must be idle: tables of these settings may move. ResourceExhausted.
  absl::Status Reserve(const RopeSettings& settings, int64_t tokens, cudaStream_t stream);

  // The operations of a step are about to be issued, or issued once more.
  void BeginStep();
  // [step.tokens, dimensions / 2] (cosine, sine); they stay there until Reserve(). The first call
  // in a step enqueues what computes them. After Reserve() for as many tokens.
  const float2* Angles(const RopeSettings& settings, const StepView& step, cudaStream_t stream);

 private:
  struct Table {
    DeviceMemory frequencies;  // double [dimensions / 2]
    DeviceMemory angles;
    int64_t tokens = 0;     // that `angles` have room for
    bool laid_out = false;  // in this step
  };
  using Key = std::pair<double, int>;  // theta, dimensions
  static Key KeyOf(const RopeSettings& s) { return {s.theta, s.dimensions}; }

  std::map<Key, Table> tables_;
};

}  // namespace moeserve::cuda
