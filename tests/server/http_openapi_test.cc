// The description of the HTTP interface, against the router and the tables of fields.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/fields/request_fields.h"
#include "server/http/openapi/document.h"
#include "server/http/openapi/operations.h"
#include "server/http/openapi/schema_text.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;

class OpenApi : public HttpTest {
 protected:
  Json Read() {
    const RawResponse response = Exchange(Get("/openapi.json"));
    EXPECT_EQ(response.status, 200);
    EXPECT_EQ(response.headers.at("content-type"), "application/json");
    return Json::parse(response.body);
  }
};

// Calls visit(reference) for every "$ref" in `json`.
template <typename Visit>
void VisitReferences(const Json& json, const Visit& visit) {
  if (json.is_object() && json.contains("$ref")) visit(json["$ref"].get<std::string>());
  if (!json.is_structured()) return;
  for (const Json& item : json) VisitReferences(item, visit);
}

TEST(SchemaText, EveryForm) {
  const std::pair<const char*, const char*> kCases[] = {
      {R"("string")", R"({"type": "string"})"},
      {R"("integer >= 1")", R"({"type": "integer", "minimum": 1})"},
      {R"("count")", R"({"type": "integer", "minimum": 0})"},
      {R"("time")", R"({"type": "string", "format": "date-time"})"},
      {R"("any")", "true"},
      {R"("true")", R"({"const": true})"},
      {R"("'ok'")", R"({"const": "ok"})"},
      {R"("'a' | 'b' | null")", R"({"enum": ["a", "b", null]})"},
      {R"("Usage")", R"({"$ref": "#/components/schemas/Usage"})"},
      {R"("boolean | string | null")", R"({"type": ["boolean", "string", "null"]})"},
      {R"("count | null")", R"({"type": ["integer", "null"], "minimum": 0})"},
      {R"("[number | null]")", R"({"type": "array", "items": {"type": ["number", "null"]}})"},
      {R"("string | null | [object]")",
       R"({"anyOf": [{"type": ["string", "null"]},
                     {"type": "array", "items": {"type": "object"}}]})"},
      {R"({"a": "string", "b?": "null", "c": "any", "...": "none"})",
       R"({"type": "object", "required": ["a", "c"], "additionalProperties": false,
           "properties": {"a": {"type": "string"}, "b": {"type": "null"}}})"},
      {R"({"...": "any"})", R"({"type": "object", "additionalProperties": true})"},
      {R"([{"a?": "string"}])",
       R"({"type": "array",
           "items": {"type": "object", "properties": {"a": {"type": "string"}}}})"},
      {R"(["count", null, "How many", {"maximum": 9}])",
       R"({"type": ["integer", "null"], "minimum": 0, "description": "How many", "maximum": 9})"},
      {R"(["any", {"anyOf": []}])", R"({"anyOf": []})"}};
  for (const auto& [notation, schema] : kCases) {
    const std::string text = std::string(R"({"name": )") + notation + "}";
    EXPECT_EQ(Json(http::ParseSchemas(text)["name"]), Json::parse(schema)) << notation;
  }
}

TEST_F(OpenApi, EveryRouteIsDescribed) {
  Start();
  const Json paths = Read()["paths"];
  for (const http::Router::Route& route : router_->routes()) {
    SCOPED_TRACE(route.method + " " + route.pattern);
    if (route.pattern == "/api/*") continue;  // answers that there is no such address
    int found = 0;
    for (const http::Operation& operation : http::Operations()) {
      if (operation.method != route.method || operation.pattern != route.pattern) continue;
      ++found;
      std::string method = route.method;
      std::transform(method.begin(), method.end(), method.begin(), ::tolower);
      const std::string path(operation.path);
      ASSERT_TRUE(paths.contains(path) && paths[path].contains(method));
      const Json& json = paths[path][method];
      EXPECT_FALSE(json["summary"].get<std::string>().empty());
      EXPECT_EQ(json["security"].empty(), !route.access.needs_key());
      for (const Json& alternative : json["security"]) {
        const auto scope = ParseScope(alternative["key"][0].get<std::string>());
        ASSERT_TRUE(scope);
        EXPECT_TRUE(route.access.scopes().Has(*scope));
      }
      const size_t parameter = path.find('{');
      const bool fixed = parameter == std::string::npos;
      EXPECT_EQ(router_->Endpoint(fixed ? path : path.substr(0, parameter) + "x"), route.pattern)
          << "requests to this path reach the route";
      if (route.pattern.find('*') == std::string::npos) {
        EXPECT_EQ(path, route.pattern);
      }
    }
    EXPECT_GT(found, 0) << "server/http/openapi/operations.cc lacks this route";
  }
}

