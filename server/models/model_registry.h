// The models that are served, by name.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/engine.h"
#include "server/metrics/request_metrics.h"
#include "server/models/served_model.h"

namespace moeserve::server {

enum class ModelState {
  kUnloaded,
  kLoading,  // no version is served yet; while a further one is loaded, the model is kReady
  kReady,
};

// Returns "unloaded", "loading" or "ready".
std::string_view Name(ModelState state);

struct ModelStatus {
  std::string name;
  std::vector<std::string> aliases;
  ModelState state = ModelState::kUnloaded;
  bool loading = false;      // whether a version is being loaded
  std::string path;          // of the version that was loaded last, or that will be loaded first
  int64_t version = 0;       // of the version that is served; 0: none
  int64_t memory_bytes = 0;  // ServedModel::held_bytes() of all versions in memory
  // Why the last load failed; OK if it succeeded. The old version is still served then.
  absl::Status error;
};

// Thread-safe. A name keeps its counters when its model is replaced or unloaded.
class ModelRegistry {
 public:
  // Limit on names of models without aliases, because each has its own metrics.
  static constexpr size_t kMaxModels = 256;

  ModelRegistry();
  // Waits until no request uses a model that was replaced or removed.
  ~ModelRegistry();
  ModelRegistry(const ModelRegistry&) = delete;
  ModelRegistry& operator=(const ModelRegistry&) = delete;

  // Adds a model that is not loaded. names[0] is its name, the others are aliases. AlreadyExists if
  // one of them is taken; ResourceExhausted beyond kMaxModels.
  absl::Status Declare(std::vector<std::string> names, std::string path);

  // Begins to load a version of a declared model: the state becomes kLoading if none is served.
  // Returns the new version's number. Unavailable, with code "model_busy", if another version is
  // being loaded; NotFound if the model is not declared.
  Result<int64_t> BeginLoad(const std::string& name, const std::string& path);
  // Ends what BeginLoad() has begun: serves `model` from now on, or reports its error and goes on
  // serving the version before. Requests that use the version before are not disturbed; it is
  // destroyed after the last of them.
  void EndLoad(const std::string& name, Result<std::shared_ptr<ServedModel>> model);
  // Stops serving the model; requests that use it are not disturbed. NotFound if it is not
  // declared, FailedPrecondition if it is not loaded, Unavailable with code "model_busy" while a
  // version is being loaded.
  absl::Status Unload(const std::string& name);

  // Returns the model with this name or alias. NotFound with code "model_not_found", or Unavailable
  // with code "loading".
  Result<std::shared_ptr<ServedModel>> Find(std::string_view name) const;
  // Returns the names and aliases of the models that are loaded or being loaded, in the order of
  // their declaration.
  std::vector<std::string> Names() const;
  // Returns the models that are served, in that order.
  std::vector<std::shared_ptr<ServedModel>> Served() const;
  // Returns those models, and the versions before that requests still use.
  std::vector<std::shared_ptr<ServedModel>> InMemory() const;
  // Returns the state of all models that were declared.
  std::vector<ModelStatus> List() const;
  // Returns the state of one model or alias; NotFound.
  Result<ModelStatus> Status(std::string_view name) const;
  // Returns the bytes of all models in memory, also of those that only running requests still use.
  int64_t memory_bytes() const;

  // The counters of all versions of one model together.
  struct Totals {
    std::string name;
    std::shared_ptr<ServedModel> served;  // may be null
    std::shared_ptr<RequestMetrics> requests;
    EngineStats engine;  // `healthy` is false if no version is served
    int64_t version = 0;
    int64_t memory_bytes = 0;
  };
  std::vector<Totals> AllTotals() const;
  // Returns the histograms of a declared model's requests.
  std::shared_ptr<RequestMetrics> RequestMetricsOf(std::string_view name) const;

 private:
  using ModelPtr = std::shared_ptr<ServedModel>;

  struct Slot {
    std::vector<std::string> names;
    std::string path;          // of the version that was loaded last
    std::string loading_path;  // of the version that is being loaded
    ModelPtr served;
    std::vector<ModelPtr> retired;  // versions that requests may still use
    EngineStats past;               // counters of the versions that were destroyed
    int64_t last_version = 0;
    bool loading = false;
    absl::Status error;
    std::shared_ptr<RequestMetrics> requests = std::make_shared<RequestMetrics>();

    // Returns whether the first version is being loaded or will be.
    bool awaited() const { return served == nullptr && (loading || last_version == 0); }
  };

  Slot* FindSlot(std::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Retire(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static ModelStatus StatusOf(const Slot& slot);

  void DestroyRetired(const std::stop_token& stop);

  mutable Mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::unique_ptr<Slot>> slots_ ABSL_GUARDED_BY(mutex_);
  std::jthread destroyer_;  // last, because it uses the other members
};

}  // namespace moeserve::server
