// Counts what the experts do, from the routing plans of every step.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/batch.h"
#include "engine/expert_stats.h"
#include "engine/hidden_samples.h"
#include "engine/model/spec.h"
#include "engine/route_layout.h"
#include "engine/route_log.h"
#include "engine/token_expert_counts.h"

namespace moeserve {

struct RecorderOptions {
  int router_stats_interval = 16;  // router scores are looked at every so many steps; 0: never
  int64_t token_counts_bytes = 64 << 20;  // most memory of TokenExpertCounts; larger: none are kept
  int64_t hidden_samples = 0;             // rows kept of each routed block; 0: none
  bool any_selection = false;  // rows may choose more experts than the model's settings say
  // Told every plan, and scores and inputs at every step where it wants them, on the recording
  // thread. May be null; outlives the recorder.
  StepHooks* observer = nullptr;
};

// Statistics of `spec` before any token was run: all counters 0, parameters and widths filled in.
ExpertStats EmptyExpertStats(const ModelSpec& spec, bool any_selection = false);

// Parameters of every expert of every routed block, in the order of RouteLayout.
std::vector<int64_t> ExpertParameters(const ExpertStats& stats);

// One thread records; any thread takes snapshots. A step's counts become visible at once, when it
// is published.
class ExpertRecorder : public StepHooks {
 public:
  // `log` may be null and outlives the recorder: it is told the routes of every token.
  ExpertRecorder(const ModelSpec& spec, const RecorderOptions& options, RouteLog* log = nullptr);

  // Recording thread, in this order for every step.
  void BeginStep(const Batch& batch);
  void OnPlan(int layer, BlockKind block, const RoutingPlan& plan) override;
  bool WantsScores() const override {
    return sampling_ || (options_.observer != nullptr && options_.observer->WantsScores());
  }
  void OnScores(int layer, BlockKind block, const RoutingPlan& plan,
                std::span<const float> scores) override;
  bool WantsInputs() const override {
    return WantsInputsItself() ||
           (options_.observer != nullptr && options_.observer->WantsInputs());
  }
  void OnInputs(int layer, BlockKind block, const RoutingPlan& plan,
                std::span<const float> inputs) override;
  // Adds the step to the counters.
  void Publish();

  // Tokens of the current step whose router scores had no finite maximum in some block.
  const std::vector<bool>& failed_tokens() const { return failed_; }

  // Any thread.
  const RouteLayout& layout() const { return layout_; }
  ExpertStats Snapshot() const;
  // Null where the table would be larger than the options allow.
  const TokenExpertCounts* token_counts() const { return token_counts_.get(); }
  // By routed block; empty where none are kept.
  std::vector<HiddenSample> HiddenSamples() const;

 private:
  bool WantsInputsItself() const { return sampling_ && !reservoirs_.empty(); }

  const RouteLayout layout_;
  const RecorderOptions options_;
  RouteLog* const log_;
  std::vector<bool> sigmoid_;  // by routed block: the gate is a sigmoid
  std::vector<bool> diverse_;  // by routed block: counts for the diversity histogram
  const Batch* batch_ = nullptr;
  std::vector<int32_t> cache_block_;  // [T] of the current step
  int step_kind_ = 0;                 // index into the step histograms
  bool sampling_ = false;
  uint64_t steps_ = 0;
  ExpertStats pending_;           // the current step; zero between steps
  std::vector<uint8_t> touched_;  // by routed block: pending_ is not zero
  std::vector<bool> failed_;
  std::vector<int32_t> distinct_;    // [T] scratch of OnPlan
  std::vector<int32_t> diversity_;   // [T] distinct experts of all diversity blocks so far
  std::vector<double> probability_;  // [E] scratch of OnScores
  std::unique_ptr<TokenExpertCounts> token_counts_;

  mutable std::mutex mutex_;
  ExpertStats total_;  // guarded by mutex_
  mutable std::mutex reservoir_mutex_;
  std::vector<HiddenReservoir> reservoirs_;  // by routed block; guarded by reservoir_mutex_
};

}  // namespace moeserve
