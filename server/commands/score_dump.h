// Writes the raw data of the statistics of a text: router scores, routes and router inputs. File
// formats: engine/statistics/README.md.
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

// Takes the place of a RouteTrace and writes as the model runs; see there about order and threads.
class ScoreDump final : public RouteTrace {
 public:
  // Creates the folder if it is not there. `hidden`: the router's inputs as well.
  static Result<std::unique_ptr<ScoreDump>> Create(const std::filesystem::path& folder,
                                                   const ModelSpec& spec, bool hidden);

  StepLooks looks() const override {
    return {.plans = true, .scores = true, .inputs = !inputs_.empty()};
  }
  void OnStep(const Batch& batch, const StepReport& report) override;

  // Writes the rest and the index. `run`: the tokens that the model was given, in order.
  absl::Status Finish(const std::string& model, const std::vector<int32_t>& run);

 private:
  ScoreDump(const std::filesystem::path& folder, const ModelSpec& spec)
      : RouteTrace(RouteLayout(spec)), folder_(folder), spec_(spec) {}

  const std::filesystem::path folder_;
  const ModelSpec spec_;
  std::vector<std::unique_ptr<NpyWriter>> scores_;  // by routed block
  std::vector<std::unique_ptr<NpyWriter>> inputs_;  // likewise, or empty
};

}  // namespace moeserve::server
