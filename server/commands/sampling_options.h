// The options of a command that say how tokens are sampled, one for each number and flag of
// engine/sampling_params.h.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <vector>

#include "engine/sampling_params.h"

namespace moeserve::server {

// What the user gave, to be applied to the defaults of the model once that is loaded.
struct SamplingOptions {
  std::vector<std::function<void(SamplingParams&)>> given;

  void Apply(SamplingParams& params) const {
    for (const auto& set : given) set(params);
  }
};

// Adds --temperature, --top-p and so on, --seed and --stop. `options` outlives the parsing.
void AddSamplingOptions(CLI::App& app, SamplingOptions& options);

}  // namespace moeserve::server
