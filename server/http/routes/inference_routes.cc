#include "server/http/routes/inference_routes.h"

#include <charconv>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "base/steady_clock.h"
#include "base/strict_json.h"
#include "server/answers/answer.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/http/error_response.h"
#include "server/http/routes/json_response.h"
#include "server/http/routes/model_routes.h"
#include "server/http/routes/request_body.h"
#include "server/http/routes/submit.h"
#include "server/http/url.h"
#include "server/open_inference/infer_json.h"
#include "server/open_inference/infer_run.h"

namespace moeserve::server::http {
namespace {

constexpr size_t kMaxControlBytes = 16 << 10;

std::string InferenceErrorJson(const HttpError& error) {
  return DumpJson({{"error", error.message}});
}

Response InferenceError(const absl::Status& status) {
  return ErrorResponse(status, &InferenceErrorJson);
}

enum class Format { kInfer, kGenerate };

// One running request, from its submission to the last byte of the response.
class InferSession final : public PendingResponse {
 public:
  InferSession(std::unique_ptr<InferRun> run, Format format)
      : run_(std::move(run)), format_(format) {}

  Progress Next() override {
    Result<std::optional<InferAnswer>> answer = run_->Take();
    if (!answer.ok()) {
      final_status_ = ToHttpError(answer.status()).status;
      if (!streaming_) return InferenceError(answer.status());
      const HttpError error = ReportedError(answer.status());
      return StreamPart{Concat("data: ", InferenceErrorJson(error), "\n\n"), true};
    }
    if (!*answer) return Wait();
    if (run_->stream()) {
      streaming_ = true;
      return StreamPart{Concat("data: ", GenerateResponseBody(**answer), "\n\n"), (*answer)->last};
    }
    Response response;
    if (format_ == Format::kGenerate) {
      response.body = GenerateResponseBody(**answer);
      return response;
    }
    InferBody body = InferResponseBody(**answer);
    response.body = std::move(body.body);
    if (body.json_bytes) {
      response.content_type = "application/octet-stream";
      response.headers.emplace_back("Inference-Header-Content-Length",
                                    std::to_string(*body.json_bytes));
    }
    return response;
  }

  void CheckBacklog() override {
    if (run_->overflowed()) run_->Cancel();
  }
  int FinalStatus() const override { return final_status_; }

 private:
  const std::unique_ptr<InferRun> run_;
  const Format format_;
  bool streaming_ = false;  // whether a part of a stream was sent
  int final_status_ = 200;
};

// The part of a path after "/v2/models/": NAME[/versions/VERSION][/ACTION].
struct ModelPath {
  std::string name;
  std::string version;
  std::string_view action;  // empty: the model itself
};

std::optional<ModelPath> ParseModelPath(std::string_view path) {
  path.remove_prefix(std::string_view("/v2/models/").size());
  ModelPath out;
  for (const std::string_view action : {"/infer", "/generate", "/generate_stream", "/ready"}) {
    if (!path.ends_with(action)) continue;
    out.action = action.substr(1);
    path.remove_suffix(action.size());
    break;
  }
  constexpr std::string_view kVersions = "/versions/";
  if (const size_t at = path.rfind(kVersions); at != std::string_view::npos) {
    const std::string_view version = path.substr(at + kVersions.size());
    if (version.empty() || version.find('/') != std::string_view::npos) return std::nullopt;
    out.version = version;
    path = path.substr(0, at);
  }
  auto name = PercentDecode(path);
  if (!name || name->empty()) return std::nullopt;
  out.name = *std::move(name);
  return out;
}

absl::Status NoSuchPath() {
  return MakeError(absl::StatusCode::kNotFound, "not_found", "there is no such address");
}

class InferenceRoutes {
 public:
  explicit InferenceRoutes(ServerContext& context) : context_(context) {}

  Handled Server(const Request&) { return JsonResponse(ServerMetadataJson()); }

