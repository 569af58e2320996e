// The operations on a step's queries, keys and values between their projection and attention.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/kv_layer_view.h"
#include "kernels/cuda/attention/step_view.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// The norm of a vector.
struct VectorNorm {
  bool layer = false;
  float eps = 1e-5f;
  const float* scales = nullptr;  // [width of the vector]; null: no norm
  const float* shifts = nullptr;  // null: none
};

// Norms of queries and keys, their rotary positions, the write of keys and values to the cache: one
// launch with the bits of LaunchNorm, LaunchRope and a copy one after another. Padding rows are not
// changed or written. The padding columns of written rows become zeros, as blocks are
// uninitialised.
struct NormRopeAppendLaunch {
  KvLayerView cache;
  StepView step;
  float* query = nullptr;         // f32 [tokens, heads * head_dim], in place
  const float* keys = nullptr;    // f32 [tokens, num_kv_heads * head_dim]
  const float* values = nullptr;  // the same
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  int64_t value_stride = 0;
  int heads = 0;  // 0: no queries
  VectorNorm query_norm = {};
  VectorNorm key_norm = {};
  bool norm_heads = true;  // each head by itself; else all heads of a row are one vector
  int dimensions = 0;      // leading dimensions of a head that are rotated, even
  bool interleaved = false;
  const float2* angles = nullptr;  // [step.tokens, dimensions / 2]
};
void LaunchNormRopeAppend(const NormRopeAppendLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda
