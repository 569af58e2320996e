// Loads, replaces and unloads models while the server runs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "base/status.h"
#include "server/metrics/expert_metrics.h"
#include "server/models/model_registry.h"

namespace moeserve::server {

struct ModelManagerOptions {
  // Loads the checkpoint at `path`. ResourceExhausted if its weights and its KV cache together need
  // more than `max_bytes`. One call at a time.
  std::function<Result<LoadedModel>(const std::string& path, int64_t max_bytes)> load;
  // Folder of the checkpoints that clients may load. Empty: they may only load the models that
  // were declared when the server started.
  std::string folder;
  // Limit on the weights and KV caches of all models together, in bytes; 0: no limit.
  int64_t memory = 0;
  MoeMetricsOptions metrics;
  size_t constraint_cache_bytes = 0;  // ServedModel::Create(); for each model
  // Is called with every model that was loaded, before requests use it. May be empty.
  std::function<void(ServedModel&)> started;
  // Is called after every change of what is served. May be empty.
  std::function<void()> changed;
};

// Returns InvalidArgument unless `name` has 1 to 128 letters, digits, '.', '_', '-' and '/', does
// not start with '.' or '/' and has no component "..".
absl::Status CheckModelName(const std::string& name);

// Thread-safe.
class ModelManager {
 public:
  using Done = std::function<void(Result<ModelStatus>)>;

  // `registry` must outlive the manager.
  ModelManager(ModelRegistry& registry, ModelManagerOptions options);
  // Waits for the load that is in progress. Those that wait end with Unavailable.
  ~ModelManager();
  ModelManager(const ModelManager&) = delete;
  ModelManager& operator=(const ModelManager&) = delete;

  // Loads the checkpoint at `path`, which may be anywhere, for a declared model, on the calling
  // thread. Errors: those of Load().
  Result<ModelStatus> LoadNow(const std::string& name, const std::string& path);

  // Loads the checkpoint at `path`, which is relative to the folder of models, and then serves it
  // under `name`, instead of the version before, if there is one. If `path` is empty: the
  // checkpoint that was loaded under this name before, or the folder's checkpoint with this name.
  // Returns at once; another thread loads one model after the other and calls `done` once. `done`
  // must return quickly. Errors, after which the version before is still served: InvalidArgument
  // for a bad name or path and for a checkpoint that cannot be loaded, NotFound, ResourceExhausted
  // with code "model_memory" beyond the limit on memory, Unavailable with code "model_busy" if this
  // model is being loaded or too many loads wait.
  void Load(const std::string& name, const std::string& path, Done done);

  // Stops serving a model; requests that use it are not disturbed.
  absl::Status Unload(const std::string& name);

 private:
  struct Job {
    std::string name;
    int64_t version = 0;
    std::string path;
    Done done;
  };

  Result<std::string> CheckpointPath(const std::string& name, const std::string& path) const;
  Result<Job> Begin(const std::string& name, const std::string& path);
  // Loads the checkpoint and ends what BeginLoad() has begun.
  Result<ModelStatus> Run(const Job& job);
  Result<std::shared_ptr<ServedModel>> LoadVersion(const Job& job);
  void Loop(const std::stop_token& stop);

  ModelRegistry& registry_;
  const ModelManagerOptions options_;
  Mutex load_mutex_;  // held while a model is loaded
  Mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;  // last, because it uses the other members
};

}  // namespace moeserve::server
