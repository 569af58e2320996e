#include "server/context.h"

#include <utility>

#include "absl/time/clock.h"
#include "server/api_error.h"

namespace moeserve::server {

ServerContext::ServerContext(ServerSettings settings)
    : settings_(std::move(settings)), created_(absl::ToUnixSeconds(absl::Now())) {}

void ServerContext::SetServing(std::shared_ptr<EngineApi> engine,
                               const GenerationDefaults& defaults) {
  {
    std::lock_guard lock(mutex_);
    engine_ = std::move(engine);
    defaults_ = defaults;
  }
  ServerState expected = ServerState::kLoading;
  state_.compare_exchange_strong(expected, ServerState::kServing);
}

void ServerContext::SetDraining() { state_.store(ServerState::kDraining); }

std::shared_ptr<EngineApi> ServerContext::engine() const {
  std::lock_guard lock(mutex_);
  return engine_;
}

Result<std::shared_ptr<EngineApi>> ServerContext::ServingEngine() const {
  const auto unavailable = [](const char* code, const char* message) {
    return MakeError(absl::StatusCode::kUnavailable, code, message);
  };
  switch (state()) {
    case ServerState::kLoading:
      return unavailable("loading", "the model is being loaded");
    case ServerState::kDraining:
      return unavailable("draining", "the server is shutting down");
    case ServerState::kServing:
      break;
  }
  std::shared_ptr<EngineApi> engine = this->engine();
  if (!engine->Stats().healthy) return unavailable("engine_dead", "the engine has stopped");
  return engine;
}

RequestRules ServerContext::Rules() const {
  RequestRules rules;
  rules.limits = settings_.limits;
  rules.served_names = settings_.served_names;
  rules.strict_fields = settings_.strict_fields;
  std::lock_guard lock(mutex_);
  rules.defaults = defaults_;
  rules.vocab_size = engine_->spec().vocab_size;
  rules.tokenizer = engine_->tokenizer();
  return rules;
}

void ServerContext::Tick() {
  if (const std::shared_ptr<EngineApi> engine = this->engine()) {
    expert_history_.Add(absl::Now(), engine->ExpertSnapshot());
  }
}

std::string ServerContext::MetricsText() {
  PrometheusText text;
  metrics_->WriteServer(text);
  const std::shared_ptr<EngineApi> engine = this->engine();
  EngineStats stats;
  if (engine != nullptr) {
    stats = engine->Stats();
  } else {
    stats.healthy = false;
  }
  WriteEngineMetrics(text, stats);
  metrics_->WriteRejected(text, stats);
  if (engine != nullptr) {
    std::optional<ExpertStats> experts = expert_history_.Latest();
    if (!experts) experts = engine->ExpertSnapshot();
    expert_metrics_.Write(text, *experts, model_name(), absl::Now());
  }
  WriteProcessMetrics(text);
  return text.Take();
}

}  // namespace moeserve::server
