// Counts what the experts do, from the routing plans of every step.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/model/batch.h"
#include "engine/routes/route_layout.h"
#include "engine/routes/route_log.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "engine/statistics/hidden_samples.h"
#include "engine/statistics/token_expert_counts.h"
#include "kernels/route_counters.h"

namespace moeserve {

struct RecorderOptions {
  // Router scores are looked at every so many steps, 0: never; then of about so many rows of each
  // routed block, those of whole tokens, in turn. At 1, of all rows.
  int router_stats_interval = 64;
  int router_stats_rows = 64;
  int64_t token_counts_bytes = 64 << 20;  // most memory of TokenExpertCounts; larger: none are kept
  int64_t hidden_samples = 0;             // rows kept of each routed block; 0: none
  bool any_selection = false;  // rows may choose more experts than the model's settings say
  // Told every plan, and scores and inputs at every step where it wants them, on the recording
  // thread. May be null; outlives the recorder.
  StepHooks* observer = nullptr;
};

// Statistics of `spec` before any token was run: all counters 0, parameters and widths filled in.
ExpertStats EmptyExpertStats(const ModelSpec& spec, bool any_selection = false);

// What a device has to count for a recorder of `spec`.
CountSettings RecorderCounts(const ModelSpec& spec, const RecorderOptions& options);

// What a recorder looks at in some of its steps.
StepLooks RecorderLooks(const RecorderOptions& options);

// One thread records; any thread takes snapshots. A step's counts become visible at once, when it
// is published. Where a device counts, it counts every step, plans are fetched only for others that
// want them, and counts become visible at most once a second, or when Merge() asks for it.
class ExpertRecorder : public StepHooks {
 public:
  // `log` may be null; it is told the routes of every token and must be there while steps run.
  // `device` counts RecorderCounts(); null: the recorder does, from the plans.
  ExpertRecorder(const ModelSpec& spec, const RecorderOptions& options, RouteLog* log = nullptr,
                 std::unique_ptr<RouteCounters> device = nullptr);

  // Recording thread, in this order for every step.
  void BeginStep(const Batch& batch);
  bool WantsPlans() const override {
    return device_ == nullptr || keep_routes_ || options_.observer != nullptr;
  }
  RouteCounters* Counters() override { return device_.get(); }
  void OnIssued() override { AddLooks(); }
  void OnOutcome(const StepOutcome& outcome) override;
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
  // Recording thread, between steps: makes all counts of a device visible.
  void Merge();

  // Tokens of the current step whose router scores had no finite maximum in some block.
  const std::vector<bool>& failed_tokens() const { return failed_; }

  // Any thread.
  const RouteLayout& layout() const { return layout_; }
  ExpertStats Snapshot() const;
  // As of now. Null where the table would be larger than the options allow.
  const TokenExpertCounts* token_counts() const;
  // By routed block; empty where none are kept.
  std::vector<HiddenSample> HiddenSamples() const;

 private:
  bool WantsInputsItself() const { return sampling_ && !reservoirs_.empty(); }
  void LogRoutes(const RoutedBlock& block, const RoutingPlan& plan);
  // One row of scores [E] and the experts that were chosen for it.
  void AddLook(int block, std::span<const float> scores, std::span<const int32_t> chosen);
  void AddLooks();          // those of looks_
  void MergeRouterStats();  // under mutex_

  const RouteLayout layout_;
  const RecorderOptions options_;
  RouteLog* const log_;
  const std::unique_ptr<RouteCounters> device_;
  bool merged_ = true;  // every step that the device counted
  std::chrono::steady_clock::time_point merged_at_;
  bool keep_routes_ = false;
  std::vector<bool> sigmoid_;  // by routed block: the gate is a sigmoid
  std::vector<bool> diverse_;  // by routed block: counts for the diversity histogram
  const Batch* batch_ = nullptr;
  std::vector<int32_t> cache_block_;  // [T] of the current step
  int step_kind_ = 0;                 // index into the step histograms
  bool sampling_ = false;
  uint64_t steps_ = 0;

  // What the current step did; empty between steps.
  struct ActiveExpert {
    int block = 0;  // of the layout
    int expert = 0;
    uint32_t rows = 0;        // all that chose it
    uint32_t recomputed = 0;  // of them
    uint32_t decoded = 0;
    uint32_t tokens = 0;  // not recomputed
    double weights = 0.0;
  };
  struct PendingBlock {
    uint32_t active = 0;  // experts with a row
    uint64_t nonfinite_rows = 0;
    std::vector<uint64_t> distinct_histogram;
  };
  // Scratch of OnPlan, all but the marks 0 between calls.
  struct Working {
    uint64_t mark = 0;  // of the last token that chose it
    double weights = 0.0;
    uint32_t rows = 0;
    uint32_t recomputed = 0;
    uint32_t decoded = 0;
    uint32_t tokens = 0;
  };
  std::vector<Working> working_;  // [E]
  std::vector<int> touched_;      // experts with rows
  uint64_t mark_ = 0;
  std::vector<size_t> counted_;  // indices into token_counts_
  std::vector<ActiveExpert> active_;
  std::vector<PendingBlock> pending_;        // by routed block
  std::vector<RouterStats> pending_router_;  // by routed block

  std::vector<bool> failed_;
  std::vector<RouteLog::Totals> token_totals_;  // [T]
  std::vector<int32_t> diversity_;   // [T] distinct experts of all diversity blocks so far
  std::vector<double> probability_;  // [E] scratch of AddLook
  std::vector<int32_t> chosen_;      // scratch of OnScores
  // Rows that OnScores() has seen, in order. Where a device runs the steps, they are looked at when
  // it runs the next one: the exponentials would keep it waiting.
  struct Looks {
    struct Row {
      int block = 0;
      size_t chosen = 0;  // how many
    };
    std::vector<Row> rows;
    std::vector<float> scores;
    std::vector<int32_t> chosen;
  };
  Looks looks_;
  std::unique_ptr<TokenExpertCounts> token_counts_;
  mutable std::mutex refresh_mutex_;  // of token_counts_ from the device

  // What a step adds to for each expert that had a row, in one place of memory: the vectors of
  // BlockExpertStats would be one for each field.
  struct alignas(64) ExpertCounters {
    uint64_t selections = 0;
    uint64_t decode_selections = 0;
    uint64_t recomputed_selections = 0;
    uint64_t touching_tokens = 0;
    uint64_t visits = 0;
    double weight_sum = 0.0;
  };

  mutable std::mutex mutex_;
  uint64_t tokens_[kNumPhases + 1] = {};  // by phase; every token passes every routed block
  std::vector<std::vector<ExpertCounters>> counters_;  // by routed block; guarded by mutex_
  ExpertStats total_;  // guarded by mutex_, but for what never changes; what
  // counters_ and tokens_ have is 0 in here
  mutable std::mutex reservoir_mutex_;
  std::vector<HiddenReservoir> reservoirs_;  // by routed block; guarded by reservoir_mutex_
};

}  // namespace moeserve
