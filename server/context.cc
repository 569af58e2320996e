#include "server/context.h"

#include <utility>

#include "base/check.h"
#include "server/base/api_error.h"
#include "server/tls/tls_store.h"

namespace moeserve::server {
namespace {

constexpr int kWorkThreads = 3;
constexpr size_t kMaxWaitingWork = 256;

absl::Status NotServing(const char* code, const char* message) {
  return MakeError(absl::StatusCode::kUnavailable, code, message);
}

// Writes the families that have one series per model. The text adds the label.
void WriteModelMetrics(PrometheusText& text, const ModelRegistry::Totals& model) {
  text.Single("model_load_duration_seconds", "gauge", "How long loading the model took.",
              model.served != nullptr ? model.served->load_seconds() : 0.0);
  text.Single("model_version", "gauge", "Version that is served, counted from 1; 0: none.",
              static_cast<double>(model.version));
  text.Single("model_memory_bytes", "gauge",
              "Weights and KV caches of all versions that are in memory.",
              static_cast<double>(model.memory_bytes));
  WriteEngineMetrics(text, model.engine);
  model.requests->Write(text);
}

}  // namespace

ServerContext::ServerContext(ServerSettings settings)
    : settings_(std::move(settings)),
      memory_(std::make_shared<MemoryBudget>(settings_.request_memory)),
      call_memory_(std::make_shared<MemoryBudget>(settings_.request_memory / 4)),
      keys_(settings_.keys),
      work_pool_(kWorkThreads, kMaxWaitingWork),
      answer_pool_(kWorkThreads, kMaxWaitingWork) {
  MOESERVE_CHECK(models_.Declare(settings_.served_names, "").ok(), "the names were checked");
}

void ServerContext::SetServing() {
  ServerState expected = ServerState::kLoading;
  state_.compare_exchange_strong(expected, ServerState::kServing);
}

void ServerContext::SetServing(std::shared_ptr<Engine> engine, const GenerationDefaults& defaults,
                               std::shared_ptr<const ChatFormat> chat,
                               TokenizerConfig tokenizer_config, TextSettings text_settings) {
  const std::string& name = settings_.served_names.front();
  const auto version = models_.BeginLoad(name, "");
  MOESERVE_CHECK(version.ok(), "nobody else loads the model");
  LoadedModel loaded;
  loaded.engine = std::move(engine);
  loaded.defaults = defaults;
  if (chat != nullptr) loaded.chat = std::move(chat);
  loaded.tokenizer_config = std::move(tokenizer_config);
  loaded.text_settings = std::move(text_settings);
  auto model = ServedModel::Create(name, *version, std::move(loaded), settings_.moe_metrics,
                                   settings_.constraint_cache_bytes());
  MOESERVE_CHECK(model.ok(), "the settings were checked against the model");
  models_.EndLoad(name, std::move(model));
  SetServing();
}

void ServerContext::EndRequests() {
  for (const auto& model : models_.InMemory()) model->EndRequests();
}

void ServerContext::SetDraining() { state_.store(ServerState::kDraining); }

absl::Status ServerContext::EngineStatus() const {
  for (const auto& model : models_.Served()) MOESERVE_RETURN_IF_ERROR(model->EngineStatus());
  return absl::OkStatus();
}

Result<ModelManager*> ServerContext::ModelManagerFor(const std::string& model,
                                                     const ApiKey* key) const {
  ModelManager* const manager = model_manager();
  if (manager == nullptr) {
    return MakeError(absl::StatusCode::kInvalidArgument, "model_control_off",
                     "clients may not load models: start the server with --model-control or "
                     "--models-folder");
  }
  if (key != nullptr && !key->MayUseModel(model)) {
    return MakeError(absl::StatusCode::kPermissionDenied, "permission_denied",
                     "this API key may not use this model", "model");
  }
  return manager;
}

absl::Status ServerContext::CheckServing() const {
  switch (state()) {
    case ServerState::kLoading:
      return NotServing("loading", "the model is being loaded");
    case ServerState::kDraining:
      return NotServing("draining", "the server is shutting down");
    case ServerState::kServing:
      break;
  }
  return absl::OkStatus();
}

Result<std::shared_ptr<ServedModel>> ServerContext::LoadedModelFor(const std::string& requested,
                                                                   const ApiKey* key) const {
  if (models_.Names().empty()) return NotServing("no_model", "no model is loaded");
  MOESERVE_ASSIGN_OR_RETURN(const std::string name, ResolveModel(requested, ModelsOf(key)));
  return models_.Find(name);
}

Result<std::shared_ptr<ServedModel>> ServerContext::ModelFor(const std::string& requested,
                                                             const ApiKey* key) const {
  MOESERVE_RETURN_IF_ERROR(CheckServing());
  MOESERVE_ASSIGN_OR_RETURN(auto model, LoadedModelFor(requested, key));
  MOESERVE_RETURN_IF_ERROR(model->EngineStatus());
  return model;
}

std::vector<std::string> ServerContext::ModelsOf(const ApiKey* key) const {
  std::vector<std::string> names;
  for (const std::string& name : models_.Names()) {
    if (key == nullptr || key->MayUseModel(name)) names.push_back(name);
  }
  return names;
}

RequestRules ServerContext::Rules(const ServedModel& model, const ApiKey* key) const {
  RequestRules rules;
  rules.limits = settings_.limits;
  rules.served_names = ModelsOf(key);
  rules.min_priority = settings_.min_priority;
  if (key != nullptr) {
    rules.min_priority = key->spec().limits.min_priority.value_or(settings_.min_priority);
    rules.routing.permitted = key->spec().scopes.Has(Scope::kRouting);
  }
  rules.strict_fields = settings_.strict_fields;
  const Engine& engine = model.engine();
  rules.defaults = model.defaults();
  rules.vocab_size = engine.spec().vocab_size;
  rules.source_vocab_size = PromptVocabulary(engine.spec());
  rules.max_num_seqs = engine.options().max_num_seqs;
  rules.routing.records = settings_.routing_records;
  rules.routing.control = engine.options().routing_control;
  rules.routing.spec = &engine.spec();
  rules.routing.layout = &engine.route_layout();
  if (const ExpertRecorder* const encoder = engine.encoder_experts(); encoder != nullptr) {
    rules.routing.source_layout = &encoder->layout();
  }
  rules.tokenizer = engine.tokenizer();
  return rules;
}

SubmissionContext ServerContext::Submissions(const std::shared_ptr<ServedModel>& model,
                                             std::shared_ptr<const ApiKey> key,
                                             std::shared_ptr<RequestRecord> record) const {
  return {.engine = ServedModel::SharedEngine(model),
          .constraint_compiler = model->constraint_compiler(),
          .metrics = models_.RequestMetricsOf(model->name()),
          .memory = memory_,
          .limits = settings_.limits,
          .live = model->live(),
          .macs = model->macs(),
          .key = std::move(key),
          .record = std::move(record)};
}

void ServerContext::Tick() {
  for (const auto& model : models_.Served()) model->Tick();
  if (const absl::Time now = SteadyNow(); metrics_history_.Due(now)) {
    std::vector<ModelReading> readings;
    for (const ModelRegistry::Totals& model : models_.AllTotals()) {
      readings.push_back({model.name, {}});
      readings.back().reading.Add(model.engine, *model.requests);
    }
    metrics_history_.Add(now, std::move(readings));
  }
  size_t held = 0;
  size_t peak = 0;
  const auto add = [&](MemoryBudget& memory) {
    held += memory.used();
    peak += memory.TakePeak();
  };
  add(*memory_);
  add(*call_memory_);
  if (settings_.tls != nullptr) add(settings_.tls->memory());
  trim_.Tick(held, peak);
}

std::string ServerContext::MetricsText(ExpositionFormat format) {
  PrometheusText text(format);
  metrics_.WriteServer(text);
  WriteMemoryMetrics(text, *memory_);
  keys_.WriteMetrics(text);
  settings_.observer->WriteMetrics(text);
  if (settings_.tls != nullptr) settings_.tls->WriteMetrics(text);
  uint64_t queue_full = 0;
  uint64_t queue_timeout = 0;
  for (const ModelRegistry::Totals& model : models_.AllTotals()) {
    text.SetModel(model.name);
    WriteModelMetrics(text, model);
    text.SetModel("");
    queue_full += model.engine.rejected_queue_full;
    queue_timeout += model.engine.rejected_queue_timeout;
    if (model.served != nullptr) model.served->WriteExpertMetrics(text);
    if (settings_.metrics_compat.vllm) {
      WriteVllmNames(text, *model.requests, model.engine, model.name);
    }
    if (settings_.metrics_compat.sglang) {
      WriteSglangNames(text, *model.requests, model.engine, model.name);
    }
  }
  metrics_.WriteRejected(text, queue_full, queue_timeout);
  WriteRankMetrics(text, settings_.ranks ? settings_.ranks() : RankStatus());
  if (settings_.metrics_compat.vllm) WriteHttpRequests(text, metrics_);
  WriteProcessMetrics(text);
  return text.Take();
}

}  // namespace moeserve::server
