// Tokens drawn from logits on the device, the same ones that the engine's sampler draws on the
// host (engine/sampler.h, kernels/base/sampling.h).
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime.h"

namespace moeserve::cuda {

inline constexpr int kMaxAlternatives = 20;

// What to draw from one row of logits. In device memory, so that a replayed graph reads new ones.
struct SampleRow {
  float scale;       // SamplingScale(temperature); 0: the most probable token
  int32_t top_k;     // at most 0: no limit
  double top_p;      // (0, 1]
  float min_p;       // [0, 1]
  int32_t row;       // of the logits; below 0: nothing is done and the result is left as it is
  double uniform;    // UniformDraw of the row, in [0, 1)
  int32_t logprobs;  // number of alternatives, up to kMaxAlternatives; -1: no log-probability
};

struct SampleResult {
  int32_t token;   // -1 where a logit is NaN
  int32_t finite;  // 0: a logit is NaN or infinite. The token is valid if it is only infinite.
  // With logprobs >= 0 and without NaN, under the softmax of the logits alone:
  float logprob;
  int32_t rank;  // number of tokens that are more probable (equal logits: lower ids are)
  // The most probable tokens, descending, as many as asked for; entries after them are left as they
  // are. No more than the vocabulary has.
  float top_logprob[kMaxAlternatives];
  int32_t top_token[kMaxAlternatives];
};

struct SampleLaunch {
  const SampleRow* rows = nullptr;  // [count], device
  SampleResult* results = nullptr;  // [count], device; results[i] of rows[i]
  int count = 0;                    // the grid's size
  const float* logits = nullptr;    // [R, stride], device
  int64_t stride = 0;               // elements from row to row, at least `vocabulary`
  int vocabulary = 0;               // 1 to 2^23
};
// Asynchronous on `stream`. A result depends on its own row alone.
void LaunchSample(const SampleLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda
