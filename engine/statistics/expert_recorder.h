// Collects expert statistics: counts of every step, sampled router scores and sampled router
// inputs.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "engine/routes/route_layout.h"
#include "engine/routes/route_log.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "engine/statistics/hidden_samples.h"
#include "engine/statistics/step_observer.h"
#include "engine/statistics/token_expert_counts.h"
#include "engine/statistics/token_rows.h"
#include "engine/step/batch.h"
#include "engine/step/step_report.h"
#include "kernels/route_counters.h"

namespace moeserve {

struct RecorderOptions {
  // Every router_stats_interval steps, the router scores of about router_stats_rows rows per block
  // are sampled: all rows of some tokens, of different tokens each time. Interval 1: every row of
  // every step is sampled; 0: none is.
  int router_stats_interval = 64;
  int router_stats_rows = 64;
  // Largest token x expert table in bytes.
  int64_t token_counts_bytes = 64 << 20;
  // If a table of all tokens would be larger: true keeps a table of the most frequent tokens, false
  // keeps none.
  bool frequent_tokens = true;
  int64_t hidden_samples = 0;        // router inputs kept per routed block; 0: none are kept
  bool any_selection = false;        // requests may select more experts per row than the model does
  StepObserver* observer = nullptr;  // may be null; outlives the recorder
  bool observes_encoder = false;     // of a model with two stacks, not the decoder but the encoder
};

// Returns the statistics of `spec` before any token was computed: all counters are 0, parameters
// and widths are filled in.
ExpertStats EmptyExpertStats(const ModelSpec& spec, bool any_selection = false);

// Returns what the backend must count for a recorder of `spec`.
CountSettings RecorderCounts(const ModelSpec& spec, const RecorderOptions& options);

// Returns the most that a recorder asks a step to report.
ReportContents RecorderReportContents(const RecorderOptions& options);

// The backend counts every step (RouteCounters); the recorder adds what counters cannot hold:
// routes, sampled router scores and sampled router inputs. One thread records; any thread may take
// snapshots. Counts made by a device become visible at most once a second and in Refresh(); counts
// made by the CPU, when the step ends.
class ExpertRecorder {
 public:
  // `log` receives the routes of every token and must exist while steps run; it may be null.
  // `counters` must count what RecorderCounts() returns; if null, nothing is recorded and snapshots
  // stay empty.
  ExpertRecorder(const ModelSpec& spec, const RecorderOptions& options, RouteLog* log,
                 std::unique_ptr<RouteCounters> counters);

  // Called by the recording thread. BeginStep() takes the token ids of the next step and returns
  // what Model::Forward() has to report; EndStep() takes that report and the batch with the final
  // phases of its tokens.
  StepOptions BeginStep(std::span<const int32_t> tokens);
  void EndStep(const Batch& batch, const StepReport& report);
  // Called by the recording thread between steps. Makes the counts of all steps visible.
  void Refresh();

  // The following functions may be called by any thread.
  const RouteLayout& layout() const { return layout_; }
  ExpertStats Snapshot() const;
  // Returns the token x expert table; nullopt if the options allow none. Valid as long as the
  // recorder.
  std::optional<TokenExpertCounts> token_counts() const;
  // Returns the sampled router inputs per routed block; empty if none are kept.
  std::vector<HiddenSample> HiddenSamples() const;

 private:
  // Sampled rows of router scores whose statistics were not summed up yet, in the order of
  // sampling.
  struct SampledRows {
    struct Row {
      int block = 0;      // index of the routed block in the layout
      size_t chosen = 0;  // number of chosen experts
    };
    std::vector<Row> rows;
    std::vector<float> scores;
    std::vector<int32_t> chosen;
  };

  bool samples_inputs() const { return sampling_ && options_.hidden_samples > 0; }
  void LogRoutes(const Batch& batch, const BlockReport& report);
  void SampleScores(const Batch& batch, const BlockReport& report);
  void SampleInputs(const Batch& batch, const BlockReport& report);
  // Adds one row's scores [E] and the experts chosen for the row to partial_.
  void AddRow(int block, std::span<const float> scores, std::span<const int32_t> chosen) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(router_mutex_);
  void SumSamples() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(router_mutex_);  // sums up samples_

  const RouteLayout layout_;
  const RecorderOptions options_;
  RouteLog* const log_;
  const std::unique_ptr<RouteCounters> counters_;
  const ExpertStats empty_;        // shapes and sizes of the model's experts, counters 0
  int64_t table_rows_ = 0;         // rows of the token x expert table; 0: no table
  std::optional<TokenRows> rows_;  // owners of the table's rows; nullopt if each token has its row
  std::vector<GateKind> gates_;    // by routed block

  // The following members are used by the recording thread only.
  uint64_t steps_ = 0;
  bool sampling_ = false;     // whether the current step's router scores are sampled
  bool log_routes_ = false;   // whether the current step's routes are logged
  bool has_samples_ = false;  // whether the last step left sampled rows to sum up
  std::chrono::steady_clock::time_point refreshed_at_;
  bool fresh_ = true;  // whether no step has ended since the last Refresh()

  // The sampled rows of a step are summed up while the next step runs, or by a snapshot if one is
  // taken before. Summing them up between steps would leave the device idle while the host computes
  // exponentials.
  mutable Mutex router_mutex_;
  mutable SampledRows samples_ ABSL_GUARDED_BY(router_mutex_);
  mutable std::vector<RouterStats> router_ ABSL_GUARDED_BY(router_mutex_);  // by routed block
  // Sums over one step: scratch of SumSamples().
  mutable std::vector<RouterStats> partial_ ABSL_GUARDED_BY(router_mutex_);
  mutable std::vector<double> probability_ ABSL_GUARDED_BY(router_mutex_);  // scratch of AddRow()

  mutable Mutex reservoir_mutex_;
  std::vector<HiddenReservoir> reservoirs_ ABSL_GUARDED_BY(reservoir_mutex_);  // by routed block
};

}  // namespace moeserve
