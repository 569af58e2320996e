// Command line options for sampling: one per number and flag of engine/sampling_params.h.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <vector>

#include "engine/sampling_params.h"

namespace moeserve::server {

// The given options. They are applied to the model's defaults after it is loaded.
struct SamplingOptions {
  std::vector<std::function<void(SamplingParams&)>> given;

  void Apply(SamplingParams& params) const {
    for (const auto& set : given) set(params);
  }
};

// Adds --temperature, --top-p and so on, --seed and --stop. `options` outlives the parsing.
void AddSamplingOptions(CLI::App& app, SamplingOptions& options);

}  // namespace moeserve::server
