#include "server/models/model_registry.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "server/base/api_error.h"
#include "server/logging/logging.h"

namespace moeserve::server {
namespace {

// How often retired models are checked for requests that still use them.
constexpr std::chrono::milliseconds kCheckPeriod{20};
// How long the engine of a model that no request uses may take to end its last step.
constexpr absl::Duration kLastStep = absl::Seconds(60);

absl::Status NotServed(std::string_view name) {
  return MakeError(absl::StatusCode::kNotFound, "model_not_found",
                   Concat("the model ", Quoted(std::string(name), 64), " is not served here"),
                   "model");
}

absl::Status Busy(std::string_view name) {
  return MakeError(absl::StatusCode::kUnavailable, "model_busy",
                   Concat("the model ", Quoted(std::string(name), 64),
                          " is being loaded: try again when that has ended"),
                   "model");
}

}  // namespace

std::string_view Name(ModelState state) {
  switch (state) {
    case ModelState::kUnloaded:
      return "unloaded";
    case ModelState::kLoading:
      return "loading";
    case ModelState::kReady:
      return "ready";
  }
  return "";
}

ModelRegistry::ModelRegistry()
    : destroyer_([this](const std::stop_token& stop) { DestroyRetired(stop); }) {}

ModelRegistry::~ModelRegistry() {
  {
    MutexLock lock(mutex_);
    for (const auto& slot : slots_) Retire(*slot);
    // Under the lock, so that the thread does not take this end for an unloading.
    destroyer_.request_stop();
  }
  destroyer_.join();
}

ModelRegistry::Slot* ModelRegistry::FindSlot(std::string_view name) const {
  for (const auto& slot : slots_) {
    for (const std::string& other : slot->names) {
      if (other == name) return slot.get();
    }
  }
  return nullptr;
}

absl::Status ModelRegistry::Declare(std::vector<std::string> names, std::string path) {
  MOESERVE_CHECK(!names.empty(), "a model has a name");
  MutexLock lock(mutex_);
  for (const std::string& name : names) {
    if (FindSlot(name) != nullptr || std::count(names.begin(), names.end(), name) > 1) {
      return absl::AlreadyExistsError(
          Concat("the model name ", Quoted(name, 64), " is given twice"));
    }
  }
  if (slots_.size() >= kMaxModels) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "too_many_models",
        Concat("expected at most ", kMaxModels, " names of models since the server's start"));
  }
  auto slot = std::make_unique<Slot>();
  slot->names = std::move(names);
  slot->path = std::move(path);
  slots_.push_back(std::move(slot));
  return absl::OkStatus();
}

Result<int64_t> ModelRegistry::BeginLoad(const std::string& name, const std::string& path) {
  MutexLock lock(mutex_);
  Slot* const slot = FindSlot(name);
  if (slot == nullptr) return NotServed(name);
  if (slot->loading) return Busy(name);
  slot->loading = true;
  slot->error = absl::OkStatus();
  slot->loading_path = path;
  return ++slot->last_version;
}

void ModelRegistry::EndLoad(const std::string& name, Result<std::shared_ptr<ServedModel>> model) {
  MutexLock lock(mutex_);
  Slot* const slot = FindSlot(name);
  MOESERVE_CHECK(slot != nullptr && slot->loading, "BeginLoad() was called");
  slot->loading = false;
  if (!model.ok()) {
    slot->error = model.status();
    return;
  }
  Retire(*slot);
  slot->path = slot->loading_path;
  slot->served = *std::move(model);
}

absl::Status ModelRegistry::Unload(const std::string& name) {
  MutexLock lock(mutex_);
  Slot* const slot = FindSlot(name);
  if (slot == nullptr) return NotServed(name);
  if (slot->loading) return Busy(name);
  if (slot->served == nullptr) {
    return InvalidValue("model", Concat("the model ", Quoted(name, 64), " is not loaded"));
  }
  Retire(*slot);
  return absl::OkStatus();
}

void ModelRegistry::Retire(Slot& slot) {
  if (slot.served == nullptr) return;
  slot.retired.push_back(std::exchange(slot.served, nullptr));
  changed_.notify_all();
}

Result<std::shared_ptr<ServedModel>> ModelRegistry::Find(std::string_view name) const {
  MutexLock lock(mutex_);
  const Slot* const slot = FindSlot(name);
  if (slot != nullptr && slot->served != nullptr) return slot->served;
  if (slot != nullptr && slot->awaited()) {
    return MakeError(absl::StatusCode::kUnavailable, "loading", "the model is being loaded");
  }
  return NotServed(name);
}

std::vector<std::string> ModelRegistry::Names() const {
  std::vector<std::string> names;
  MutexLock lock(mutex_);
  for (const auto& slot : slots_) {
    if (slot->served == nullptr && !slot->awaited()) continue;
    names.insert(names.end(), slot->names.begin(), slot->names.end());
  }
  return names;
}

