// The operations on a step's queries, keys and values between the QKV projection and attention.
#pragma once

#include <cstdint>

#include "kernels/cuda/cache/kv_layer_view.h"
#include "kernels/cuda/cache/step_view.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// The norm of one vector.
struct VectorNorm {
  bool layer = false;
  float eps = 1e-5f;
  const float* scales = nullptr;  // [width of the vector]; null disables the norm
  const float* shifts = nullptr;  // null if there are none
};

// Normalises queries and keys, applies rotary positions, and writes keys and values to the cache.
// One launch computes the same bits as LaunchNorm(), LaunchRope() and a copy one after another.
// Padding rows are neither changed nor written to the cache. The padding columns of written rows
// become zeros.
struct NormRopeAppendLaunch {
  KvLayerView cache;
  StepView step;
  float* query = nullptr;         // f32 [tokens, heads * head_dim], updated in place
  const float* keys = nullptr;    // f32 [tokens, num_kv_heads * head_dim]
  const float* values = nullptr;  // f32 [tokens, num_kv_heads * value_dim]
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  int64_t value_stride = 0;
  int heads = 0;  // 0 if there are no queries
  VectorNorm query_norm = {};
  VectorNorm key_norm = {};
  bool norm_heads = true;  // true: each head is normalised separately; false: all heads of a row as
                           // one vector
  int dimensions = 0;      // number of dimensions of a head that are rotated, even
  bool interleaved = false;
  int distance = 0;  // of the dimensions of a pair, if not interleaved; 0: dimensions / 2
  const float2* angles = nullptr;      // [step.tokens, dimensions / 2]
  const float2* key_angles = nullptr;  // those of keys, if they differ (XPOS); null: `angles`
};
void LaunchNormRopeAppend(const NormRopeAppendLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda
