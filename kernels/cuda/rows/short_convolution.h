// Launches of short convolutions.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

struct ShortConvolutionLaunch {
  // The block's part of slot 0, which begins with [taps - 1 + pending rows, cols] f32. A slot's
  // part begins `slot_floats` behind that of the slot before.
  float* states = nullptr;
  int64_t slot_floats = 0;
  bool gated = true;  // as in ShortConvolutionArgs
  int taps = 1;
  const float* weight = nullptr;      // [taps, cols]
  const float* bias = nullptr;        // [cols], or null
  const int32_t* sequence = nullptr;  // [rows] adjacent rows with equal numbers are one sequence's
  // [rows] the slot of each row's sequence, or -1; then StepStates::keep, snapshot and pending.
  const int32_t* slot = nullptr;
  const int32_t* keep = nullptr;
  const int32_t* snapshot = nullptr;
  const int32_t* pending = nullptr;
  RowsView input;   // f32 [rows, 3 * cols], or [rows, cols]
  RowsView output;  // f32 or bf16 [rows, cols]
};
// Asynchronous on `stream`. Computes ShortConvolutionArgs and updates the states.
void LaunchShortConvolution(const ShortConvolutionLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda
