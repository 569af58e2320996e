// Requests of web pages of other origins.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/http/checks/cors.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using http::Cors;
using http::HostCheck;

std::string Value(const RawResponse& response, const std::string& name) {
  const auto it = response.headers.find(name);
  return it == response.headers.end() ? std::string() : it->second;
}

std::string Preflight(const std::string& path, const std::string& headers) {
  return "OPTIONS " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n";
}

std::string From(const std::string& origin) { return "Origin: " + origin + "\r\n"; }

constexpr char kAsk[] =
    "Access-Control-Request-Method: POST\r\n"
    "Access-Control-Request-Headers: authorization,content-type, x-stainless-os\r\n";

class CorsTest : public HttpTest {
 protected:
  void StartWith(const std::vector<std::string>& origins, ServerSettings settings = {},
                 const std::vector<std::string>& hosts = {"*"}) {
    auto cors = Cors::Parse(origins);
    ASSERT_TRUE(cors.ok()) << cors.status();
    cors_ = *cors;
    auto check = HostCheck::Parse(hosts);
    ASSERT_TRUE(check.ok()) << check.status();
    hosts_ = *check;
    Start({}, std::move(settings));
  }

  std::string Allowed(const std::string& origin) {
    return Value(Exchange(Get("/v1/models", From(origin))), "access-control-allow-origin");
  }
};

TEST(Cors, OriginsAreAsBrowsersWriteThem) {
  const auto cors = Cors::Parse({"HTTPS://Example.org:443", "http://a:80", "http://a:8080",
                                 "http://[::1]:3000", "vscode-webview://abc", "*"});
  ASSERT_TRUE(cors.ok()) << cors.status();
  EXPECT_EQ(cors->origins(),
            (std::vector<std::string>{"https://example.org", "http://a", "http://a:8080",
                                      "http://[::1]:3000", "vscode-webview://abc", "*"}));
  for (const char* bad :
       {"", "null", "example.org", "https://", "https://a/", "https://a/b", "https://*.org",
        "https://u@a", "https://a:", "https://a:x", "1a://b", "https://a b", "https://a\r\nX: y"}) {
    EXPECT_FALSE(Cors::Parse({bad}).ok()) << bad;
  }
}

TEST_F(CorsTest, OffWithoutOrigins) {
  StartWith({});
  const RawResponse response = Exchange(Get("/v1/models", From("https://a.example")));
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(Value(response, "access-control-allow-origin"), "");
  EXPECT_EQ(Value(response, "vary").find("Origin"), std::string::npos);
  const RawResponse options =
      Exchange(Preflight("/v1/completions", From("https://a.example") + kAsk));
  EXPECT_EQ(options.status, 204);
  EXPECT_EQ(Value(options, "access-control-allow-methods"), "");
}

TEST_F(CorsTest, OnlyListedOrigins) {
  StartWith({"https://a.example", "http://localhost:3000"});
  EXPECT_EQ(Allowed("https://a.example"), "https://a.example");
  EXPECT_EQ(Allowed("http://localhost:3000"), "http://localhost:3000");
  for (const char* other : {"http://a.example", "https://a.example:444", "https://b.a.example",
                            "https://a.example.org", "null", "https://A.example", "*"}) {
    EXPECT_EQ(Allowed(other), "") << other;
  }
  const RawResponse plain = Exchange(Get("/v1/models"));
  EXPECT_EQ(Value(plain, "access-control-allow-origin"), "");
  EXPECT_NE(Value(plain, "vary").find("Origin"), std::string::npos) << "caches must know";
}

TEST_F(CorsTest, PreflightsNeedNoKey) {
  ServerSettings settings;
  KeySpec spec;
  spec.name = "team";
  spec.digest = KeyDigest("secret-team");
  settings.keys = {spec};
  StartWith({"https://a.example"}, settings);
  for (const http::Router::Route& route : router_->routes()) {
    std::string path = route.pattern;
    if (path.ends_with('*')) path.replace(path.size() - 1, 1, "x");
    const RawResponse response = Exchange(Preflight(path, From("https://a.example") + kAsk));
    SCOPED_TRACE(path);
    EXPECT_EQ(response.status, 204);
    EXPECT_EQ(response.body, "");
    EXPECT_EQ(Value(response, "access-control-allow-origin"), "https://a.example");
    EXPECT_NE(Value(response, "access-control-allow-methods").find(route.method),
              std::string::npos);
    EXPECT_EQ(Value(response, "access-control-allow-headers"),
              "authorization,content-type, x-stainless-os");
    EXPECT_EQ(Value(response, "access-control-max-age"), "600");
    EXPECT_FALSE(response.headers.contains("access-control-allow-credentials"));
  }
  const RawResponse refused =
      Exchange(Post("/v1/completions", R"({"prompt": "a"})", From("https://a.example")));
  EXPECT_EQ(refused.status, 401) << "the request itself needs one";
  EXPECT_EQ(Value(refused, "access-control-allow-origin"), "https://a.example")
      << "so that the page can read the error";
  EXPECT_EQ(Value(Exchange(Preflight("/v1/completions", From("https://b.example") + kAsk)),
                  "access-control-allow-methods"),
            "");
  EXPECT_EQ(Value(Exchange(Preflight("/nowhere", From("https://a.example") + kAsk)),
                  "access-control-allow-methods"),
            "");
}

