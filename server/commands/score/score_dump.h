// Writes the raw data that the statistics of a text are computed from: router scores, routes and
// router inputs. engine/statistics/README.md describes the file formats.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/statistics/measures/route_trace.h"
#include "model_loaders/profiles/npy_writer.h"

namespace moeserve::server {

// Writes the files while the model runs: the engine thread calls OnStep() after every step.
// Requests must run one after the other and without a prefix cache, so that rows arrive in the
// order of the text.
class ScoreDump final : public RouteTrace {
 public:
  // Creates the folder if it does not exist. `hidden` selects whether router inputs are written,
  // too.
  static Result<std::unique_ptr<ScoreDump>> Create(const std::filesystem::path& folder,
                                                   const ModelSpec& spec, bool hidden);

  ReportContents contents() const override {
    return {.plans = true, .scores = true, .inputs = !inputs_.empty()};
  }
  void OnStep(const Batch& batch, const StepReport& report) override;

  // Writes the remaining data and the index file. `run` lists the token ids that the model
  // computed, in order.
  absl::Status Finish(const std::string& model, const std::vector<int32_t>& run);

 private:
  ScoreDump(const std::filesystem::path& folder, const ModelSpec& spec)
      : RouteTrace(RouteLayout(spec)), folder_(folder), spec_(spec) {}

  const std::filesystem::path folder_;
  const ModelSpec spec_;
  std::vector<std::unique_ptr<NpyWriter>> scores_;  // one writer per routed block
  std::vector<std::unique_ptr<NpyWriter>> inputs_;  // one writer per routed block, or empty
};

}  // namespace moeserve::server