  Handled Describe(const Request& request) {
    const auto run = [&]() -> Result<OrderedJson> {
      const auto path = ParseModelPath(request.path);
      if (!path || (!path->action.empty() && path->action != "ready")) return NoSuchPath();
      if (path->action == "ready") {
        MOESERVE_ASSIGN_OR_RETURN(const auto model,
                                  context_.ModelFor(path->name, request.key.get()));
        MOESERVE_RETURN_IF_ERROR(CheckVersion(*model, path->version));
        return OrderedJson{{"name", path->name}, {"ready", true}};
      }
      MOESERVE_ASSIGN_OR_RETURN(const auto model,
                                context_.LoadedModelFor(path->name, request.key.get()));
      MOESERVE_RETURN_IF_ERROR(CheckVersion(*model, path->version));
      MOESERVE_ASSIGN_OR_RETURN(const ModelStatus status, context_.models().Status(path->name));
      return ModelMetadataJson(status, path->name, InferKindOf(model->engine().spec()));
    };
    return JsonOrError(run(), &InferenceErrorJson);
  }

  Handled Infer(const Request& request) {
    return StartedOrRefused(Start(request), Errors(), request.key.get(), context_);
  }

  Handled Index(const Request& request) {
    const auto ready = ReadyOnly(request);
    if (!ready.ok()) return InferenceError(ready.status());
    std::vector<ModelStatus> models;
    for (ModelStatus& model : context_.models().List()) {
      if (*ready && model.state != ModelState::kReady) continue;
      if (request.key != nullptr && !request.key->MayUseModel(model.name)) continue;
      models.push_back(std::move(model));
    }
    return JsonResponse(RepositoryIndexJson(models));
  }

  Handled Control(const Request& request) {
    std::string_view path = request.path;
    path.remove_prefix(std::string_view("/v2/repository/models/").size());
    const bool load = path.ends_with("/load");
    if (!load && !path.ends_with("/unload")) return InferenceError(NoSuchPath());
    const auto name = PercentDecode(path.substr(0, path.rfind('/')));
    if (!name) return InferenceError(NoSuchPath());
    const auto manager = context_.ModelManagerFor(*name, request.key.get());
    if (!manager.ok()) return InferenceError(manager.status());
    const auto folder = CheckpointPath(request, load);
    if (!folder.ok()) return InferenceError(folder.status());
    const auto answer = [](const Result<ModelStatus>& result) {
      return result.ok() ? JsonResponse(OrderedJson::object()) : InferenceError(result.status());
    };
    if (load) return LoadModel(**manager, *name, *folder, request.wake, answer);
    if (const absl::Status status = (*manager)->Unload(*name); !status.ok()) {
      return InferenceError(status);
    }
    return JsonResponse(OrderedJson::object());
  }

 private:
  static AnswerFormat Errors() { return {.error_body = &InferenceErrorJson}; }

  Result<Handled> Start(const Request& request) {
    MOESERVE_RETURN_IF_ERROR(context_.CheckServing());
    auto path = ParseModelPath(request.path);
    if (!path || path->action.empty() || path->action == "ready") return NoSuchPath();
    {
      // The most helpful error comes first.
      MOESERVE_ASSIGN_OR_RETURN(const auto model, context_.ModelFor(path->name, request.key.get()));
      MOESERVE_RETURN_IF_ERROR(CheckVersion(*model, path->version));
    }
    const Format format = path->action == "infer" ? Format::kInfer : Format::kGenerate;
    const Pieces pieces = path->action == "generate_stream" ? Pieces::kByDefault : Pieces::kNever;
    std::unique_ptr<InferRun> run;
    {
      MOESERVE_ASSIGN_OR_RETURN(const size_t json_bytes, JsonBytes(request));
      const std::string_view body = request.body;
      MOESERVE_ASSIGN_OR_RETURN(const auto json,
                                ParseBody(body.substr(0, json_bytes), request, context_));
      // The elements after the JSON are copied once, and their texts a second time as prompts.
      MemoryCharge charge(context_.memory());
      MOESERVE_RETURN_IF_ERROR(charge.Add(3 * body.size(), ChargeFor::kNewRequest));
      MOESERVE_ASSIGN_OR_RETURN(InferRequest infer, format == Format::kInfer
                                                        ? ParseInfer(*json, body.substr(json_bytes))
                                                        : ParseGenerate(*json));
      infer.model = path->name;
      infer.version = path->version;
      MOESERVE_ASSIGN_OR_RETURN(
          run, InferRun::Prepare(context_, infer, pieces, request.key, request.record));
    }
    const absl::Time deadline = SteadyNow() + context_.settings().limits.max_request_time;
    if (!run->NeedsCompiling()) return Launch(std::move(run), format, deadline, request.wake);
    auto shared = std::make_shared<std::unique_ptr<InferRun>>(std::move(run));
    return PrepareLater(
        context_, request,
        [&context = context_, shared, format, deadline, wake = request.wake, key = request.key] {
          return StartedOrRefused(Launch(std::move(*shared), format, deadline, wake), Errors(),
                                  key.get(), context);
        });
  }

