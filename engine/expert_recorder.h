// Counts what the experts do, from the routing plans of every step.
#pragma once

#include <mutex>
#include <vector>

#include "engine/batch.h"
#include "engine/expert_stats.h"
#include "engine/model/spec.h"
#include "engine/route_log.h"

namespace moeserve {

// The engine thread records; any thread takes snapshots. A step's counts become visible at once,
// when it is published.
class ExpertRecorder : public StepHooks {
 public:
  // `log` may be null and outlives the recorder: it is told the routes of every token.
  explicit ExpertRecorder(const ModelSpec& spec, RouteLog* log = nullptr);

  // Engine thread, in this order for every step.
  void BeginStep(const Batch& batch);
  void OnPlan(int layer, BlockKind block, const RoutingPlan& plan) override;
  // Adds the step to the counters.
  void Publish();

  // Tokens of the current step whose router scores had no finite maximum in some block.
  const std::vector<bool>& failed_tokens() const { return failed_; }

  // Entries of a request's expert counts: all experts of all routed blocks.
  uint32_t num_buckets() const { return num_buckets_; }

  // Any thread.
  ExpertStats Snapshot() const;

 private:
  RouteLog* const log_;
  const Batch* batch_ = nullptr;
  std::vector<uint32_t> first_bucket_;  // by routed block
  uint32_t num_buckets_ = 0;
  ExpertStats pending_;              // the current step; zero between steps
  std::vector<int> block_of_layer_;  // [2 * layers] index into blocks, -1: not routed
  std::vector<bool> failed_;
  std::vector<uint64_t> seen_;                 // [experts] last token mark that touched the expert
  std::vector<int32_t> expert_of_assignment_;  // scratch of OnPlan
  uint64_t mark_ = 0;

  mutable std::mutex mutex_;
  ExpertStats total_;  // guarded by mutex_
};

}  // namespace moeserve
