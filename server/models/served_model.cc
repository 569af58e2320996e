#include "server/models/served_model.h"

#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "engine/validate_request.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

std::shared_ptr<ConstraintCompiler> MakeConstraintCompiler(const Engine& engine,
                                                           size_t max_cached_bytes) {
  using Vocabulary = Result<std::shared_ptr<const VocabularyIndex>>;
  const ModelSpec& spec = engine.spec();
  Vocabulary vocabulary = absl::InvalidArgumentError("it has no tokenizer");
  if (!Computes(spec, nullptr)) {
    vocabulary = absl::InvalidArgumentError("it generates nothing");
  } else if (engine.tokenizer() != nullptr) {
    vocabulary = VocabularyIndex::Build(*engine.tokenizer(), spec.eos_token_ids, spec.vocab_size);
  }
  return std::make_shared<ConstraintCompiler>(std::move(vocabulary), ConstraintLimits(),
                                              max_cached_bytes);
}

absl::Status Unavailable(const char* code, const char* message) {
  return MakeError(absl::StatusCode::kUnavailable, code, message);
}

absl::Status EngineStuck() { return Unavailable("engine_stuck", "the engine makes no progress"); }

int64_t MemoryOf(const Engine& engine) {
  const EngineStats stats = engine.Stats();
  return stats.weight_bytes + stats.kv_cache_bytes;
}

}  // namespace

Result<std::shared_ptr<ServedModel>> ServedModel::Create(std::string name, int64_t version,
                                                         LoadedModel loaded,
                                                         const MoeMetricsOptions& metrics,
                                                         size_t constraint_cache_bytes) {
  std::vector<ExpertStats> stacks;
  for (const StackExperts& experts : StackExperts::All(*loaded.engine)) {
    stacks.push_back(experts.Snapshot());
  }
  MOESERVE_ASSIGN_OR_RETURN(const MoeMetricsOptions resolved, ResolveMoeMetrics(metrics, stacks));
  return std::shared_ptr<ServedModel>(new ServedModel(std::move(name), version, std::move(loaded),
                                                      resolved, constraint_cache_bytes));
}

ServedModel::ServedModel(std::string name, int64_t version, LoadedModel loaded,
                         const MoeMetricsOptions& metrics, size_t constraint_cache_bytes)
    : name_(std::move(name)),
      version_(version),
      created_(absl::ToUnixSeconds(absl::Now())),
      loaded_(std::move(loaded)),
      memory_bytes_(MemoryOf(*loaded_.engine)),
      encode_model_(
          MakeEncodeModel(*loaded_.engine, loaded_.text_settings, loaded_.tokenizer_config)),
      constraint_compiler_(MakeConstraintCompiler(*loaded_.engine, constraint_cache_bytes)),
      macs_(std::make_shared<RequestMacs>(loaded_.engine->spec())) {
  if (metrics.mode == MoeMetricsMode::kOff) return;
  for (const StackExperts& experts : StackExperts::All(*loaded_.engine)) {
    expert_watches_.push_back(std::make_unique<ExpertWatch>(experts, metrics));
  }
}

absl::Status ServedModel::EngineStatus() const {
  // A stuck engine could hold its locks, so it must not be called.
  if (engine_stuck_) return EngineStuck();
  if (!engine().Stats().healthy) return Unavailable("engine_dead", "the engine has stopped");
  return absl::OkStatus();
}

void ServedModel::SetEngineStuck(bool stuck) {
  engine_stuck_ = stuck;
  if (stuck) {
    live_->Close(EngineStuck());
  } else {
    live_->Open();
  }
}

void ServedModel::StartWatchdog(absl::Duration limit, std::function<void(bool stuck)> changed) {
  watchdog_ = std::make_unique<EngineWatchdog>(loaded_.engine, limit,
                                               [this, changed = std::move(changed)](bool stuck) {
                                                 SetEngineStuck(stuck);
                                                 changed(stuck);
                                               });
}

void ServedModel::EndRequests() {
  live_->Close(Unavailable("draining", "the server is shutting down"));
}

void ServedModel::Tick() {
  for (const auto& watch : expert_watches_) watch->Tick();
}

int64_t ServedModel::held_bytes() const {
  int64_t bytes = memory_bytes_;
  for (const auto& watch : expert_watches_) bytes += static_cast<int64_t>(watch->history().bytes());
  return bytes;
}

const ExpertHistory* ServedModel::expert_history(Stack stack) const {
  for (const auto& watch : expert_watches_) {
    if (watch->stack() == stack) return &watch->history();
  }
  return nullptr;
}

EngineStats ServedModel::Stats() const {
  EngineStats stats = engine().Stats();
  if (engine_stuck_) stats.healthy = false;
  return stats;
}

void ServedModel::WriteExpertMetrics(PrometheusText& text) {
  if (expert_watches_.empty()) return;
  // The engine counts the end of a request after its routes.
  const bool stuck = engine_stuck_;
  const uint64_t finished = engine().Stats().finished();
  for (const auto& watch : expert_watches_) watch->Write(text, name_, finished, stuck);
}

}  // namespace moeserve::server
