// The ranks that compute what the leader announces.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "engine/model/model.h"
#include "engine/ranks/moving_experts.h"
#include "engine/ranks/step_message.h"
#include "engine/step/step_listener.h"
#include "kernels/exchange/exchange.h"

namespace moeserve {

// Runs the steps of the leader on the follower's model. Used by one thread.
class Follower final : public StepListener {
 public:
  // `source`: where this rank gets the experts that are moved to it.
  Follower(Exchange& exchange, const StepLimits& limits, const ExpertSource& source = {})
      : exchange_(exchange), limits_(limits), source_(source) {}

  // Runs steps until the leader stops its followers, then returns OK. `model` was created with the
  // exchange and with this object as its listener. Returns an error if the leader is lost or has
  // sent what this rank cannot do; then the process must end, so that the leader notices.
  absl::Status Run(Model& model);

  void Loaded(Model& model) override;
  void BeforeStep(StepKind, const Batch&, KvCacheStorage&, const PredictionSources&,
                  const StepDivision&) override {}
  absl::Status AfterStep(uint64_t checksum, const absl::Status& own) override;

 private:
  Result<StepMessage> Receive();
  absl::Status Apply(Model& model, const StorageChange& change);
  // Does what a message says about the placement of experts.
  absl::Status PlaceExperts(const StepMessage& message);
  absl::Status RunStep(Model& model, const StepMessage& message);

  Exchange& exchange_;
  const StepLimits limits_;
  const ExpertSource source_;
  std::unique_ptr<MovingExperts> moving_;
  uint64_t number_ = 0;  // of the last step
  // By the leader's ids.
  std::map<uint64_t, std::unique_ptr<KvCacheStorage>> caches_;
  std::map<uint64_t, std::unique_ptr<StateStorage>> states_;
  std::map<uint64_t, PageTables> tables_;  // of caches_
};

}  // namespace moeserve
