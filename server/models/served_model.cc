#include "server/models/served_model.h"

#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "base/steady_clock.h"
#include "engine/validate_request.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

// While no request ends, readers of the metrics read the expert statistics from the engine at most
// once in this time, because that copies them.
constexpr absl::Duration kReadInterval = absl::Milliseconds(50);

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
  MOESERVE_ASSIGN_OR_RETURN(const MoeMetricsOptions resolved,
                            ResolveMoeMetrics(metrics, loaded.engine->ExpertSnapshot()));
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
      macs_(std::make_shared<RequestMacs>(loaded_.engine->spec())),
      expert_metrics_(metrics.mode == MoeMetricsMode::kOff
                          ? nullptr
                          : std::make_unique<ExpertMetrics>(metrics, loaded_.engine->spec())) {}

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
  if (expert_metrics_ == nullptr) return;
  const absl::Time now = SteadyNow();
  ExpertStats stats = engine().ExpertSnapshot();
  expert_metrics_->Observe(stats, now);
  expert_history_.Add(now, std::move(stats));
}

EngineStats ServedModel::Stats() const {
  EngineStats stats = engine().Stats();
  if (engine_stuck_) stats.healthy = false;
  return stats;
}

void ServedModel::WriteExpertMetrics(PrometheusText& text) {
  if (expert_metrics_ == nullptr) return;
  if (expert_history_.Latest() == nullptr) Tick();
  if (const auto stats = RecentExperts(); stats != nullptr) {
    expert_metrics_->Write(text, *stats, name_);
  }
}

std::shared_ptr<const ExpertStats> ServedModel::RecentExperts() {
  // The engine counts the end of a request after its routes.
  const uint64_t finished = engine().Stats().finished();
  const absl::Time now = SteadyNow();
  MutexLock lock(recent_mutex_);
  // A stuck engine could hold its locks.
  if (engine_stuck_) return recent_ != nullptr ? recent_ : expert_history_.Latest();
  if (recent_ == nullptr || finished != recent_finished_ || now - recent_time_ >= kReadInterval) {
    recent_ = std::make_shared<const ExpertStats>(engine().ExpertSnapshot());
    recent_time_ = now;
    recent_finished_ = finished;
  }
  return recent_;
}

}  // namespace moeserve::server
