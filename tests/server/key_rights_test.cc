// Scopes, limits and salts of keys as HTTP clients see them.
#include <set>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "server/rpc/methods.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;

KeySpec RightsSpec(const std::string& name, ScopeSet scopes, KeyLimits limits = {}) {
  KeySpec spec;
  spec.name = name;
  spec.digest = KeyDigest("secret-" + name);
  spec.scopes = scopes;
  if (!limits.min_priority) limits.min_priority = 0;
  spec.limits = std::move(limits);
  return spec;
}

std::string As(const std::string& name) { return "Authorization: Bearer secret-" + name + "\r\n"; }

class KeyRights : public HttpTest {
 protected:
  void StartWith(std::vector<KeySpec> keys, ServerSettings settings = {}) {
    settings.keys = std::move(keys);
    Start({}, std::move(settings));
  }

  // Sends a request that fits the route, as far as authorization needs it.
  RawResponse Call(const http::Router::Route& route, const std::string& headers) {
    std::string path = route.pattern;
    if (path.ends_with('*')) path.replace(path.size() - 1, 1, "main.js");
    return Exchange(route.method == "POST" ? Post(path, "{}", headers) : Get(path, headers));
  }

  int Priority(const std::string& name, int priority) {
    return Complete(
               R"({"prompt": "a", "max_tokens": 1, "priority": )" + std::to_string(priority) + "}",
               As(name))
        .status;
  }
};

TEST_F(KeyRights, EveryRouteAsksForItsScope) {
  const std::vector<Scope> scopes = {Scope::kGenerate, Scope::kStatistics, Scope::kRouting,
                                     Scope::kAdmin};
  std::vector<KeySpec> keys;
  for (const Scope scope : scopes) keys.push_back(RightsSpec(std::string(Name(scope)), {scope}));
  KeySpec expired = RightsSpec("expired", ScopeSet::All());
  expired.expires = absl::Now() - absl::Seconds(1);
  keys.push_back(expired);
  StartWith(std::move(keys));
  std::set<std::string> open;
  for (const http::Router::Route& route : router_->routes()) {
    SCOPED_TRACE(route.method + " " + route.pattern);
    if (!route.access.needs_key()) {
      open.insert(route.pattern);
      EXPECT_EQ(Call(route, "").status, 200);
      continue;
    }
    EXPECT_EQ(Call(route, "").status, 401);
    EXPECT_EQ(Call(route, "Authorization: Bearer wrong\r\n").status, 401);
    EXPECT_EQ(Call(route, As("expired")).status, 401);
    EXPECT_EQ(Call(route, As("admin") + As("admin")).status, 400);
    for (const Scope scope : scopes) {
      const RawResponse response = Call(route, As(std::string(Name(scope))));
      if (route.access.scopes().Has(scope)) {
        EXPECT_NE(response.status, 401);
        EXPECT_NE(response.status, 403);
      } else {
        EXPECT_EQ(response.status, 403) << Name(scope);
        EXPECT_EQ(Error(response)["code"], "permission_denied");
        EXPECT_EQ(Error(response)["type"], "permission_error");
      }
    }
  }
  const std::set<std::string> expected = {
      "/",     "/dashboard/*",        "/health",          "/health/live", "/health/ready",
      "/v2",   "/v2/health/live",     "/v2/health/ready", "/version",     "/metrics",
      "/ping", "/v1/metrics/history", "/api/version"};
  EXPECT_EQ(open, expected) << "a new open route must be added on purpose";
  EXPECT_EQ(Exchange(Get("/nowhere")).status, 401);
  EXPECT_EQ(Exchange(Get("/nowhere", As("routing"))).status, 404);
}

TEST_F(KeyRights, TextOfOthersNeedsAdmin) {
  StartWith({RightsSpec("a", {Scope::kGenerate, Scope::kStatistics, Scope::kRouting})});
  for (const char* path : {"/v1/experts/tokens?layer=1", "/v1/experts/profile"}) {
    EXPECT_EQ(Exchange(Get(path, As("a"))).status, 403) << path;
  }
}

