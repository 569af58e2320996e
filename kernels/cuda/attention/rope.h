// Rotary positions. Launches are asynchronous on `stream`; pointers are device pointers.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/step_view.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Cosines and sines of position * frequency with the bits of CpuBackend::Rope: angle, sine and
// cosine in double, rounded to float.
struct RopeAnglesLaunch {
  StepView step;
  int pairs = 0;                        // of rotated dimensions
  const double* frequencies = nullptr;  // [pairs]
  float2* angles = nullptr;             // [step.tokens, pairs] (cosine, sine)
};
void LaunchRopeAngles(const RopeAnglesLaunch& args, cudaStream_t stream);

// Rotates the leading dimensions of every head in place. Padding rows are not changed.
struct RopeLaunch {
  int head_dim = 0;
  int dimensions = 0;  // leading dimensions that are rotated, even
  bool interleaved = false;
  const float2* angles = nullptr;  // [step.tokens, dimensions / 2]
  StepView step;
  const int32_t* token_of_row = nullptr;  // [rows]; null: row r is token r
  const int32_t* valid_rows = nullptr;    // on the device: rows from here on are not changed
  float* rows = nullptr;
  int num_rows = 0;  // launched; the upper bound where valid_rows is given
  int heads = 0;     // adjacent
  int64_t stride = 0;
};
void LaunchRope(const RopeLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda
