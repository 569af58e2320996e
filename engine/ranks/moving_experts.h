// Changes which experts a rank has while its model runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/status.h"
#include "engine/model/model.h"
#include "engine/ranks/step_message.h"
#include "engine/spec/weights.h"
#include "engine/weights/expert_placement.h"
#include "kernels/backend.h"

namespace moeserve {

// Where a rank gets experts that it has not loaded: its own files, and a backend like the model's
// (same instruction set and type) that lays them out. They are used by a background thread, one
// load at a time, and by nobody else; they outlive the user. Null: a rank can only use what it has.
struct ExpertSource {
  WeightSource* weights = nullptr;
  Backend* backend = nullptr;
  int64_t bytes_per_second = int64_t{200} << 20;  // of packed weights, about; 0: not limited
  bool waits = false;  // steps wait for loads, so that tests do not depend on the time
};

// Prepares placements one after the other. All functions are called by the model's thread, between
// steps. After the last step the model may be destroyed before this object.
class MovingExperts {
 public:
  // What ready() returns if a rank cannot have the experts of the prepared placement.
  static constexpr uint32_t kImpossible = UINT32_MAX;

  MovingExperts(Model& model, const ExpertSource& source)
      : model_(model), source_(source), current_(model.placement()) {}
  // Waits for a load to end.
  ~MovingExperts();
  MovingExperts(const MovingExperts&) = delete;
  MovingExperts& operator=(const MovingExperts&) = delete;

  const std::shared_ptr<const ExpertPlacement>& current() const { return current_; }
  // The placement that is being prepared; null if there is none.
  const std::shared_ptr<const ExpertPlacement>& next() const { return next_; }

  // Begins to load what this rank lacks for `next`, on a thread of the lowest priority. Another
  // placement that was not used is forgotten, after its load has ended.
  void Prepare(std::shared_ptr<const ExpertPlacement> next);
  // Returns the version of next() once this rank has all of its experts, 0 before, kImpossible
  // after an error, which status() returns.
  uint32_t ready();
  const absl::Status& status() const { return status_; }
  // From the next step on, the experts are where next() says; ready() has returned its version.
  void UseNext();
  // Frees the experts that this rank does not hold any more, on another thread. Called after every
  // step.
  void AfterStep();

 private:
  void Load(ExpertPlacement::Blocks missing);

  Model& model_;
  const ExpertSource source_;
  std::shared_ptr<const ExpertPlacement> current_, next_;
  absl::Status status_;
  bool switched_ = false;  // the step that follows is the first one with current_
  // Written by the thread before loaded_ is set.
  Result<LoadedExperts> experts_ = LoadedExperts();
  std::atomic<bool> loaded_ = false;
  std::jthread loader_, cleaner_;
};

// Returns the experts whose holders differ; both placements are of one model.
std::vector<ExpertMove> MovesBetween(const ExpertPlacement& from, const ExpertPlacement& to);

// Returns the placement after the moves. InvalidArgument, with what was expected and found, if a
// move is of an expert that does not exist or has no matrices, or its holders are not ranks.
Result<std::shared_ptr<const ExpertPlacement>> AfterMoves(const ExpertPlacement& from,
                                                          const std::vector<ExpertMove>& moves,
                                                          uint32_t version);

}  // namespace moeserve
