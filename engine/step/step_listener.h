// Takes part in every step of a model that several ranks compute.
#pragma once

#include <cstdint>
#include <span>

#include "absl/time/time.h"
#include "base/status.h"
#include "engine/step/batch.h"

namespace moeserve {

enum class StepKind : uint8_t { kForward, kEncodeSources, kPredict };

// The rows that a step of prediction layers continues.
struct PredictionSources {
  // [T] rows of the model's last Forward() or, with `predicted`, of its last Predict().
  std::span<const int32_t> rows = {};
  bool predicted = false;
};

class Model;

// What the ranks divide in a step beside the experts.
struct StepDivision {
  bool rows = false;  // RowDivision
  bool head = false;  // the vocabulary: every rank computes a range of the logits
};

// Called by the thread that runs the model.
class StepListener {
 public:
  virtual ~StepListener() = default;
  // Called when the model has been loaded, before its first step.
  virtual void Loaded(Model& /*model*/) {}
  // Called once, before requests run, with about the time of a step that has as many rows as one
  // can have.
  virtual void Timed(absl::Duration /*longest*/) {}
  // Called before the step does anything. `sources` is empty unless `kind` is kPredict.
  virtual void BeforeStep(StepKind kind, const Batch& batch, KvCacheStorage& cache,
                          const PredictionSources& sources, const StepDivision& division) = 0;
  // Called after the step with a checksum of its residual stream and what this rank has found
  // (Model::CheckFiles()). Returns an error if the results of the step must not be used.
  virtual absl::Status AfterStep(uint64_t checksum, const absl::Status& own) = 0;
  // Called if an exception, such as std::bad_alloc, ends a step for which BeforeStep() was called.
  // Returns an error if no step can follow.
  virtual absl::Status StepFailed() { return absl::OkStatus(); }
};

}  // namespace moeserve
