// Command line options that all commands which run a model share.
#pragma once

#include <CLI/CLI.hpp>
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
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/commands/progress/load_progress.h"
#include "server/commands/ranks/rank_options.h"

namespace moeserve::server {

class RankSession;

struct ModelOptionsText {
  std::string directory;
  std::vector<std::string> ignored_keys;  // LoadOptions::ignored_keys
  std::string device = "cpu";
  std::string dtype = "auto";
  std::string kv_cache_dtype = "auto";
  int threads = 0;
  std::string cpu_isa = "auto";
  std::string cuda_dense = "own";
  std::string cuda_tune = "quick";
  std::string cuda_tune_file = "auto";  // a file or folder; "auto": a folder of the user; "off"
  // "off" or empty; a folder; or "auto": a folder of the user, if the weights are not small.
  std::string packed_cache = "off";
  std::string memory;  // of experts in mapped files; empty: what the process may use
  std::string tier_policy = "auto";
  int read_ahead_mib = 0;
  std::string draft_model;     // folder or file; empty: none
  bool draft_mtp = false;      // whether prediction layers draft tokens
  bool must_generate = false;  // whether a model that does not generate is refused
  std::string pooling;         // a PoolingKind that replaces the model's; empty: none
  bool quiet = false;          // report no progress
  RankOptions ranks;
  // The ranks that load and compute the model together; set by RunWithRanks(). Null: this process
  // computes everything.
  RankSession* session = nullptr;

  BackendOptions backend() const;
  ProgressOutput progress() const {
    return quiet ? ProgressOutput::kNone : ProgressOutput::kTerminal;
  }
};

// Adds --ignore-config.
void AddIgnoreConfig(CLI::App& app, std::vector<std::string>& keys);
// Adds --model, which may also be given as an argument without a name.
void AddModelDirectory(CLI::App& app, ModelOptionsText& options);
// Adds --dtype.
void AddDTypeOption(CLI::App& app, ModelOptionsText& options);
// Adds --device, --dtype, --kv-cache-dtype, --threads, --cpu-isa, --cuda-dense, --cuda-tune,
// --cuda-tune-file, --packed-cache, --memory, --tier-policy, --read-ahead-mib and --ignore-config.
void AddComputeOptions(CLI::App& app, ModelOptionsText& options);
// Adds --quiet, which switches reports of progress off.
void AddQuietOption(CLI::App& app, bool& quiet);
// Adds --model, --quiet and the options of AddComputeOptions.
void AddModelOptions(CLI::App& app, ModelOptionsText& options);

// Adds --pooling.
void AddPoolingOption(CLI::App& app, ModelOptionsText& options);
// Replaces the model's pooling by that of --pooling. InvalidArgument if the model's head takes no
// pooled rows.
absl::Status ApplyPooling(const ModelOptionsText& options, ModelSpec& spec);

// Returns InvalidArgument unless the model generates text.
absl::Status CheckGenerating(const ModelSpec& spec);

// Adds --draft-model.
void AddDraftModel(CLI::App& app, ModelOptionsText& options);

struct EngineOptionsText {
  EngineOptions engine = {.draft = {.max_tokens = kDefaultDraftTokens}};
  double queue_wait_seconds = 60.0;
  std::string kv_cache_memory;  // text of the option; empty selects the engine's default
};

// Adds --max-model-len, --max-num-seqs, --max-step-tokens, --kv-cache-memory and the other options
// of the engine's scheduler and caches.
void AddEngineOptions(CLI::App& app, EngineOptionsText& options);
Result<EngineOptions> ResolveEngineOptions(const EngineOptionsText& options);

// Prints what a loader decided and ignored (Checkpoint::notes), one line each.
void PrintNotes(const std::vector<std::string>& notes);
// Prints Checkpoint::warnings to standard error, or logs them, so that nobody waits for the reader
// of standard error.
void PrintWarnings(const std::vector<std::string>& warnings,
                   ProgressOutput output = ProgressOutput::kTerminal);

// Opens the cache of packed weights that --packed-cache names for one checkpoint, whose files have
// `weight_bytes`; returns null if there is none. `output` tells where its warnings go.
// Unimplemented if a folder is named and the device has no packed layout. The backend must outlive
// the cache.
Result<std::unique_ptr<PackedCache>> OpenPackedCache(
    const ModelOptionsText& options, const CheckpointIdentity& identity, int64_t weight_bytes,
    Backend& backend, ProgressOutput output = ProgressOutput::kTerminal);
// Returns what --memory, --tier-policy and --read-ahead-mib say. `cache_bytes`: of the KV cache, 0
// if unknown.
Result<TierOptions> ResolveTiers(const ModelOptionsText& options, int64_t cache_bytes = 0);

// Returns an error if --packed-cache is given, which synthetic weights do not support.
absl::Status CheckSyntheticOptions(const ModelOptionsText& options);

// Returns the compute type and the weight type of a run. "auto" keeps stored bf16 and stored
// integers; but on other devices than the CPU, integers other than int8-channel and int4-k become
// bf16. All other types run in f32.
Result<ModelOptions> ResolveDType(const ModelOptionsText& options, const WeightSource& source);
// Returns the KV cache type; "auto" selects the compute type.
Result<KvCacheType> ResolveKvCacheType(const std::string& text, DType compute);

// Prints "error: <message>" and returns the exit status 1.
int Fail(const absl::Status& status);
// Returns 0 for OK, else what Fail() returns.
inline int StatusToExit(const absl::Status& status) { return status.ok() ? 0 : Fail(status); }

}  // namespace moeserve::server
