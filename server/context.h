// The state that all parts of the server share: the settings, the counters and, once the model is
// loaded, the engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "model_loaders/loader.h"
#include "server/base/limits.h"
#include "server/base/memory_budget.h"
#include "server/base/work_pool.h"
#include "server/generation/constraint_compiler.h"
#include "server/generation/engine_api.h"
#include "server/generation/live_generations.h"
#include "server/generation/submission.h"
#include "server/keys/key_store.h"
#include "server/metrics/expert_metrics.h"
#include "server/metrics/metrics.h"
#include "server/metrics/metrics_compat.h"
#include "server/openai/chat_format.h"
#include "server/reports/expert_history.h"

namespace moeserve::server {

struct ServerSettings {
  // Model names that clients may send. Not empty. Responses contain the first one.
  std::vector<std::string> served_names;
  std::string device = "cpu";
  // The git commit that the program was built from; empty if unknown.
  std::string commit;
  std::vector<KeySpec> keys;  // at the start; empty: everybody may do everything
  // The lowest `priority` of requests, unless their key has its own limit.
  int min_priority = 0;
  RequestLimits limits;
  HttpLimits http;
  // Limit on the memory that all requests hold together, in bytes.
  size_t request_memory = size_t{1} << 30;
  bool strict_fields = false;
  bool allow_request_chat_template = false;
  bool dashboard = true;  // whether "/" serves the dashboard
  bool routing_records = false;
  MoeMetricsOptions moe_metrics;
  MetricsCompat metrics_compat;
};

enum class ServerState { kLoading, kServing, kDraining };

// Thread-safe.
class ServerContext {
 public:
  explicit ServerContext(ServerSettings settings);

  const ServerSettings& settings() const { return settings_; }
  const std::string& model_name() const { return settings_.served_names.front(); }
  int64_t created() const { return created_; }  // Unix time in seconds
  Metrics& metrics() { return *metrics_; }
  const std::shared_ptr<Metrics>& shared_metrics() const { return metrics_; }
  // The memory that requests may hold together.
  const std::shared_ptr<MemoryBudget>& memory() const { return memory_; }
  // The memory that calls over gRPC may hold before their requests are parsed: a quarter as much,
  // in addition. It is separate, so that bodies over HTTP cannot use it up.
  const std::shared_ptr<MemoryBudget>& call_memory() const { return call_memory_; }

  KeyStore& keys() { return keys_; }

  ServerState state() const { return state_.load(); }
  // Stores the loaded model's objects and changes the state from kLoading to kServing; a draining
  // server stays kDraining. Requires that ResolveMoeMetrics() accepts settings().moe_metrics for
  // this model.
  void SetServing(std::shared_ptr<EngineApi> engine, const GenerationDefaults& defaults,
                  std::shared_ptr<const ChatFormat> chat = std::make_shared<ChatFormat>());
  // Says that the engine's thread is stuck, or that it goes on. While it is stuck, ServingEngine()
  // returns Unavailable, and the requests that run end with that error, too.
  void SetEngineStuck(bool stuck);
  // Ends the requests that run with the error "draining", although the engine has not ended them.
  void EndRequests();
  // Returns OK if the engine runs, or Unavailable with code "engine_dead" or "engine_stuck". OK
  // while the model is being loaded.
  absl::Status EngineStatus() const;
  // Changes the state to kDraining. From then on, ServingEngine() returns Unavailable.
  void SetDraining();

  // Returns the engine, or Unavailable with code "loading", "draining", "engine_dead" or
  // "engine_stuck".
  Result<std::shared_ptr<EngineApi>> ServingEngine() const;
  // Returns null until the model is loaded.
  std::shared_ptr<EngineApi> engine() const;

  // Returns the names of served models that `key` may use. `key` may be null: all of them.
  std::vector<std::string> ModelsOf(const ApiKey* key) const;
  // Returns the settings, model properties and rights of `key`, which may be null, that request
  // parsers check against. The engine must be loaded.
  RequestRules Rules(const ApiKey* key) const;
  // Returns the objects that submitting a request to `engine` needs. `engine` is a result of
  // ServingEngine(). `key` may be null.
  SubmissionContext Submissions(std::shared_ptr<EngineApi> engine,
                                std::shared_ptr<const ApiKey> key) const;
  // Returns null until the model is loaded.
  std::shared_ptr<const ChatFormat> chat_format() const;

  // Runs tasks that would block the connections' threads for too long.
  WorkPool& work_pool() { return work_pool_; }

  // Adds a snapshot of the expert statistics to expert_history() and to the decaying counts from
  // which GET /metrics computes gauges. Must be called about once per second. Does nothing until
  // the model is loaded, and with --moe-metrics=off.
  void Tick();
  const ExpertHistory& expert_history() const { return expert_history_; }

  // Returns the body of the response to GET /metrics.
  std::string MetricsText(ExpositionFormat format = ExpositionFormat::kText);

 private:
  std::shared_ptr<ExpertMetrics> expert_metrics() const;

  const ServerSettings settings_;
  const int64_t created_;
  const std::shared_ptr<Metrics> metrics_ = std::make_shared<Metrics>();
  const std::shared_ptr<MemoryBudget> memory_;
  const std::shared_ptr<MemoryBudget> call_memory_;
  const std::shared_ptr<LiveGenerations> live_ = std::make_shared<LiveGenerations>();
  std::atomic<bool> engine_stuck_{false};
  KeyStore keys_;
  ExpertHistory expert_history_;
  std::atomic<ServerState> state_{ServerState::kLoading};
  mutable std::mutex mutex_;
  std::shared_ptr<EngineApi> engine_;
  // Null until the model is loaded, and always null with --moe-metrics=off.
  std::shared_ptr<ExpertMetrics> expert_metrics_;
  std::shared_ptr<ConstraintCompiler> constraint_compiler_;
  GenerationDefaults defaults_;
  std::shared_ptr<const ChatFormat> chat_format_;
  // Declared last, so that it is destroyed, and its tasks have ended, before the members that the
  // tasks use.
  WorkPool work_pool_;
};

}  // namespace moeserve::server
