#include "server/context.h"

#include <utility>

#include "absl/time/clock.h"
#include "base/check.h"
#include "base/steady_clock.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

constexpr int kWorkThreads = 2;
constexpr size_t kMaxWaitingWork = 256;

std::shared_ptr<ConstraintCompiler> MakeConstraintCompiler(const EngineApi& engine) {
  using Vocabulary = Result<std::shared_ptr<const VocabularyIndex>>;
  const ModelSpec& spec = engine.spec();
  Vocabulary vocabulary =
      engine.tokenizer() == nullptr
          ? Vocabulary(absl::InvalidArgumentError("it has no tokenizer"))
          : VocabularyIndex::Build(*engine.tokenizer(), spec.eos_token_ids, spec.vocab_size);
  return std::make_shared<ConstraintCompiler>(std::move(vocabulary), ConstraintLimits());
}

absl::Status Unavailable(const char* code, const char* message) {
  return MakeError(absl::StatusCode::kUnavailable, code, message);
}

absl::Status EngineStuck() { return Unavailable("engine_stuck", "the engine makes no progress"); }

}  // namespace

ServerContext::ServerContext(ServerSettings settings)
    : settings_(std::move(settings)),
      created_(absl::ToUnixSeconds(absl::Now())),
      memory_(std::make_shared<MemoryBudget>(settings_.request_memory)),
      call_memory_(std::make_shared<MemoryBudget>(settings_.request_memory / 4)),
      keys_(settings_.keys),
      work_pool_(kWorkThreads, kMaxWaitingWork) {}

void ServerContext::SetServing(std::shared_ptr<EngineApi> engine,
                               const GenerationDefaults& defaults,
                               std::shared_ptr<const ChatFormat> chat) {
  auto compiler = MakeConstraintCompiler(*engine);
  const auto moe_metrics = ResolveMoeMetrics(settings_.moe_metrics, engine->ExpertSnapshot());
  MOESERVE_CHECK(moe_metrics.ok(), "the settings were checked against the model");
  std::shared_ptr<ExpertMetrics> experts;
  if (moe_metrics->mode != MoeMetricsMode::kOff) {
    experts = std::make_shared<ExpertMetrics>(*moe_metrics, engine->spec());
  }
  {
    std::lock_guard lock(mutex_);
    expert_metrics_ = std::move(experts);
    engine_ = std::move(engine);
    constraint_compiler_ = std::move(compiler);
    defaults_ = defaults;
    chat_format_ = std::move(chat);
  }
  ServerState expected = ServerState::kLoading;
  state_.compare_exchange_strong(expected, ServerState::kServing);
}

void ServerContext::SetEngineStuck(bool stuck) {
  engine_stuck_ = stuck;
  if (stuck) {
    live_->Close(EngineStuck());
  } else {
    live_->Open();
  }
}

void ServerContext::EndRequests() {
  live_->Close(Unavailable("draining", "the server is shutting down"));
}

absl::Status ServerContext::EngineStatus() const {
  // A stuck engine could hold its locks, so it must not be called.
  if (engine_stuck_) return EngineStuck();
  const std::shared_ptr<EngineApi> engine = this->engine();
  if (engine != nullptr && !engine->Stats().healthy) {
    return Unavailable("engine_dead", "the engine has stopped");
  }
  return absl::OkStatus();
}

void ServerContext::SetDraining() { state_.store(ServerState::kDraining); }

std::shared_ptr<EngineApi> ServerContext::engine() const {
  std::lock_guard lock(mutex_);
  return engine_;
}

Result<std::shared_ptr<EngineApi>> ServerContext::ServingEngine() const {
  switch (state()) {
    case ServerState::kLoading:
      return Unavailable("loading", "the model is being loaded");
    case ServerState::kDraining:
      return Unavailable("draining", "the server is shutting down");
    case ServerState::kServing:
      break;
  }
  MOESERVE_RETURN_IF_ERROR(EngineStatus());
  return this->engine();
}

std::vector<std::string> ServerContext::ModelsOf(const ApiKey* key) const {
  std::vector<std::string> names;
  for (const std::string& name : settings_.served_names) {
    if (key == nullptr || key->MayUseModel(name)) names.push_back(name);
  }
  return names;
}

RequestRules ServerContext::Rules(const ApiKey* key) const {
  RequestRules rules;
  rules.limits = settings_.limits;
  rules.served_names = ModelsOf(key);
  rules.min_priority = settings_.min_priority;
  if (key != nullptr) {
    rules.min_priority = key->spec().limits.min_priority.value_or(settings_.min_priority);
    rules.routing.permitted = key->spec().scopes.Has(Scope::kRouting);
  }
  rules.strict_fields = settings_.strict_fields;
  std::lock_guard lock(mutex_);
  rules.defaults = defaults_;
  rules.vocab_size = engine_->spec().vocab_size;
  rules.routing.records = settings_.routing_records;
  rules.routing.control = engine_->routing_control();
  rules.routing.spec = &engine_->spec();
  rules.routing.layout = &engine_->route_layout();
  rules.tokenizer = engine_->tokenizer();
  return rules;
}

SubmissionContext ServerContext::Submissions(std::shared_ptr<EngineApi> engine,
                                             std::shared_ptr<const ApiKey> key) const {
  std::lock_guard lock(mutex_);
  return {.engine = std::move(engine),
          .constraint_compiler = constraint_compiler_,
          .metrics = metrics_,
          .memory = memory_,
          .limits = settings_.limits,
          .live = live_,
          .key = std::move(key)};
}

std::shared_ptr<const ChatFormat> ServerContext::chat_format() const {
  std::lock_guard lock(mutex_);
  return chat_format_;
}

std::shared_ptr<ExpertMetrics> ServerContext::expert_metrics() const {
  std::lock_guard lock(mutex_);
  return expert_metrics_;
}

void ServerContext::Tick() {
  const std::shared_ptr<ExpertMetrics> experts = expert_metrics();
  if (experts == nullptr) return;
  const absl::Time now = SteadyNow();
  ExpertStats stats = engine()->ExpertSnapshot();
  experts->Observe(stats, now);
  expert_history_.Add(now, std::move(stats));
}

std::string ServerContext::MetricsText(ExpositionFormat format) {
  PrometheusText text(format);
  metrics_->WriteServer(text);
  WriteMemoryMetrics(text, *memory_);
  keys_.WriteMetrics(text);
  const std::shared_ptr<EngineApi> engine = this->engine();
  EngineStats stats;
  if (engine != nullptr) {
    stats = engine->Stats();
    if (engine_stuck_) stats.healthy = false;
  } else {
    stats.healthy = false;
  }
  WriteEngineMetrics(text, stats);
  metrics_->WriteRejected(text, stats);
  if (const std::shared_ptr<ExpertMetrics> experts = expert_metrics()) {
    std::optional<ExpertStats> snapshot = expert_history_.Latest();
    if (!snapshot) {
      snapshot = engine->ExpertSnapshot();
      const absl::Time now = SteadyNow();
      experts->Observe(*snapshot, now);
      expert_history_.Add(now, *snapshot);
    }
    experts->Write(text, *snapshot, model_name());
  }
  WriteProcessMetrics(text);
  if (settings_.metrics_compat.vllm) WriteVllmNames(text, *metrics_, stats, model_name());
  if (settings_.metrics_compat.sglang) WriteSglangNames(text, *metrics_, stats, model_name());
  return text.Take();
}

}  // namespace moeserve::server