std::vector<std::shared_ptr<ServedModel>> ModelRegistry::Served() const {
  std::vector<ModelPtr> models;
  MutexLock lock(mutex_);
  for (const auto& slot : slots_) {
    if (slot->served != nullptr) models.push_back(slot->served);
  }
  return models;
}

std::vector<std::shared_ptr<ServedModel>> ModelRegistry::InMemory() const {
  std::vector<ModelPtr> models = Served();
  MutexLock lock(mutex_);
  for (const auto& slot : slots_) {
    models.insert(models.end(), slot->retired.begin(), slot->retired.end());
  }
  return models;
}

ModelStatus ModelRegistry::StatusOf(const Slot& slot) {
  ModelStatus out;
  out.name = slot.names.front();
  out.aliases.assign(slot.names.begin() + 1, slot.names.end());
  out.loading = slot.loading;
  out.state = slot.served != nullptr ? ModelState::kReady
              : slot.awaited()       ? ModelState::kLoading
                                     : ModelState::kUnloaded;
  out.path = slot.path;
  out.error = slot.error;
  if (slot.served != nullptr) {
    out.version = slot.served->version();
    out.memory_bytes = slot.served->held_bytes();
  }
  for (const ModelPtr& model : slot.retired) out.memory_bytes += model->held_bytes();
  return out;
}

std::vector<ModelStatus> ModelRegistry::List() const {
  std::vector<ModelStatus> out;
  MutexLock lock(mutex_);
  for (const auto& slot : slots_) out.push_back(StatusOf(*slot));
  return out;
}

Result<ModelStatus> ModelRegistry::Status(std::string_view name) const {
  MutexLock lock(mutex_);
  const Slot* const slot = FindSlot(name);
  if (slot == nullptr) return NotServed(name);
  return StatusOf(*slot);
}

int64_t ModelRegistry::memory_bytes() const {
  int64_t bytes = 0;
  for (const ModelStatus& status : List()) bytes += status.memory_bytes;
  return bytes;
}

std::vector<ModelRegistry::Totals> ModelRegistry::AllTotals() const {
  std::vector<Totals> out;
  // The engines are asked without the lock, because they have locks of their own.
  std::vector<std::vector<ModelPtr>> retired;
  {
    MutexLock lock(mutex_);
    for (const auto& slot : slots_) {
      Totals totals;
      totals.name = slot->names.front();
      totals.served = slot->served;
      totals.requests = slot->requests;
      totals.engine = slot->past;
      totals.memory_bytes = StatusOf(*slot).memory_bytes;
      out.push_back(std::move(totals));
      retired.push_back(slot->retired);
    }
  }
  for (size_t i = 0; i < out.size(); ++i) {
    Totals& totals = out[i];
    EngineStats sum;
    sum.healthy = false;
    if (totals.served != nullptr) {
      sum = totals.served->Stats();
      totals.version = totals.served->version();
    }
    sum.AddCounters(totals.engine);
    for (const ModelPtr& model : retired[i]) sum.AddCounters(model->Stats());
    totals.engine = sum;
  }
  return out;
}

std::shared_ptr<RequestMetrics> ModelRegistry::RequestMetricsOf(std::string_view name) const {
  MutexLock lock(mutex_);
  const Slot* const slot = FindSlot(name);
  return slot != nullptr ? slot->requests : nullptr;
}

void ModelRegistry::DestroyRetired(const std::stop_token& stop) {
  const auto any_retired = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::any_of(slots_.begin(), slots_.end(),
                       [](const auto& slot) { return !slot->retired.empty(); });
  };
  MutexLock lock(mutex_);
  while (true) {
    if (!any_retired()) {
      if (stop.stop_requested()) return;
      changed_.wait(lock, stop, any_retired);
      continue;
    }
    // Nobody can take a new share of a retired model, except AllTotals() for a moment.
    ModelPtr unused;
    Slot* owner = nullptr;
    for (const auto& slot : slots_) {
      for (ModelPtr& model : slot->retired) {
        if (model.use_count() != 1) continue;
        unused = model;
        owner = slot.get();
      }
    }
    if (unused == nullptr) {
      lock.unlock();
      std::this_thread::sleep_for(kCheckPeriod);
      lock.lock();
      continue;
    }
    lock.unlock();
    // The last request may have been cancelled in the middle of a step, whose work still counts.
    unused->engine().Drain(SteadyNow() + kLastStep);
    const EngineStats stats = unused->Stats();
    lock.lock();
    owner->past.AddCounters(stats);
    // These describe a moment, and must not be counted for ever.
    owner->past.running = 0;
    owner->past.waiting = 0;
    std::erase(owner->retired, unused);
    lock.unlock();
    while (unused.use_count() != 1) std::this_thread::sleep_for(kCheckPeriod);
    if (!stop.stop_requested()) {
      LogInfo("models", Concat("unloaded ", unused->name(), " version ", unused->version(), ": ",
                               unused->memory_bytes() >> 20, " MiB"));
    }
    unused.reset();
    lock.lock();
  }
}

}  // namespace moeserve::server
