// The decoder: embeddings, layers, head. Immutable weights plus activations for one step at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/model/batch.h"
#include "engine/model/packed_cache.h"
#include "engine/model/step_report.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "kernels/backend.h"

namespace moeserve {

struct ModelOptions {
  DType compute = DType::kF32;  // kF32 or kBF16: the type of products' inputs
  // Not kNone (with kBF16): weights as integers, see QuantizationOf().
  Quantization quantization = Quantization::kNone;
};

class Model {
 public:
  // Validates the spec, takes every weight from `source` and lays it out for `backend`, which must
  // outlive the model. Linear layers that `packed_cache` (of this backend, or null) has are taken
  // from there. InvalidArgument, ResourceExhausted (memory) or the source's error.
  static Result<std::unique_ptr<Model>> Create(const ModelSpec& spec, const ModelOptions& options,
                                               WeightSource& source, Backend& backend,
                                               PackedCache* packed_cache = nullptr);
  ~Model();

  // Runs one ragged step: appends to `cache` and writes logits [batch.logit_rows.size(), V] (f32,
  // host) into `logits`. Rows that the batch has the device sample are drawn into `samples`
  // [batch.samples.size()] instead. One caller at a time.
  StepReport Forward(const Batch& batch, KvCacheStorage& cache, const StepOptions& options,
                     std::span<float> logits, std::span<SampleResult> samples = {});

  // Floats of memory that the looks of a step take for every token.
  int64_t LookFloatsPerToken(StepLooks looks) const;

  // Takes the device memory of a step of so many tokens and rows of logits over a cache of this
  // type before requests depend on it. `widest`: the most that a request may change of its routing
  // (null: nothing); `looks`: the most that a step reports. ResourceExhausted; where the device has
  // no memory even for the activations, the process stops with the numbers.
  absl::Status Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                       const RoutingControl* widest = nullptr, StepLooks looks = {});

  const ModelSpec& spec() const;
  const ModelOptions& options() const;
  Backend& backend() const;
  int64_t weight_bytes() const;  // as laid out for the backend

 private:
  class Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve
