// Collects what the experts do: counts of every step, router scores of some, samples of inputs.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/model/batch.h"
#include "engine/model/step_report.h"
#include "engine/routes/route_layout.h"
#include "engine/routes/route_log.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "engine/statistics/hidden_samples.h"
#include "engine/statistics/step_observer.h"
#include "engine/statistics/token_expert_counts.h"
#include "kernels/route_counters.h"

namespace moeserve {

struct RecorderOptions {
  // Samples the router scores of about router_stats_rows rows per block every router_stats_interval
  // steps: rows of whole tokens, different ones each time. Interval 1: all rows; 0: never.
  int router_stats_interval = 64;
  int router_stats_rows = 64;
  int64_t token_counts_bytes = 64 << 20;  // largest token x expert table; a larger one is not kept
  int64_t hidden_samples = 0;             // router inputs kept per routed block; 0: none
  bool any_selection = false;        // rows may choose more experts than the model's settings say
  StepObserver* observer = nullptr;  // may be null; outlives the recorder
};

// Statistics of `spec` before any token was run: all counters 0, parameters and widths filled in.
ExpertStats EmptyExpertStats(const ModelSpec& spec, bool any_selection = false);

// What a backend has to count for a recorder of `spec`.
CountSettings RecorderCounts(const ModelSpec& spec, const RecorderOptions& options);

// The most that a recorder looks at in a step.
StepLooks RecorderLooks(const RecorderOptions& options);

// The backend counts every step (RouteCounters); the recorder adds what counters cannot give. One
// thread records; any thread takes snapshots. The counts of a device become visible at most once a
// second and in Refresh(); those of the CPU when the step ends.
class ExpertRecorder {
 public:
  // `log` may be null; it receives the routes of every token and must exist while steps run.
  // `counters` count RecorderCounts(); null: nothing is recorded and snapshots stay empty.
  ExpertRecorder(const ModelSpec& spec, const RecorderOptions& options, RouteLog* log,
                 std::unique_ptr<RouteCounters> counters);

  // Recording thread: before a step, what Model::Forward() is to report; after it, the report.
  StepOptions BeginStep();
  void EndStep(const Batch& batch, const StepReport& report);
  // Recording thread, between steps: makes the counts of all steps visible.
  void Refresh();

  // Any thread.
  const RouteLayout& layout() const { return layout_; }
  ExpertStats Snapshot() const;
  // Empty where the table would be larger than the options allow. Valid as long as the recorder.
  std::optional<TokenExpertCounts> token_counts() const;
  // By routed block; empty where none are kept.
  std::vector<HiddenSample> HiddenSamples() const;

 private:
  // Rows of router scores that were sampled and not yet summed up, in order.
  struct SampledRows {
    struct Row {
      int block = 0;      // of the layout
      size_t chosen = 0;  // number of experts
    };
    std::vector<Row> rows;
    std::vector<float> scores;
    std::vector<int32_t> chosen;
  };

  bool samples_inputs() const { return sampling_ && !reservoirs_.empty(); }
  void LogRoutes(const Batch& batch, const BlockReport& report);
  void SampleScores(const Batch& batch, const BlockReport& report);
  void SampleInputs(const Batch& batch, const BlockReport& report);
  // Adds one row of scores [E] and the experts chosen for it. Under router_mutex_.
  void AddRow(int block, std::span<const float> scores, std::span<const int32_t> chosen) const;
  void SumSamples() const;  // those of samples_; under router_mutex_

  const RouteLayout layout_;
  const RecorderOptions options_;
  RouteLog* const log_;
  const std::unique_ptr<RouteCounters> counters_;
  const ExpertStats empty_;      // shapes and facts of the model
  int64_t table_tokens_ = 0;     // vocabulary of the token x expert table; 0: none
  std::vector<GateKind> gates_;  // by routed block

  // Recording thread.
  uint64_t steps_ = 0;
  bool sampling_ = false;     // router scores of the current step
  bool log_routes_ = false;   // of the current step
  bool has_samples_ = false;  // the last step left sampled rows
  std::chrono::steady_clock::time_point refreshed_at_;
  bool fresh_ = true;  // no step since the last Refresh()

  // Sampled rows are summed up while the next step runs, or by the first snapshot before that: the
  // exponentials would keep a device waiting.
  mutable std::mutex router_mutex_;
  mutable SampledRows samples_;               // guarded by router_mutex_
  mutable std::vector<RouterStats> router_;   // by routed block; guarded by router_mutex_
  mutable std::vector<RouterStats> partial_;  // sums of one step: scratch of SumSamples()
  mutable std::vector<double> probability_;   // scratch of AddRow()

  mutable std::mutex reservoir_mutex_;
  std::vector<HiddenReservoir> reservoirs_;  // by routed block; guarded by reservoir_mutex_
};

}  // namespace moeserve