TEST_F(KeyRights, WithoutKeysEverythingIsOpen) {
  StartWith({});
  for (const http::Router::Route& route : router_->routes()) {
    const int status = Call(route, "").status;
    EXPECT_NE(status, 401) << route.pattern;
    EXPECT_NE(status, 403) << route.pattern;
  }
  ASSERT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1, "cache_salt": "mine"})").status, 200);
  EXPECT_EQ(engine_->submitted().back().cache_salt, "mine");
}

TEST_F(KeyRights, RoutingFieldsNeedTheirScope) {
  ServerSettings settings;
  settings.routing_records = true;
  StartWith(
      {RightsSpec("a", {Scope::kGenerate}), RightsSpec("b", {Scope::kGenerate, Scope::kRouting})},
      settings);
  for (const char* field :
       {R"("return_routing": true)", R"("return_routed_experts": true)",
        R"("return_word_experts": ["a"])", R"("routing_control": {"top_k": 1})"}) {
    const std::string body = std::string(R"({"prompt": "a", "max_tokens": 1, )") + field + "}";
    const RawResponse refused = Complete(body, As("a"));
    EXPECT_EQ(refused.status, 403) << field;
    EXPECT_EQ(Error(refused)["code"], "permission_denied") << field;
  }
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1, "return_routing": true})", As("b")).status,
            200);
  const std::string metrics = Exchange(Get("/metrics")).body;
  EXPECT_NE(metrics.find("moeserve_key_refusals_total{key=\"a\",reason=\"scope\"} 4"),
            std::string::npos);
}

TEST_F(KeyRights, SaltsArePerKeyAndGroup) {
  KeySpec c = RightsSpec("c", {Scope::kGenerate});
  KeySpec d = RightsSpec("d", {Scope::kGenerate});
  c.cache_group = d.cache_group = "g";
  StartWith({RightsSpec("a", {Scope::kGenerate}), RightsSpec("b", {Scope::kGenerate}), c, d});
  const auto salt = [&](const char* key, const char* more = "") {
    EXPECT_EQ(
        Complete(std::string(R"({"prompt": "a", "max_tokens": 1)") + more + "}", As(key)).status,
        200);
    return engine_->submitted().back().cache_salt;
  };
  EXPECT_EQ(salt("a"), salt("a"));
  EXPECT_NE(salt("a"), salt("b"));
  EXPECT_NE(salt("a"), salt("c"));
  EXPECT_EQ(salt("c"), salt("d"));
  EXPECT_NE(salt("a"), salt("a", R"(, "cache_salt": "x")"));
  EXPECT_NE(salt("a", R"(, "cache_salt": "x")"), salt("b", R"(, "cache_salt": "x")"));
  EXPECT_EQ(salt("a").find("secret"), std::string::npos);
}

TEST_F(KeyRights, PriorityIsLimitedByKey) {
  KeyLimits low;
  low.min_priority = 5;
  KeyLimits high;
  high.min_priority = -7;
  StartWith({RightsSpec("zero", {Scope::kGenerate}), RightsSpec("low", {Scope::kGenerate}, low),
             RightsSpec("high", {Scope::kGenerate}, high)});
  EXPECT_EQ(Priority("zero", 0), 200);
  EXPECT_EQ(Priority("zero", 1000), 200);
  EXPECT_EQ(Priority("zero", -1), 400);
  EXPECT_EQ(Priority("low", 4), 400);
  EXPECT_EQ(Priority("low", 5), 200);
  EXPECT_EQ(Priority("high", -7), 200);
  EXPECT_EQ(Priority("high", -8), 400);
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1})", As("low")).status, 200);
  EXPECT_EQ(engine_->submitted().back().priority, 5) << "the default is the lowest allowed";
  const RawResponse refused =
      Complete(R"({"prompt": "a", "max_tokens": 1, "priority": -1000})", As("zero"));
  EXPECT_EQ(Error(refused)["param"], "priority");
  const std::string message = Error(refused)["message"];
  EXPECT_NE(message.find("0"), std::string::npos) << message;
  EXPECT_NE(message.find("1000"), std::string::npos) << message;
}

