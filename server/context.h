// The state that all parts of the server share: the settings, the counters, the keys and the models
// that are served.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/base/limits.h"
#include "server/base/memory_budget.h"
#include "server/base/work_pool.h"
#include "server/generation/generation_params.h"
#include "server/generation/submission.h"
#include "server/keys/key_store.h"
#include "server/metrics/expert_metrics.h"
#include "server/metrics/metrics.h"
#include "server/metrics/metrics_compat.h"
#include "server/metrics/metrics_history.h"
#include "server/metrics/rank_metrics.h"
#include "server/models/model_manager.h"
#include "server/models/model_registry.h"
#include "server/models/served_model.h"
#include "server/process/allocator_trim.h"
#include "server/tracing/request_observer.h"

namespace moeserve::server {

class TlsStore;

struct ServerSettings {
  // The names of the first model, of which there is at least one: its name, then its aliases.
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
  // Returns the limit on the compiled constraints that each model keeps for later requests. They
  // are not part of request_memory.
  size_t constraint_cache_bytes() const { return std::min(request_memory / 32, size_t{256} << 20); }
  bool strict_fields = false;
  bool allow_request_chat_template = false;
  bool show_chat_template = true;         // whether /tokenizer_info shows the chat template
  bool dashboard = true;                  // whether "/" serves the dashboard
  std::vector<std::string> cors_origins;  // to be shown
  bool routing_records = false;
  MoeMetricsOptions moe_metrics;
  MetricsCompat metrics_compat;
  // Logs requests and exports their spans. Not null.
  std::shared_ptr<RequestObserver> observer = std::make_shared<RequestObserver>();
  std::shared_ptr<TlsStore> tls;  // null: no TLS
  // Returns what is known of the ranks; null: this process computes everything. Any thread may call
  // it as long as the context exists.
  std::function<RankStatus()> ranks;
};

enum class ServerState { kLoading, kServing, kDraining };

// Thread-safe.
class ServerContext {
 public:
  // Declares the first model.
  explicit ServerContext(ServerSettings settings);

  const ServerSettings& settings() const { return settings_; }
  Metrics& metrics() { return metrics_; }
  // The memory that requests may hold together.
  const std::shared_ptr<MemoryBudget>& memory() const { return memory_; }
  // The memory that calls over gRPC may hold before their requests are parsed: a quarter as much,
  // in addition. It is separate, so that bodies over HTTP cannot use it up.
  const std::shared_ptr<MemoryBudget>& call_memory() const { return call_memory_; }

  KeyStore& keys() { return keys_; }

  ServerState state() const { return state_.load(); }
  // Changes the state from kLoading to kServing; a draining server stays kDraining.
  void SetServing();
  // Serves the first model, and calls SetServing(). Requires that ResolveMoeMetrics() accepts
  // settings().moe_metrics for this model.
  void SetServing(std::shared_ptr<Engine> engine, const GenerationDefaults& defaults,
                  std::shared_ptr<const ChatFormat> chat = std::make_shared<ChatFormat>(),
                  TokenizerConfig tokenizer_config = {}, TextSettings text_settings = {});
  // Ends the requests that run with the error "draining", although the engines have not ended them.
  void EndRequests();
  // Changes the state to kDraining. From then on, CheckServing() returns Unavailable.
  void SetDraining();

  ModelRegistry& models() { return models_; }
  const ModelRegistry& models() const { return models_; }
  // Lets clients load and unload models from now on, or ends that with null. `manager` must outlive
  // the listeners' handlers.
  void SetModelManager(ModelManager* manager) { manager_ = manager; }
  // Returns null if clients may not load models.
  ModelManager* model_manager() const { return manager_; }

  // Returns the manager with which a request of `key`, which may be null, may load and unload
  // `model`. InvalidArgument with code "model_control_off", or PermissionDenied.
  Result<ModelManager*> ModelManagerFor(const std::string& model, const ApiKey* key) const;

  // Returns OK, or Unavailable with code "loading" or "draining".
  absl::Status CheckServing() const;
  // Returns OK if the engines of all models run, or Unavailable with code "engine_dead" or
  // "engine_stuck". OK while the first models are being loaded.
  absl::Status EngineStatus() const;
  // Returns the model for a request that names `requested`, which may be empty: the first model
  // that `key` may use. `key` may be null. Errors: those of CheckServing(), of ResolveModel() and
  // of ServedModel::EngineStatus(); Unavailable with code "no_model" if all were unloaded.
  Result<std::shared_ptr<ServedModel>> ModelFor(const std::string& requested,
                                                const ApiKey* key) const;
  // Like ModelFor(), but returns models also while the server drains or their engines do not run.
  Result<std::shared_ptr<ServedModel>> LoadedModelFor(const std::string& requested,
                                                      const ApiKey* key) const;

  // Returns the names of served models that `key` may use. `key` may be null: all of them.
  std::vector<std::string> ModelsOf(const ApiKey* key) const;
  // Returns the settings, properties of `model` and rights of `key`, which may be null, that
  // request parsers check against. `model` must outlive the result.
  RequestRules Rules(const ServedModel& model, const ApiKey* key) const;
  // Returns the objects that submitting a request to `model` needs. `key` and `record`
  // may be null.
  SubmissionContext Submissions(const std::shared_ptr<ServedModel>& model,
                                std::shared_ptr<const ApiKey> key,
                                std::shared_ptr<RequestRecord> record = nullptr) const;

  // Runs tasks that would block the connections' threads for too long.
  WorkPool& work_pool() { return work_pool_; }
  // Writes large answers. Apart from the other tasks, which may take seconds.
  WorkPool& answer_pool() { return answer_pool_; }

  // Calls ServedModel::Tick() for every model, adds to metrics_history(), and gives memory back to
  // the system. Must be called about once per second.
  void Tick();
  const MetricsHistory& metrics_history() const { return metrics_history_; }

  // Returns the body of the response to GET /metrics.
  std::string MetricsText(ExpositionFormat format = ExpositionFormat::kText);

 private:
  const ServerSettings settings_;
  Metrics metrics_;
  const std::shared_ptr<MemoryBudget> memory_;
  const std::shared_ptr<MemoryBudget> call_memory_;
  MetricsHistory metrics_history_;
  AllocatorTrim trim_;  // used by Tick() only
  KeyStore keys_;
  std::atomic<ServerState> state_{ServerState::kLoading};
  ModelRegistry models_;
  std::atomic<ModelManager*> manager_{nullptr};
  // Declared last, so that it is destroyed, and its tasks have ended, before the members that the
  // tasks use.
  WorkPool work_pool_;
  WorkPool answer_pool_;
};

}  // namespace moeserve::server