TEST_F(CorsTest, PreflightsRepeatOnlyPlainHeaderNames) {
  StartWith({"https://a.example"});
  const auto allowed = [&](const std::string& names) {
    return Value(Exchange(Preflight("/v1/completions", From("https://a.example") +
                                                           "Access-Control-Request-Method: POST\r\n"
                                                           "Access-Control-Request-Headers: " +
                                                           names + "\r\n")),
                 "access-control-allow-headers");
  };
  EXPECT_EQ(allowed("x-a, X-B_c"), "x-a, X-B_c");
  std::string many = "h";
  for (int i = 1; i < 64; ++i) many += ",h";
  EXPECT_EQ(allowed(many), many);
  EXPECT_EQ(allowed(many + ",h"), "");
  EXPECT_EQ(allowed("a\"b"), "");
  EXPECT_EQ(allowed("a;b"), "");
  EXPECT_EQ(allowed(","), "");
  EXPECT_EQ(allowed(std::string(2049, 'a')), "");
}

TEST_F(CorsTest, PreflightsHaveNoBody) {
  StartWith({"https://a.example"});
  RawClient client(port());
  client.Send("OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n" +
              From("https://a.example") + kAsk + "\r\n");
  EXPECT_EQ(client.ReadResponse().status, 204);
  EXPECT_TRUE(client.IsClosed()) << "the body is not read";
}

TEST_F(CorsTest, PagesMayReadIdsAndRates) {
  StartWith({"https://a.example"});
  const std::string exposed = Value(Exchange(Get("/v1/models", From("https://a.example"))),
                                    "access-control-expose-headers");
  for (const char* name : {"X-Request-Id", "traceparent", "Retry-After",
                           "x-ratelimit-remaining-requests", "x-ratelimit-reset-tokens"}) {
    EXPECT_NE(exposed.find(name), std::string::npos) << name;
  }
  const RawResponse stream =
      Complete(R"({"prompt": "a", "stream": true})", From("https://a.example"));
  EXPECT_EQ(Value(stream, "access-control-allow-origin"), "https://a.example");
  EXPECT_EQ(Value(stream, "access-control-expose-headers"), exposed);
}

TEST_F(CorsTest, EveryOrigin) {
  StartWith({"*"});
  EXPECT_EQ(Allowed("https://a.example"), "*");
  EXPECT_EQ(Allowed("null"), "*");
  const RawResponse response = Exchange(Get("/v1/models", From("https://a.example")));
  EXPECT_FALSE(response.headers.contains("access-control-allow-credentials"));
}

TEST_F(CorsTest, TheHostCheckStays) {
  StartWith({"https://a.example", "*"}, {}, {"localhost"});
  const auto status = [&](const std::string& host, const std::string& origin) {
    return Exchange("GET /v1/models HTTP/1.1\r\nHost: " + host + "\r\n" + From(origin) + "\r\n")
        .status;
  };
  EXPECT_EQ(status("localhost", "https://a.example"), 200) << "the operator has listed it";
  EXPECT_EQ(status("localhost", "https://b.example"), 403) << "* lists nobody";
  EXPECT_EQ(status("a.example", "https://a.example"), 403) << "DNS rebinding";
  EXPECT_EQ(status("localhost", "http://localhost:3000"), 200);
  const RawResponse refused = Exchange("OPTIONS /v1/models HTTP/1.1\r\nHost: a.example\r\n" +
                                       From("https://a.example") + kAsk + "\r\n");
  EXPECT_EQ(refused.status, 403);
}

}  // namespace
}  // namespace moeserve::server::testing
