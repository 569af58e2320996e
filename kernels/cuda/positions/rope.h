// Rotary positions. Launches are asynchronous on `stream`; pointers are device pointers.
#pragma once

#include <cstdint>

#include "kernels/base/position_scale.h"
#include "kernels/cuda/cache/step_view.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Computes cosines and sines of position * frequency, times the magnitude and the factor of XPOS,
// as kernels/cpu/rope.cc does: everything is computed in double precision, then rounded to float.
struct RopeAnglesLaunch {
  StepView step;
  int pairs = 0;                        // number of pairs of rotated dimensions
  const double* frequencies = nullptr;  // [pairs]
  double magnitude = 1.0;
  // Those of long sequences (step.long_sequence); null: all sequences have the same.
  const double* long_frequencies = nullptr;  // [pairs]
  double long_magnitude = 1.0;
  const double* xpos_rates = nullptr;  // [pairs] XposRates(); null: no XPOS
  float2* angles = nullptr;            // [step.tokens, pairs] (cosine, sine)
};
void LaunchRopeAngles(const RopeAnglesLaunch& args, cudaStream_t stream);

// Rotates pairs of dimensions of every head in place. Padding rows are not changed.
struct RopeLaunch {
  int head_dim = 0;
  int first = 0;       // the first dimension that is rotated
  int dimensions = 0;  // number of dimensions that are rotated, even
  bool interleaved = false;
  int distance = 0;  // of the dimensions of a pair, if not interleaved; 0: dimensions / 2
  const float2* angles = nullptr;  // [step.tokens, dimensions / 2]
  StepView step;
  const int32_t* token_of_row = nullptr;  // [rows]; null: row r is token r
  const int32_t* valid_rows = nullptr;    // in device memory: number of rows to rotate; null:
                                          // num_rows
  float* rows = nullptr;
  int num_rows = 0;  // number of rows in the launch; an upper bound if valid_rows is set
  int heads = 0;     // adjacent in a row
  int64_t stride = 0;
};
void LaunchRope(const RopeLaunch& args, cudaStream_t stream);

// Multiplies the rows of each token by the scale of its position.
void LaunchPositionScale(const StepView& step, const PositionScale& scale, float* rows,
                         int64_t cols, int64_t stride, cudaStream_t stream);

}  // namespace moeserve::cuda