TEST_F(KeyRights, PriorityWithoutKeys) {
  StartWith({});
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1, "priority": -1})").status, 400);
}

TEST_F(KeyRights, PriorityAsTheServerAllows) {
  ServerSettings settings;
  settings.min_priority = -1000;
  StartWith({}, settings);
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1, "priority": -1000})").status, 200);
  EXPECT_EQ(engine_->submitted().back().priority, -1000);
}

TEST_F(KeyRights, ModelsAreLimitedByKey) {
  ServerSettings settings;
  settings.served_names = {"tiny", "other"};
  KeyLimits limits;
  limits.models = {"other"};
  KeyLimits none;
  none.models = {"elsewhere"};
  StartWith({RightsSpec("a", ScopeSet::All(), limits), RightsSpec("none", ScopeSet::All(), none)},
            settings);
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1, "model": "tiny"})", As("a")).status, 404);
  const RawResponse other = Complete(R"({"prompt": "a", "max_tokens": 1})", As("a"));
  ASSERT_EQ(other.status, 200);
  EXPECT_EQ(Json::parse(other.body)["model"], "other");
  const Json list = Json::parse(Exchange(Get("/v1/models", As("a"))).body);
  ASSERT_EQ(list["data"].size(), 1u);
  EXPECT_EQ(list["data"][0]["id"], "other");
  EXPECT_EQ(Exchange(Get("/v1/models/tiny", As("a"))).status, 404);
  EXPECT_EQ(Exchange(Post("/tokenize", R"({"prompt": "a", "model": "tiny"})", As("a"))).status,
            404);
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1})", As("none")).status, 403);
  EXPECT_EQ(Exchange(Post("/tokenize", R"({"prompt": "a"})", As("none"))).status, 403);
}

TEST_F(KeyRights, RequestsPerMinuteWithHeaders) {
  KeyLimits limits;
  limits.requests_per_minute = 2;
  StartWith({RightsSpec("a", ScopeSet::All(), limits), RightsSpec("b", ScopeSet::All())});
  const RawResponse first = Exchange(Get("/v1/models", As("a")));
  EXPECT_EQ(first.status, 200);
  EXPECT_EQ(first.headers.at("x-ratelimit-limit-requests"), "2");
  EXPECT_EQ(first.headers.at("x-ratelimit-remaining-requests"), "1");
  EXPECT_EQ(Exchange(Get("/v1/models", As("a"))).status, 200);
  const RawResponse refused = Exchange(Get("/v1/models", As("a")));
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(Error(refused)["code"], "rate_limit_exceeded");
  EXPECT_EQ(Error(refused)["type"], "rate_limit_error");
  const int retry = std::stoi(refused.headers.at("retry-after"));
  EXPECT_GE(retry, 25);
  EXPECT_LE(retry, 30);
  EXPECT_EQ(refused.headers.at("x-ratelimit-remaining-requests"), "0");
  EXPECT_TRUE(refused.headers.contains("x-ratelimit-reset-requests"));
  EXPECT_FALSE(refused.headers.contains("x-ratelimit-limit-tokens")) << "there is no such limit";
  EXPECT_EQ(Exchange(Get("/v1/models", As("b"))).status, 200);
  EXPECT_EQ(Exchange(Get("/health")).status, 200);
}