  static Result<Handled> Launch(std::unique_ptr<InferRun> run, Format format, absl::Time deadline,
                                std::function<void()> wake) {
    MOESERVE_RETURN_IF_ERROR(run->Compile());
    MOESERVE_RETURN_IF_ERROR(run->Launch(deadline, std::move(wake)));
    return Handled(std::make_unique<InferSession>(std::move(run), format));
  }

  // Returns the size of the JSON at the start of the body.
  static Result<size_t> JsonBytes(const Request& request) {
    const std::string& header = request.inference_header;
    if (header.empty()) return request.body.size();
    size_t size = 0;
    const auto [end, error] = std::from_chars(header.data(), header.data() + header.size(), size);
    if (error != std::errc() || end != header.data() + header.size() ||
        size > request.body.size()) {
      return InvalidValue("Inference-Header-Content-Length",
                          "'Inference-Header-Content-Length': expected the size of the JSON, "
                          "which is at most that of the body");
    }
    return size;
  }

  // Parses the body of a request about the repository; an empty object if there is none.
  static Result<Json> ControlBody(const Request& request) {
    if (request.body.empty()) return Json::object();
    JsonLimits limits;
    limits.max_depth = 4;
    limits.max_bytes = kMaxControlBytes;
    auto body = ParseStrictJson(request.body, limits);
    if (!body.ok() || !body->is_object()) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "invalid_json",
          Concat("the body must be a JSON object of at most ", kMaxControlBytes, " bytes"));
    }
    return body;
  }

  static Result<bool> ReadyOnly(const Request& request) {
    MOESERVE_ASSIGN_OR_RETURN(const auto body, ControlBody(request));
    MOESERVE_ASSIGN_OR_RETURN(const auto ready, BoolField(body, "ready"));
    return ready.value_or(false);
  }

  // Returns the parameter "path" of a load; empty if it is absent.
  static Result<std::string> CheckpointPath(const Request& request, bool load) {
    MOESERVE_ASSIGN_OR_RETURN(const auto body, ControlBody(request));
    const Json* parameters = FindField(body, "parameters");
    if (parameters == nullptr || !load) return std::string();
    if (!parameters->is_object()) {
      return InvalidValue("parameters", "'parameters' must be an object");
    }
    for (const auto& [name, value] : parameters->items()) {
      if (name != "path") {
        return InvalidValue("parameters", Concat("'parameters': only 'path' is supported, found '",
                                                 Printable(name, 64), "'"));
      }
    }
    MOESERVE_ASSIGN_OR_RETURN(auto path, StringField(*parameters, "path"));
    return std::move(path).value_or("");
  }

  ServerContext& context_;
};

}  // namespace

void AddInferenceRoutes(Router& router, ServerContext& context) {
  auto routes = std::make_shared<InferenceRoutes>(context);
  const auto add = [&](std::string_view method, std::string_view pattern, Access access,
                       Handled (InferenceRoutes::*handler)(const Request&)) {
    router.Add(method, pattern, access, Work::kQuick, HandlerOf(routes, handler), BodyType::kAny);
  };
  constexpr Access kModels = Access::AnyOf(Scope::kStatistics, Scope::kGenerate);
  add("GET", "/v2", Access::Open(), &InferenceRoutes::Server);
  add("GET", "/v2/models/*", kModels, &InferenceRoutes::Describe);
  add("POST", "/v2/models/*", Access::Key(Scope::kGenerate), &InferenceRoutes::Infer);
  add("POST", "/v2/repository/index", kModels, &InferenceRoutes::Index);
  add("POST", "/v2/repository/models/*", Access::Key(Scope::kAdmin), &InferenceRoutes::Control);
}

}  // namespace moeserve::server::http
