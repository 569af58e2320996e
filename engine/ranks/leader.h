// The rank that decides what a step computes.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "engine/ranks/moving_experts.h"
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
  // `source`: where this rank gets the experts that are moved to it.
  explicit Leader(Exchange& exchange, const ExpertSource& source = {})
      : exchange_(exchange), source_(source) {}
  // Stops observing. Followers must have been stopped before, or they end by their deadline.
  ~Leader() override;

  // To be called before the model is loaded: where this rank gets the experts that are moved to it.
  void SetSource(const ExpertSource& source) { source_ = source; }

  // Announces a placement with the next step. When all ranks have loaded their experts, the step
  // after that uses it. Its version is above that of placement(); it takes the place of one that
  // was announced and is not used yet. Any thread may call this.
  void Announce(std::shared_ptr<const ExpertPlacement> placement);
  // Returns the placement of the last step, and whether another one is announced or shall be; null
  // before the model is loaded. Any thread may call this.
  std::pair<std::shared_ptr<const ExpertPlacement>, bool> placement() const;

  // Returns what Timed() was told; 0 before. Any thread may call this.
  absl::Duration longest_step() const;
  // From the next step on, a rank that others wait for longer than this is lost, on all ranks. Any
  // thread may call this.
  void LimitWaits(absl::Duration timeout);

  // Tells the followers to end. No step may follow.
  void StopFollowers();

  void Loaded(Model& model) override;
  void Timed(absl::Duration longest) override;
  void BeforeStep(StepKind kind, const Batch& batch, KvCacheStorage& cache,
                  const PredictionSources& sources, const StepDivision& division) override;
  absl::Status AfterStep(uint64_t checksum, const absl::Status& own) override;
  // The followers may wait for this rank in the middle of the step: it is lost.
  absl::Status StepFailed() override;

  // Returns the first error of AfterStep(), after which no step can follow. Any thread may call
  // this.
  absl::Status status() const;

  void CopiesPage(uint64_t storage, int table, int32_t from, int32_t to) override;
  void ClearsState(uint64_t storage, int32_t slot) override;
  void AdvancesState(uint64_t storage, int32_t from, int rows, int32_t to) override;
  void Drops(uint64_t storage) override;

 private:
  void Send(StepMessage message);
  // AfterStep(): gathers the checks of all ranks, and compares them with the leader's.
  absl::Status CompareChecks(uint64_t checksum, const absl::Status& own);
  // Returns the error of a rank whose files are damaged, if there is one.
  absl::Status FindDamage();
  // Waits a little for the link to tell why a follower ends.
  void WaitForReason() const;
  // Uses a placement that all ranks have prepared, and announces another one.
  void PlaceExperts(StepMessage& message);

  Exchange& exchange_;
  ExpertSource source_;
  Model* model_ = nullptr;  // once it is loaded
  std::unique_ptr<MovingExperts> moving_;
  bool all_ready_ = false;  // to use moving_->next()
  mutable Mutex mutex_;
  std::shared_ptr<const ExpertPlacement> wanted_ ABSL_GUARDED_BY(mutex_);  // null: none
  std::shared_ptr<const ExpertPlacement> used_ ABSL_GUARDED_BY(mutex_);
  bool announced_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  absl::Duration longest_step_ ABSL_GUARDED_BY(mutex_);
  absl::Duration timeout_ ABSL_GUARDED_BY(mutex_);  // that followers do not know yet; 0: none
  uint64_t number_ = 0;                             // of the last step
  std::vector<StorageChange> changes_;              // since the last step
  std::map<uint64_t, KvCacheStorage*> caches_;
  std::map<uint64_t, StateStorage*> states_;
  std::map<uint64_t, PageTables> tables_;  // of caches_
};

}  // namespace moeserve
