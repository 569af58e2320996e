// The rank that decides what a step computes.
#pragma once

#include <map>
#include <vector>

#include "engine/ranks/step_message.h"
#include "engine/step/step_listener.h"
#include "kernels/exchange/exchange.h"
#include "kernels/storage_observer.h"

namespace moeserve {

// Announces every step of a model to the followers (follower.h), with what has happened to caches
// and states since the step before, and compares their checksums after it. Used by one thread at a
// time. Must outlive the model, but not its caches and states.
class Leader final : public StepListener, public StorageObserver {
 public:
  explicit Leader(Exchange& exchange) : exchange_(exchange) {}
  // Stops observing. Followers must have been stopped before, or they end by their deadline.
  ~Leader() override;

  // Tells the followers to end. No step may follow.
  void StopFollowers();

  void BeforeStep(StepKind kind, const Batch& batch, KvCacheStorage& cache,
                  const PredictionSources& sources, const StepDivision& division) override;
  absl::Status AfterStep(uint64_t checksum, const absl::Status& own) override;

  void CopiesPage(uint64_t storage, int table, int32_t from, int32_t to) override;
  void ClearsState(uint64_t storage, int32_t slot) override;
  void AdvancesState(uint64_t storage, int32_t from, int rows, int32_t to) override;
  void Drops(uint64_t storage) override;

 private:
  void Send(StepMessage message);

  Exchange& exchange_;
  uint64_t number_ = 0;                 // of the last step
  std::vector<StorageChange> changes_;  // since the last step
  std::map<uint64_t, KvCacheStorage*> caches_;
  std::map<uint64_t, StateStorage*> states_;
};

}  // namespace moeserve
