#include "server/models/model_manager.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <limits>
#include <new>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/text_values.h"
#include "server/generation/generation_params.h"
#include "server/logging/logging.h"

namespace moeserve::server {
namespace {

constexpr size_t kMaxWaiting = 16;
constexpr size_t kMaxNameLength = 128;

bool IsNameCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-' || c == '/';
}

// Returns whether `path` stays in the folder that it is relative to, apart from symbolic links.
bool StaysInside(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) return false;
  const std::filesystem::path parsed(path);
  if (parsed.is_absolute()) return false;
  return std::none_of(parsed.begin(), parsed.end(), [](const auto& part) { return part == ".."; });
}

absl::Status ModelMemory(std::string message) {
  return MakeError(absl::StatusCode::kResourceExhausted, "model_memory", std::move(message));
}

}  // namespace

absl::Status CheckModelName(const std::string& name) {
  if (!name.empty() && name.size() <= kMaxNameLength && name.front() != '.' &&
      std::all_of(name.begin(), name.end(), IsNameCharacter) && StaysInside(name)) {
    return absl::OkStatus();
  }
  return InvalidValue("model",
                      Concat("model name: expected 1 to ", kMaxNameLength,
                             " letters, digits, '.', '_', '-' and '/', not starting with '.' or "
                             "'/', found ",
                             Quoted(name, 64)));
}

ModelManager::ModelManager(ModelRegistry& registry, ModelManagerOptions options)
    : registry_(registry),
      options_(std::move(options)),
      thread_([this](const std::stop_token& stop) { Loop(stop); }) {}

ModelManager::~ModelManager() {
  thread_.request_stop();
  thread_.join();
  for (Job& job : jobs_) {
    const absl::Status status =
        MakeError(absl::StatusCode::kUnavailable, "draining", "the server is shutting down");
    registry_.EndLoad(job.name, status);
    job.done(status);
  }
}

Result<std::string> ModelManager::CheckpointPath(const std::string& name,
                                                 const std::string& path) const {
  const auto declared = registry_.Status(name);
  // Names that were given on the command line may have other characters.
  if (!declared.ok()) MOESERVE_RETURN_IF_ERROR(CheckModelName(name));
  if (path.empty()) {
    if (declared.ok()) return declared->path;
    if (options_.folder.empty()) {
      return MakeError(absl::StatusCode::kNotFound, "model_not_found",
                       Concat("the model ", Quoted(name, 64),
                              " was not given to the server, and it has no --models-folder"),
                       "model");
    }
  } else if (options_.folder.empty()) {
    return InvalidValue("path", "'path' needs a server with --models-folder");
  }
  const std::string& relative = path.empty() ? name : path;
  if (!StaysInside(relative)) {
    return InvalidValue("path",
                        Concat("'path': expected a path inside of --models-folder without '..', "
                               "found ",
                               Quoted(relative, 128)));
  }
  const std::filesystem::path full = std::filesystem::path(options_.folder) / relative;
  std::error_code error;
  if (!std::filesystem::exists(full, error)) {
    return MakeError(absl::StatusCode::kNotFound, "model_not_found",
                     Concat("--models-folder ", Printable(options_.folder, 256), " has no ",
                            Quoted(relative, 128), "; models are not downloaded"),
                     "path");
  }
  return full.string();
}

Result<ModelManager::Job> ModelManager::Begin(const std::string& name, const std::string& path) {
  Job job;
  MOESERVE_ASSIGN_OR_RETURN(job.path, CheckpointPath(name, path));
  if (const auto status = registry_.Status(name); status.ok()) {
    job.name = status->name;
  } else {
    job.name = name;
    MOESERVE_RETURN_IF_ERROR(registry_.Declare({name}, job.path));
  }
  MOESERVE_ASSIGN_OR_RETURN(job.version, registry_.BeginLoad(job.name, job.path));
  return job;
}

Result<ModelStatus> ModelManager::LoadNow(const std::string& name, const std::string& path) {
  Job job;
  job.name = name;
  job.path = path;
  MOESERVE_ASSIGN_OR_RETURN(job.version, registry_.BeginLoad(name, path));
  return Run(job);
}

void ModelManager::Load(const std::string& name, const std::string& path, Done done) {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (jobs_.size() >= kMaxWaiting) {
      status = MakeError(absl::StatusCode::kUnavailable, "model_busy",
                         "too many models wait to be loaded: try again later");
    } else if (Result<Job> job = Begin(name, path); job.ok()) {
      job->done = std::move(done);
      jobs_.push_back(*std::move(job));
      changed_.notify_one();
      return;
    } else {
      status = job.status();
    }
  }
  done(status);
}

Result<std::shared_ptr<ServedModel>> ModelManager::LoadVersion(const Job& job) {
  int64_t left = std::numeric_limits<int64_t>::max();
  const int64_t used = registry_.memory_bytes();
  if (options_.memory > 0) left = std::max<int64_t>(options_.memory - used, 0);
  try {
    Result<LoadedModel> loaded = options_.load(job.path, left);
    if (absl::IsResourceExhausted(loaded.status()) && options_.memory > 0) {
      return ModelMemory(Concat(
          std::string(loaded.status().message()), "; the models in memory have ", ShowBytes(used),
          " of the ", ShowBytes(options_.memory), " of --model-memory: unload one first"));
    }
    if (!loaded.ok()) return loaded.status();
    MOESERVE_ASSIGN_OR_RETURN(
        std::shared_ptr<ServedModel> model,
        ServedModel::Create(job.name, job.version, *std::move(loaded), options_.metrics,
                            options_.constraint_cache_bytes));
    if (options_.started) options_.started(*model);
    return model;
  } catch (const std::bad_alloc&) {
    return ModelMemory("the machine has too little memory for this model");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

Result<ModelStatus> ModelManager::Run(const Job& job) {
  absl::Status status;
  {
    MutexLock loading(load_mutex_);
    auto model = LoadVersion(job);
    status = model.status();
    if (status.ok()) {
      LogInfo("models",
              Concat("serving ", job.name, " version ", job.version, ": ", (*model)->description(),
                     ", context ", (*model)->engine().max_model_len(), " tokens"));
    } else {
      LogError("models", Concat("cannot load ", job.name, " version ", job.version, ": ",
                                Printable(std::string(status.message()), 500)));
    }
    registry_.EndLoad(job.name, std::move(model));
  }
  if (options_.changed) options_.changed();
  if (!status.ok()) return status;
  return registry_.Status(job.name);
}

absl::Status ModelManager::Unload(const std::string& name) {
  const absl::Status status = registry_.Unload(name);
  if (absl::IsNotFound(status)) {
    // The error with the names that are served, if there are any.
    const std::vector<std::string> names = registry_.Names();
    const auto resolved = ResolveModel(name, names);
    return names.empty() || resolved.ok() ? status : resolved.status();
  }
  MOESERVE_RETURN_IF_ERROR(status);
  if (options_.changed) options_.changed();
  return absl::OkStatus();
}

void ModelManager::Loop(const std::stop_token& stop) {
  const auto any = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !jobs_.empty(); };
  MutexLock lock(mutex_);
  while (true) {
    if (!changed_.wait(lock, stop, any)) return;
    if (stop.stop_requested()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job.done(Run(job));
    lock.lock();
  }
}

}  // namespace moeserve::server
