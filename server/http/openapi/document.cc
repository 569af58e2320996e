#include "server/http/openapi/document.h"

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "server/answers/answer.h"
#include "server/base/text_values.h"
#include "server/base/version.h"
#include "server/fields/request_fields.h"
#include "server/http/openapi/operations.h"
#include "server/http/openapi/schema_builder.h"
#include "server/http/openapi/schemas.h"

namespace moeserve::server::http {
namespace {

constexpr std::string_view kPath = "/openapi.json";
constexpr std::string_view kScheme = "key";
constexpr std::string_view kAbout =
    "Optional fields of requests may be null. Fields that the server does not know are ignored, or "
    "refused with --strict-fields. On a server with API keys, an operation needs a key with one of "
    "the scopes that its security names.";

// Returns e.g. "post_v1_completions".
std::string OperationId(const Operation& operation) {
  std::string out;
  for (const char c : operation.method) out += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  bool gap = true;
  for (const char c : operation.path) {
    const bool word = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    if (word && gap) out += '_';
    if (word) out += c;
    gap = !word;
  }
  return out;
}

OrderedJson ContentOf(std::string_view schema, std::string_view other_type, bool binary) {
  OrderedJson content = OrderedJson::object();
  if (!schema.empty()) content["application/json"]["schema"] = RefSchema(schema);
  if (!other_type.empty()) {
    OrderedJson text = TypeSchema("string");
    if (binary) text["contentEncoding"] = "binary";
    content[std::string(other_type)]["schema"] = std::move(text);
  }
  return content;
}

// Returns the alternatives of which a request needs one. The roles of a key are its scopes.
OrderedJson SecurityOf(const Access& access) {
  OrderedJson out = OrderedJson::array();
  for (const Scope scope : {Scope::kGenerate, Scope::kStatistics, Scope::kRouting, Scope::kAdmin}) {
    if (!access.scopes().Has(scope)) continue;
    out.push_back({{std::string(kScheme), OrderedJson::array({std::string(Name(scope))})}});
  }
  return out;
}

OrderedJson OperationJson(const Operation& operation, const Access& access) {
  OrderedJson out;
  out["operationId"] = OperationId(operation);
  out["tags"] = OrderedJson::array({operation.tag});
  out["summary"] = operation.summary;
  std::string_view names = operation.parameters;
  while (!names.empty()) {
    const size_t space = names.find(' ');
    out["parameters"].push_back(
        {{"$ref", "#/components/parameters/" + std::string(names.substr(0, space))}});
    names.remove_prefix(space == std::string_view::npos ? names.size() : space + 1);
  }
  if (!operation.request.empty()) {
    out["requestBody"]["required"] = !operation.optional_body;
    out["requestBody"]["content"] = ContentOf(operation.request, {}, false);
  }
  OrderedJson& answers = out["responses"];
  answers["200"]["description"] = "The answer";
  answers["200"]["content"] = ContentOf(operation.answer, operation.other_type,
                                        operation.other_type == "application/octet-stream");
  answers["default"]["description"] = "An error";
  answers["default"]["content"] = ContentOf(operation.error, {}, false);
  out["security"] = SecurityOf(access);
  return out;
}

// Returns what each route does with each request field that this server knows: an object of fields,
// of routes.
OrderedJson RequestFieldsJson() {
  const auto name_of = [](FieldUse use) {
    switch (use) {
      case FieldUse::kObeyed:
        return "obeyed";
      case FieldUse::kNoEffect:
        return "no effect";
      case FieldUse::kHint:
        return "hint";
      default:
        return "refused";
    }
  };
  OrderedJson out = OrderedJson::object();
  for (const std::string_view field : KnownFields()) {
    OrderedJson& uses = out[std::string(field)];
    for (int i = 0; i < kFieldRoutes; ++i) {
      const auto route = static_cast<FieldRoute>(i);
      uses[std::string(PathOf(route))] = name_of(UseOf(field, route));
    }
  }
  return out;
}

}  // namespace

OrderedJson OpenApiDocument(const Router& router, const ServerSettings& settings) {
  OrderedJson out;
  out["openapi"] = "3.1.0";
  out["info"] = {
      {"title", "moeserve"}, {"version", std::string(kVersion)}, {"description", kAbout}};
  out["servers"] = OrderedJson::array({{{"url", "/"}}});
  for (const Tag& tag : Tags()) {
    out["tags"].push_back({{"name", tag.name}, {"description", tag.meaning}});
  }
  OrderedJson& paths = out["paths"] = OrderedJson::object();
  for (const Router::Route& route : router.routes()) {
    for (const Operation& operation : Operations()) {
      if (operation.method != route.method || operation.pattern != route.pattern) continue;
      paths[std::string(operation.path)][LowerCase(operation.method)] =
          OperationJson(operation, route.access);
    }
  }
  out["x-request-fields"] = RequestFieldsJson();
  OrderedJson& components = out["components"];
  components["schemas"] = OrderedJson::object();
  AddGenerationSchemas(settings, components["schemas"]);
  AddEncodeSchemas(components["schemas"]);
  AddServerSchemas(components["schemas"]);
  components["parameters"] = Parameters();
  components["securitySchemes"][std::string(kScheme)] = {
      {"type", "http"},
      {"scheme", "bearer"},
      {"description", "An API key, if the server has any; the roles are scopes of keys"}};
  return out;
}

void AddOpenApi(Router& router, ServerContext& context) {
  const auto text = std::make_shared<std::string>();
  router.Add("GET", kPath, Access::AnyKey(), Work::kQuick, [text](const Request&) -> Handled {
    Response response;
    response.body = *text;
    return response;
  });
  *text = DumpJson(OpenApiDocument(router, context.settings()));
}

}  // namespace moeserve::server::http
