// The state that all parts of the server share: settings, counters and, once loaded, the engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "model_loaders/loader.h"
#include "server/base/auth.h"
#include "server/base/limits.h"
#include "server/base/work_pool.h"
#include "server/generation/constraint_compiler.h"
#include "server/generation/engine_api.h"
#include "server/generation/submission.h"
#include "server/metrics/expert_metrics.h"
#include "server/metrics/metrics.h"
#include "server/metrics/metrics_compat.h"
#include "server/openai/chat_format.h"
#include "server/reports/expert_history.h"

namespace moeserve::server {

struct ServerSettings {
  std::vector<std::string> served_names;  // not empty; the first appears in answers
  std::string device = "cpu";
  std::string commit;  // of the program's sources; may be empty
  ApiKeys keys;
  RequestLimits limits;
  HttpLimits http;
  bool strict_fields = false;
  bool allow_request_chat_template = false;
  bool dashboard = true;  // the page at "/"
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
  int64_t created() const { return created_; }  // Unix time
  Metrics& metrics() { return *metrics_; }
  const std::shared_ptr<Metrics>& shared_metrics() const { return metrics_; }

  ServerState state() const { return state_.load(); }
  // Changes the state from loading to serving. Requires settings that ResolveMoeMetrics accepts for
  // this model.
  void SetServing(std::shared_ptr<EngineApi> engine, const GenerationDefaults& defaults,
                  std::shared_ptr<const ChatFormat> chat = std::make_shared<ChatFormat>());
  // From now on new requests are refused.
  void SetDraining();

  // Returns the engine, or Unavailable with code "loading", "draining" or "engine_dead".
  Result<std::shared_ptr<EngineApi>> ServingEngine() const;
  // Null until loaded.
  std::shared_ptr<EngineApi> engine() const;

  // The rules for reading requests. Requires the engine.
  RequestRules Rules() const;
  // For a request to `engine`, a result of ServingEngine().
  SubmissionContext Submissions(std::shared_ptr<EngineApi> engine) const;
  // Not null once the engine is loaded.
  std::shared_ptr<const ChatFormat> chat_format() const;

  // For tasks that take too long for the threads of connections.
  WorkPool& work_pool() { return work_pool_; }

  // Updates windows and history of the expert statistics; call about once a second.
  void Tick();
  const ExpertHistory& expert_history() const { return expert_history_; }

  // The body of GET /metrics.
  std::string MetricsText(ExpositionFormat format = ExpositionFormat::kText);

 private:
  std::shared_ptr<ExpertMetrics> expert_metrics() const;

  const ServerSettings settings_;
  const int64_t created_;
  const std::shared_ptr<Metrics> metrics_ = std::make_shared<Metrics>();
  ExpertHistory expert_history_;
  std::atomic<ServerState> state_{ServerState::kLoading};
  mutable std::mutex mutex_;
  std::shared_ptr<EngineApi> engine_;
  std::shared_ptr<ExpertMetrics> expert_metrics_;  // null: not loaded, or switched off
  std::shared_ptr<ConstraintCompiler> constraint_compiler_;
  GenerationDefaults defaults_;
  std::shared_ptr<const ChatFormat> chat_format_;
  WorkPool work_pool_;  // last, because its tasks use the other members
};

}  // namespace moeserve::server
