// Launches of the recurrences of linear attention and of state-space layers.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// The largest key_dim of a recurrence on this device, whose states are held in registers.
inline constexpr int kMaxRecurrentKeys = 256;

struct RecurrenceLaunch {
  RecurrenceArgs args;  // `states` and `block` are not used
  RecurrentShape shape;
  // The recurrence's part of slot 0: the state, and then the inputs of pending tokens. That of a
  // slot begins `slot_floats` behind that of the slot before.
  float* states = nullptr;
  int64_t slot_floats = 0;
  // [rows] as in ShortConvolutionLaunch
  const int32_t* sequence = nullptr;
  const int32_t* slot = nullptr;
  const int32_t* keep = nullptr;
  const int32_t* snapshot = nullptr;
  const int32_t* pending = nullptr;
};
// Asynchronous on `stream`. Computes RecurrenceArgs and updates the states.
void LaunchRecurrence(const RecurrenceLaunch& launch, cudaStream_t stream);

// Stores at `to`, which may be `from`, the state at `from` after the first `rows` of its pending
// tokens. Asynchronous on `stream`.
void LaunchAdvanceRecurrence(const RecurrentShape& shape, const float* from, int rows, float* to,
                             cudaStream_t stream);

}  // namespace moeserve::cuda
