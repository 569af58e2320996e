#include "server/http/routes/ollama_routes.h"

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/http/routes/json_response.h"
#include "server/http/routes/request_body.h"
#include "server/ollama/ollama_models.h"
#include "server/ollama/ollama_request.h"
#include "server/ollama/ollama_writer.h"

namespace moeserve::server::http {
namespace {

// What this server has no counterpart for.
struct MissingRoute {
  std::string_view start;  // of the path
  std::string_view reason;
};
constexpr std::string_view kNoFiles =
    "this server stores no models; its operator chooses what it serves (--model, --models-folder)";
constexpr MissingRoute kMissingRoutes[] = {
    {"/api/embed", "embeddings are served at /v1/embeddings"},
    {"/api/pull", kNoFiles},
    {"/api/push", kNoFiles},
    {"/api/create", kNoFiles},
    {"/api/copy", kNoFiles},
    {"/api/delete", kNoFiles},
    {"/api/blobs/", kNoFiles},
};

class OllamaRoutes {
 public:
  explicit OllamaRoutes(ServerContext& context) : context_(context) {}

  Handled Version(const Request&) { return JsonResponse({{"version", kOllamaVersion}}); }
  Handled Tags(const Request& request) { return List(request, &OllamaTagJson); }
  Handled Running(const Request& request) { return List(request, &OllamaRunningJson); }

  Handled Show(const Request& request) {
    const auto run = [&]() -> Result<OrderedJson> {
      MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context_));
      MOESERVE_ASSIGN_OR_RETURN(auto name, StringField(*body, "model"));
      if (!name) {
        MOESERVE_ASSIGN_OR_RETURN(name, StringField(*body, "name"));  // its older name
      }
      if (!name) return MissingField("model");
      const auto served = context_.ModelsOf(request.key.get());
      MOESERVE_ASSIGN_OR_RETURN(
          const auto model,
          context_.LoadedModelFor(ResolveOllamaName(*name, served), request.key.get()));
      return OllamaShowJson(*model, context_.settings().show_chat_template);
    };
    return JsonOrError(run(), &OllamaErrorJson);
  }

  Handled Refuse(const Request& request) {
    Response response;
    response.status = 404;
    std::string reason = Concat("there is no ", request.method, " ", Printable(request.path, 64));
    for (const MissingRoute& missing : kMissingRoutes) {
      if (!request.path.starts_with(missing.start)) continue;
      response.status = 501;
      reason = missing.reason;
    }
    response.body = DumpJson({{"error", std::move(reason)}});
    return response;
  }

 private:
  Handled List(const Request& request,
               OrderedJson (*describe)(const std::string&, const ServedModel&)) {
    OrderedJson models = OrderedJson::array();
    for (const std::string& name : context_.ModelsOf(request.key.get())) {
      const auto model = context_.models().Find(name);
      if (model.ok()) models.push_back(describe(name, **model));
    }
    return JsonResponse({{"models", std::move(models)}});
  }

  ServerContext& context_;
};

}  // namespace

void AddOllamaRoutes(Router& router, ServerContext& context) {
  auto routes = std::make_shared<OllamaRoutes>(context);
  const auto add = [&](std::string_view method, std::string_view pattern, Access access,
                       Handled (OllamaRoutes::*handler)(const Request&)) {
    router.Add(method, pattern, access, Work::kQuick, HandlerOf(routes, handler), BodyType::kAny);
  };
  constexpr Access kModels = Access::AnyOf(Scope::kStatistics, Scope::kGenerate);
  add("GET", "/api/version", Access::Open(), &OllamaRoutes::Version);
  add("GET", "/api/tags", kModels, &OllamaRoutes::Tags);
  add("GET", "/api/ps", kModels, &OllamaRoutes::Running);
  add("POST", "/api/show", kModels, &OllamaRoutes::Show);
  // The other paths, after those above.
  for (const char* method : {"GET", "POST", "DELETE"}) {
    add(method, "/api/*", Access::Key(Scope::kGenerate), &OllamaRoutes::Refuse);
  }
}

}  // namespace moeserve::server::http
