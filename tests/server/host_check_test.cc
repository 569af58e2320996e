// Requests to host names that are not the server's, and from web pages of other hosts.
#include "server/http/checks/host_check.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error_text.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using http::HostCheck;
using http::HostOf;

std::string WithHost(std::string_view host, std::string_view headers = "",
                     std::string_view path = "/v1/models") {
  std::string out = "GET ";
  out.append(path).append(" HTTP/1.1\r\nHost: ").append(host).append("\r\n");
  return out.append(headers).append("\r\n");
}

class Hosts : public HttpTest {
 protected:
  void StartWith(const std::vector<std::string>& names) {
    auto check = HostCheck::Parse(names);
    ASSERT_TRUE(check.ok()) << check.status();
    hosts_ = *check;
    Start();
  }
};

TEST(HostOf, SplitsNamesAddressesAndPorts) {
  EXPECT_EQ(HostOf("Example.ORG"), "example.org");
  EXPECT_EQ(HostOf("example.org.:80"), "example.org");
  EXPECT_EQ(HostOf("127.0.0.1:8080"), "127.0.0.1");
  EXPECT_EQ(HostOf("[::1]:8080"), "::1");
  EXPECT_EQ(HostOf("[FE80::1]"), "fe80::1");
  EXPECT_EQ(HostOf("localhost:"), "localhost");
  for (const char* bad : {"", ":80", "a b", "a/b", "a@b", "localhost:80:80", "localhost:8o",
                          "localhost:123456", "[::1", "[::1]x", "[::1]:x", "[]", "::1", "a,b"}) {
    EXPECT_EQ(HostOf(bad), std::nullopt) << bad;
  }
  EXPECT_EQ(HostOf(std::string(256, 'a')), std::nullopt);
}

TEST(HostCheck, RefusesWhatIsNoHost) {
  for (const char* bad : {"", "localhost:80", "[::1]:80", "http://localhost", "a b", "*.org"}) {
    const auto check = HostCheck::Parse({"localhost", bad});
    EXPECT_EQ(check.status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_TRUE(HostCheck::Parse({"::1", "[::1]", "Example.org", "10.0.0.1"}).ok());
}

TEST_F(Hosts, OthersAreRefused) {
  StartWith({"localhost", "127.0.0.1", "[::1]", "llm.example"});
  for (const char* good : {"localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:80", "[::1]",
                           "llm.example", "localhost."}) {
    EXPECT_EQ(Exchange(WithHost(good)).status, 200) << good;
  }
  for (const char* bad :
       {"evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1",
        "127.0.0.1.evil.example", "localhost@evil.example", "[::2]", "x.llm.example"}) {
    const RawResponse response = Exchange(WithHost(bad));
    EXPECT_EQ(response.status, 403) << bad;
    const auto error = Error(response);
    EXPECT_EQ(error["code"], "host_not_allowed");
    EXPECT_NE(error["message"].get<std::string>().find("--allowed-hosts"), std::string::npos);
  }
}

TEST_F(Hosts, ARefusedBodyIsNotRead) {
  StartWith({"localhost"});
  RawClient client(port());
  client.Send(
      "POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Type: application/json\r\n"
      "Content-Length: 15\r\n\r\n{\"prompt\": \"a\"}");
  EXPECT_EQ(client.ReadResponse().status, 403);
  EXPECT_TRUE(client.IsClosed());
  EXPECT_TRUE(engine_->submitted().empty());
}

TEST_F(Hosts, PagesOfOtherHostsAreRefused) {
  StartWith({"localhost", "llm.example"});
  for (const char* good :
       {"http://localhost:3000", "https://llm.example", "http://LLM.example:80"}) {
    EXPECT_EQ(Exchange(WithHost("localhost", Concat("Origin: ", good, "\r\n"))).status, 200)
        << good;
  }
  for (const char* bad : {"http://evil.example", "https://localhost.evil.example", "null",
                          "localhost", "chrome-extension://", "http://localhost@evil.example"}) {
    const RawResponse response = Exchange(WithHost("localhost", Concat("Origin: ", bad, "\r\n")));
    EXPECT_EQ(response.status, 403) << bad;
    EXPECT_EQ(Error(response)["code"], "origin_not_allowed");
  }
}

TEST_F(Hosts, HealthAndMetricsTakeAnyHost) {
  StartWith({"localhost"});
  for (const char* path : {"/health", "/health/live", "/health/ready", "/metrics"}) {
    EXPECT_EQ(Exchange(WithHost("10.2.3.4:8080", "", path)).status, 200) << path;
  }
  for (const char* path : {"/", "/version", "/v1/experts/stats", "/nowhere"}) {
    EXPECT_EQ(Exchange(WithHost("10.2.3.4:8080", "", path)).status, 403) << path;
  }
}

// No browser sends HTTP/1.0.
TEST_F(Hosts, ARequestWithoutHostIsAllowed) {
  StartWith({"localhost"});
  EXPECT_EQ(Exchange("GET /v1/models HTTP/1.0\r\n\r\n").status, 200);
}

TEST_F(Hosts, StarAndNoListAllowAll) {
  StartWith({"localhost", "*"});
  EXPECT_EQ(Exchange(WithHost("evil.example", "Origin: null\r\n")).status, 200);
  HostCheck all;
  http::Request request;
  request.host = "evil.example";
  EXPECT_FALSE(all.Check(request).has_value());
}

}  // namespace
}  // namespace moeserve::server::testing
