// The options of every command that runs a model, and starting an engine from them.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "kernels/backend.h"
#include "model_loaders/loader.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

struct ModelOptionsText {
  std::string directory;
  std::string device = "cpu";
  std::string dtype = "auto";
  std::string kv_cache_dtype = "auto";
  int threads = 0;
  std::string cpu_isa = "auto";
  std::string packed_cache;  // folder; empty: none
};

// --model only.
void AddModelDirectory(CLI::App& app, ModelOptionsText& options);
// --device, --dtype, --kv-cache-dtype, --threads, --cpu-isa, --packed-cache.
void AddComputeOptions(CLI::App& app, ModelOptionsText& options);
// --model and those.
void AddModelOptions(CLI::App& app, ModelOptionsText& options);

struct EngineOptionsText {
  EngineOptions engine;
  double queue_wait_seconds = 60.0;
  std::string kv_cache_memory;  // as written; empty: the engine's default
};

// --max-model-len, --max-num-seqs, --max-step-tokens, --kv-cache-memory.
void AddEngineOptions(CLI::App& app, EngineOptionsText& options);
Result<EngineOptions> ResolveEngineOptions(const EngineOptionsText& options);

// A model with its running engine. The backend is declared first, so that it is destroyed last.
struct RunningModel {
  std::unique_ptr<Backend> backend;
  std::shared_ptr<EngineApi> engine;
  GenerationDefaults defaults;
  TokenizerConfig tokenizer_config;
  std::string directory_name;
  std::string description;  // of backend and model, one line
  ModelOptions types;
};

// Loads a checkpoint and starts an engine. `adjust`, if given, can change the engine's options once
// the model is known. Errors are one line for the user.
Result<RunningModel> StartModel(
    const ModelOptionsText& options, const EngineOptions& engine,
    const std::function<absl::Status(const ModelSpec&, EngineOptions&)>& adjust = {});

// The cache of --packed-cache for a checkpoint; null without the flag. Its warnings go to standard
// error. Unimplemented where the device has none. The backend must outlive it.
Result<std::unique_ptr<PackedCache>> OpenPackedCache(const ModelOptionsText& options,
                                                     const CheckpointIdentity& identity,
                                                     Backend& backend);
// Refuses --packed-cache for synthetic weights.
absl::Status CheckSyntheticOptions(const ModelOptionsText& options);

// Resolves the types of a run. "auto" keeps stored bf16 and, on the CPU, stored integers;
// everything else runs in f32.
Result<ModelOptions> ResolveDType(const ModelOptionsText& options, const WeightSource& source);
// "auto" is the compute type.
Result<KvCacheType> ResolveKvCacheType(const std::string& text, DType compute);

// Prints "error: <message>" and returns the exit status 1.
int Fail(const absl::Status& status);

}  // namespace moeserve::server
