// Cosines and sines of a step's positions in device memory.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/positions/rope.h"

namespace moeserve::cuda {

// The tables are computed once per step for all layers with the same rotary settings. Only the
// backend's thread uses this class.
class RopeTables {
 public:
  // Returns whether there is no room for the angles of a step with this many tokens, so that
  // Reserve() would reallocate them.
  bool MustGrow(const RopeSettings& settings, int64_t tokens) const;
  // Grows the tables of these settings, which may move them, so the stream must be idle.
  // ResourceExhausted if memory runs out.
  absl::Status Reserve(const RopeSettings& settings, int64_t tokens, cudaStream_t stream);

  // Must be called before the operations of a step are issued, also before they are captured.
  void BeginStep();
  // Returns [step.tokens, dimensions / 2] pairs (cosine, sine), valid until the next Reserve() of
  // these settings. The first call in a step enqueues the kernel that computes them. Requires an
  // earlier Reserve() for at least as many tokens.
  const float2* Angles(const RopeSettings& settings, const StepView& step, cudaStream_t stream);

 private:
  struct Table {
    RopeSettings settings;
    DeviceMemory frequencies;  // double [dimensions / 2]; if settings.has_long(), those of long
                               // sequences follow; with XPOS, the rates [dimensions / 2] follow
    DeviceMemory angles;
    int64_t tokens = 0;     // capacity of `angles`
    bool laid_out = false;  // whether the angles were computed in this step
  };
  // Returns the table whose settings have SameAngles(); null if there is none.
  Table* Find(const RopeSettings& settings);
  const Table* Find(const RopeSettings& settings) const;

  std::vector<Table> tables_;
};

}  // namespace moeserve::cuda