TEST_F(KeyRights, TokensPerMinute) {
  KeyLimits limits;
  limits.tokens_per_minute = 100;
  StartWith({RightsSpec("a", ScopeSet::All(), limits)});
  // The prompt has 3 tokens and the reply 6 with EOS, so that 9 of 63 are used.
  const RawResponse first = Complete(R"({"prompt": "abc", "max_tokens": 60})", As("a"));
  ASSERT_EQ(first.status, 200);
  const int used = Json::parse(first.body)["usage"]["total_tokens"];
  EXPECT_EQ(first.headers.at("x-ratelimit-limit-tokens"), "100");
  const int remaining = std::stoi(first.headers.at("x-ratelimit-remaining-tokens"));
  EXPECT_NEAR(remaining, 100 - used, 1);
  const RawResponse refused = Complete(R"({"prompt": "abc", "max_tokens": 95})", As("a"));
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(Error(refused)["code"], "rate_limit_exceeded");
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  const RawResponse impossible = Complete(R"({"prompt": "abc", "max_tokens": 98})", As("a"));
  EXPECT_EQ(impossible.status, 400);
  EXPECT_EQ(Error(impossible)["code"], "token_limit_exceeded");
  const RawResponse stream =
      Complete(R"({"prompt": "abc", "max_tokens": 10, "stream": true})", As("a"));
  EXPECT_EQ(stream.status, 200);
  EXPECT_EQ(stream.headers.at("x-ratelimit-limit-tokens"), "100");
  const std::string metrics = Exchange(Get("/metrics")).body;
  for (const std::string line :
       {"moeserve_key_requests_total{key=\"a\"} 4", "moeserve_key_prompt_tokens_total{key=\"a\"} 6",
        "moeserve_key_refusals_total{key=\"a\",reason=\"tokens\"} 2",
        "moeserve_key_requests_running{key=\"a\"} 0"}) {
    EXPECT_NE(metrics.find(line), std::string::npos) << line << "\n" << metrics;
  }
  EXPECT_EQ(metrics.find("secret"), std::string::npos);
}

TEST_F(KeyRights, ConcurrentRequestsEndWhenTheClientLeaves) {
  Script script;
  script.held = true;
  KeyLimits limits;
  limits.max_concurrent_requests = 1;
  ServerSettings settings;
  settings.keys = {RightsSpec("a", ScopeSet::All(), limits)};
  Start(script, settings);
  {
    RawClient client(port());
    client.Send(Post("/v1/completions", R"({"prompt": "a", "max_tokens": 1})", As("a")));
    ASSERT_TRUE(engine_->WaitForActive(1));
    const RawResponse refused = Complete(R"({"prompt": "a", "max_tokens": 1})", As("a"));
    EXPECT_EQ(refused.status, 429);
    EXPECT_EQ(refused.headers.at("retry-after"), "1");
    EXPECT_EQ(Exchange(Get("/v1/models", As("a"))).status, 200) << "it does not run the model";
  }
  ASSERT_TRUE(engine_->WaitForCancelled(1));
  engine_->Release();
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1})", As("a")).status, 200);
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(Complete(R"({"prompt": "a", "max_tokens": 3})", As("a")).status, 200)
        << "the place is free before the client has its answer";
  }
}

TEST_F(KeyRights, RunningRequestsOutliveTheirKey) {
  Script script;
  script.held = true;
  ServerSettings settings;
  settings.keys = {RightsSpec("a", ScopeSet::All())};
  Start(script, settings);
  RawClient client(port());
  client.Send(Post("/v1/completions", R"({"prompt": "a", "max_tokens": 9})", As("a")));
  ASSERT_TRUE(engine_->WaitForActive(1));
  context_->keys().Replace({RightsSpec("b", ScopeSet::All())});
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1})", As("a")).status, 401);
  engine_->Release();
  EXPECT_EQ(client.ReadResponse(false).status, 200);
  EXPECT_EQ(Complete(R"({"prompt": "a", "max_tokens": 1})", As("b")).status, 200);
}

}  // namespace
}  // namespace moeserve::server::testing
