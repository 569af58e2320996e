// Command line options for sampling: one option for each number and each flag listed in
// engine/sampling_params.h.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <vector>

#include "engine/sampling_params.h"

namespace moeserve::server {

// Stores the options that the user gave, to apply them to the model's defaults after the model is
// loaded.
struct SamplingOptions {
  std::vector<std::function<void(SamplingParams&)>> given;

  void Apply(SamplingParams& params) const {
    for (const auto& set : given) set(params);
  }
};

// Adds --seed, --stop and one option per sampling parameter, such as --temperature. `options` must
// outlive the parsing of the command line.
void AddSamplingOptions(CLI::App& app, SamplingOptions& options);

}  // namespace moeserve::server
