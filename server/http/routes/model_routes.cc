#include "server/http/routes/model_routes.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/strict_json.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/http/error_response.h"
#include "server/http/routes/json_response.h"

namespace moeserve::server::http {
namespace {

constexpr size_t kMaxBodyBytes = 16 << 10;

OrderedJson StatusJson(const ModelStatus& model) {
  OrderedJson out;
  out["id"] = model.name;
  out["object"] = "model";
  out["aliases"] = model.aliases;
  out["state"] = Name(model.state);
  out["version"] = model.version;
  out["memory_bytes"] = model.memory_bytes;
  return out;
}

Response ToResponse(const Result<ModelStatus>& result) {
  return result.ok() ? JsonResponse(StatusJson(*result)) : ErrorResponse(result.status());
}

// Waits until a model is loaded. If the client leaves, the model is loaded nevertheless.
class LoadResponse final : public PendingResponse {
 public:
  struct Shared {
    Mutex mutex;
    std::optional<Result<ModelStatus>> result ABSL_GUARDED_BY(mutex);
  };

  LoadResponse(std::shared_ptr<Shared> shared, LoadedFormat format)
      : shared_(std::move(shared)), format_(std::move(format)) {}

  Progress Next() override {
    MutexLock lock(shared_->mutex);
    if (!shared_->result) return Wait();
    return format_(*shared_->result);
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const LoadedFormat format_;
};

struct Command {
  ModelManager* manager = nullptr;
  std::string model;
  std::string path;
};

Result<Command> ParseCommand(const Request& request, const ServerContext& context) {
  Command out;
  if (request.body.size() > kMaxBodyBytes) {
    return MakeError(absl::StatusCode::kResourceExhausted, "request_too_large",
                     "the body is too large");
  }
  JsonLimits limits;
  limits.max_depth = 4;
  auto body = ParseStrictJson(request.body, limits);
  if (!body.ok() || !body->is_object()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "invalid_json",
                     "the body must be a JSON object");
  }
  for (const auto& [name, value] : body->items()) {
    if (name != "model" && name != "path") {
      return InvalidValue("", "the body may have the fields 'model' and 'path' only");
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(const auto model, StringField(*body, "model"));
  MOESERVE_ASSIGN_OR_RETURN(const auto path, StringField(*body, "path"));
  if (!model) return MissingField("model");
  MOESERVE_ASSIGN_OR_RETURN(out.manager, context.ModelManagerFor(*model, request.key.get()));
  out.model = *model;
  out.path = path.value_or("");
  return out;
}

Handled Load(const Request& request, ServerContext& context) {
  const auto command = ParseCommand(request, context);
  if (!command.ok()) return ErrorResponse(command.status());
  return LoadModel(*command->manager, command->model, command->path, request.wake, &ToResponse);
}

Handled Unload(const Request& request, ServerContext& context) {
  const auto command = ParseCommand(request, context);
  if (!command.ok()) return ErrorResponse(command.status());
  if (!command->path.empty()) return ErrorResponse(InvalidValue("path", "unknown field 'path'"));
  const absl::Status status = command->manager->Unload(command->model);
  if (!status.ok()) return ErrorResponse(status);
  return ToResponse(context.models().Status(command->model));
}

}  // namespace

Handled LoadModel(ModelManager& manager, const std::string& model, const std::string& path,
                  std::function<void()> wake, LoadedFormat format) {
  auto shared = std::make_shared<LoadResponse::Shared>();
  manager.Load(model, path, [shared, wake = std::move(wake)](Result<ModelStatus> result) {
    {
      MutexLock lock(shared->mutex);
      shared->result = std::move(result);
    }
    wake();
  });
  return std::make_unique<LoadResponse>(std::move(shared), std::move(format));
}

void AddModelRoutes(Router& router, ServerContext& context) {
  const auto add = [&](std::string_view path, Handled (*handler)(const Request&, ServerContext&)) {
    router.Add("POST", path, Access::Key(Scope::kAdmin), Work::kQuick,
               [handler, &context](const Request& request) { return handler(request, context); });
  };
  add("/v1/models/load", &Load);
  add("/v1/models/unload", &Unload);
}

}  // namespace moeserve::server::http
