// Starts an engine from the options of the command line.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "kernels/backend.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/commands/model_options.h"

namespace moeserve::server {

// A model with its running engine. The backend is declared first, so that it is destroyed after the
// engine.
struct RunningModel {
  std::unique_ptr<Backend> backend;
  std::shared_ptr<Engine> engine;
  GenerationDefaults defaults;
  TokenizerConfig tokenizer_config;
  TextSettings text_settings;
  std::string directory_name;
  std::string description;  // one line about the backend and the model
  ModelOptions types;
};

// What StartModel() knows of a model before it starts the engine.
struct LoadedWeights {
  const ModelSpec& spec;
  // tau of each routed block, by which its router divides cosines; absent without a learned one.
  std::vector<std::optional<double>> temperatures;
  std::vector<std::optional<double>> source_temperatures;  // those of the encoder beside a decoder
};

// Loads a checkpoint and starts an engine. `adjust`, if set, can change the engine's options once
// the model's weights are loaded. `output` tells where the progress of loading is reported, if not
// where options.progress() tells. Every error message is one line. ResourceExhausted if the weights
// and the KV cache would take more than `max_bytes`.
Result<RunningModel> StartModel(
    const ModelOptionsText& options, const EngineOptions& engine,
    const std::function<absl::Status(const LoadedWeights&, EngineOptions&)>& adjust = {},
    std::optional<ProgressOutput> output = {},
    int64_t max_bytes = std::numeric_limits<int64_t>::max());

}  // namespace moeserve::server
