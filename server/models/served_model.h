// One loaded version of a model: its engine and the objects that requests to it need.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/statistics/measures/macs.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/chat/chat_format.h"
#include "server/encode/encode_job.h"
#include "server/generation/constraint_compiler.h"
#include "server/generation/engine_watchdog.h"
#include "server/generation/live_generations.h"
#include "server/metrics/expert_metrics.h"
#include "server/models/expert_watch.h"

namespace moeserve::server {

// What loading a checkpoint results in.
struct LoadedModel {
  // What the engine uses, such as its backend. Is destroyed after the engine. May be null.
  std::shared_ptr<void> resources;
  std::shared_ptr<Engine> engine;
  GenerationDefaults defaults;
  std::shared_ptr<const ChatFormat> chat = std::make_shared<ChatFormat>();  // not null
  TokenizerConfig tokenizer_config;  // with the chat template that `chat` uses
  TextSettings text_settings;
  std::string description;    // one line about the backend and the model
  double load_seconds = 0.0;  // how long loading took
};

// Thread-safe. Requests hold a share of the model from when they have chosen it to their end.
class ServedModel {
 public:
  // `name` is the name under which metrics and statistics report the model. `version` counts the
  // models that were served under this name, from 1. InvalidArgument if `metrics` does not suit
  // the model (ResolveMoeMetrics()). Keeps up to
  // `constraint_cache_bytes` of compiled constraints of structured output.
  static Result<std::shared_ptr<ServedModel>> Create(std::string name, int64_t version,
                                                     LoadedModel loaded,
                                                     const MoeMetricsOptions& metrics,
                                                     size_t constraint_cache_bytes);
  ServedModel(const ServedModel&) = delete;
  ServedModel& operator=(const ServedModel&) = delete;

  const std::string& name() const { return name_; }
  int64_t version() const { return version_; }
  int64_t created() const { return created_; }  // Unix time in seconds
  double load_seconds() const { return loaded_.load_seconds; }
  const std::string& description() const { return loaded_.description; }
  // Returns the bytes of the weights and of the KV cache.
  int64_t memory_bytes() const { return memory_bytes_; }
  // Returns memory_bytes() and the bytes of the histories of expert statistics.
  int64_t held_bytes() const;

  // Valid as long as the model. SharedEngine() returns a pointer that keeps the model alive.
  Engine& engine() const { return *loaded_.engine; }
  static std::shared_ptr<Engine> SharedEngine(const std::shared_ptr<ServedModel>& model) {
    return {model, model->loaded_.engine.get()};
  }
  const GenerationDefaults& defaults() const { return loaded_.defaults; }
  const ChatFormat& chat_format() const { return *loaded_.chat; }
  const TokenizerConfig& tokenizer_config() const { return loaded_.tokenizer_config; }
  // What requests about texts need. Valid as long as the model.
  const EncodeModel& encode_model() const { return encode_model_; }
  const std::shared_ptr<ConstraintCompiler>& constraint_compiler() const {
    return constraint_compiler_;
  }
  const std::shared_ptr<LiveGenerations>& live() const { return live_; }
  const std::shared_ptr<const RequestMacs>& macs() const { return macs_; }
  // Returns the statistics of the last minutes; null if they are off, or without such a stack.
  const ExpertHistory* expert_history(Stack stack) const;

  // Returns OK if the engine runs, or Unavailable with code "engine_dead" or "engine_stuck".
  absl::Status EngineStatus() const;
  // Says that the engine's thread is stuck, or that it goes on. While it is stuck, EngineStatus()
  // returns Unavailable, and the requests that run end with that error, too.
  void SetEngineStuck(bool stuck);
  // Starts a thread that calls SetEngineStuck() when a step takes longer than `limit`, which must
  // be positive, and when that step has ended, and then `changed`. Must be called at most once,
  // before requests use the model.
  void StartWatchdog(absl::Duration limit, std::function<void(bool stuck)> changed);
  // Ends the requests that run with the error "draining", although the engine has not ended them.
  void EndRequests();

  // Adds a snapshot of the expert statistics to the histories and to the decaying counts from
  // which the metrics' gauges are computed. Must be called about once per second. Does nothing if
  // the metrics are off.
  void Tick();
  // Returns the engine's state and counters; `healthy` is false while the engine is stuck.
  EngineStats Stats() const;
  // Writes the families about experts, unless they are off. The counters include every request that
  // has ended before the call; the gauges are those of the last Tick().
  void WriteExpertMetrics(PrometheusText& text);

 private:
  ServedModel(std::string name, int64_t version, LoadedModel loaded,
              const MoeMetricsOptions& metrics, size_t constraint_cache_bytes);

  const std::string name_;
  const int64_t version_;
  const int64_t created_;
  const LoadedModel loaded_;
  const int64_t memory_bytes_;
  const EncodeModel encode_model_;
  const std::shared_ptr<ConstraintCompiler> constraint_compiler_;
  const std::shared_ptr<const RequestMacs> macs_;
  const std::shared_ptr<LiveGenerations> live_ = std::make_shared<LiveGenerations>();
  std::vector<std::unique_ptr<ExpertWatch>> expert_watches_;  // by stack; empty if they are off
  std::atomic<bool> engine_stuck_{false};
  std::unique_ptr<EngineWatchdog> watchdog_;  // last, because its thread uses the other members
};

}  // namespace moeserve::server