TEST_F(OpenApi, NothingElseIsDescribed) {
  ServerSettings settings;
  settings.dashboard = false;
  Start({}, settings);
  size_t described = 0;
  const Json paths = Read()["paths"];
  for (const Json& path : paths) described += path.size();
  EXPECT_FALSE(paths.contains("/"));
  EXPECT_EQ(described, http::Operations().size() - 2) << "all but the page's two";
}

TEST_F(OpenApi, NamesAreDeclaredAndUsed) {
  Start();
  const Json document = Read();
  std::set<std::string> ids;
  std::set<std::string> tags;
  for (const Json& tag : document["tags"]) tags.insert(tag["name"]);
  for (const auto& [path, methods] : document["paths"].items()) {
    for (const Json& operation : methods) {
      EXPECT_TRUE(ids.insert(operation["operationId"]).second) << operation["operationId"];
      EXPECT_TRUE(tags.contains(operation["tags"][0]));
      EXPECT_FALSE(operation["responses"]["200"]["content"].empty()) << path;
      // A path names its parameters, and no others are in the path.
      std::set<std::string> in_path;
      for (const Json& parameter : operation.value("parameters", Json::array())) {
        const Json& full =
            document.at(Json::json_pointer(parameter["$ref"].get<std::string>().substr(1)));
        if (full["in"] == "path") in_path.insert("{" + full["name"].get<std::string>() + "}");
      }
      EXPECT_EQ(in_path.size(), static_cast<size_t>(std::count(path.begin(), path.end(), '{')));
      for (const std::string& name : in_path) EXPECT_NE(path.find(name), std::string::npos);
    }
  }
  std::set<std::string> used;
  VisitReferences(document, [&](const std::string& reference) {
    ASSERT_TRUE(reference.starts_with("#/")) << reference;
    EXPECT_TRUE(document.contains(Json::json_pointer(reference.substr(1)))) << reference;
    used.insert(reference.substr(2));
  });
  for (const char* kind : {"schemas", "parameters"}) {
    for (const auto& [name, schema] : document["components"][kind].items()) {
      EXPECT_TRUE(used.contains(std::string("components/") + kind + "/" + name)) << name;
    }
  }
}

TEST_F(OpenApi, EveryFieldOfCompletionsIsDescribed) {
  ServerSettings settings;
  settings.limits.max_n = 7;
  Start({}, settings);
  const Json schemas = Read()["components"]["schemas"];
  const Json& fields = schemas["CompletionRequest"]["properties"];
  // Fields without effect are described if they are common.
  std::set<std::string> expected = {"user",
                                    "metadata",
                                    "store",
                                    "service_tier",
                                    "safety_identifier",
                                    "prompt_cache_key",
                                    "prompt_cache_retention",
                                    "parallel_tool_calls",
                                    "verbosity"};
  std::set<std::string> chat;
  for (const std::string_view name : KnownFields()) {
    if (UseOf(name, FieldRoute::kCompletions) != FieldUse::kObeyed) continue;
    expected.insert(std::string(name));
    if (UseOf(name, FieldRoute::kChat) == FieldUse::kObeyed) chat.insert(std::string(name));
  }
  std::set<std::string> described;
  for (const auto& [name, schema] : fields.items()) described.insert(name);
  EXPECT_EQ(described, expected);
  EXPECT_EQ(fields["n"]["maximum"], 7) << "the limits are the server's";
  EXPECT_EQ(fields["temperature"]["maximum"], 2.0);
  EXPECT_EQ(fields["top_p"]["minimum"], 0.0);
  EXPECT_EQ(fields["top_k"]["minimum"], -1);
  chat.erase("best_of");
  for (const std::string& name : chat) {
    EXPECT_TRUE(schemas["ChatRequest"]["properties"].contains(name)) << name;
  }
}

TEST_F(OpenApi, AnyKeyMayReadIt) {
  ServerSettings settings;
  KeySpec spec;
  spec.name = "a";
  spec.digest = KeyDigest("secret-a");
  spec.scopes = {Scope::kRouting};
  settings.keys = {spec};
  Start({}, settings);
  EXPECT_EQ(Exchange(Get("/openapi.json")).status, 401);
  EXPECT_EQ(Exchange(Get("/openapi.json", "Authorization: Bearer secret-a\r\n")).status, 200);
}

}  // namespace
}  // namespace moeserve::server::testing
