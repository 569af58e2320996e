// The dashboard at "/" and its files: contents, access without a key, and response headers.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "server/http/routes/web_assets.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Dashboard = HttpTest;

std::string Path(std::string_view name) {
  return name == "index.html" ? "/" : "/dashboard/" + std::string(name);
}

TEST_F(Dashboard, ServesEveryFileWithItsTypeToEverybody) {
  ServerSettings settings;
  settings.keys = PlainKeys({"secret"});
  Start({}, settings);
  size_t total = 0;
  std::set<std::string> etags;
  for (const http::EmbeddedFile& file : http::EmbeddedFiles()) {
    const RawResponse response = Exchange(Get(Path(file.name)));
    ASSERT_EQ(response.status, 200) << file.name;
    EXPECT_EQ(response.body, file.bytes);
    const std::string_view type = response.headers.at("content-type");
    const std::string_view extension = file.name.substr(file.name.rfind('.'));
    EXPECT_EQ(type, extension == ".html"  ? "text/html; charset=utf-8"
                    : extension == ".css" ? "text/css; charset=utf-8"
                    : extension == ".js"  ? "text/javascript; charset=utf-8"
                                          : "image/svg+xml");
    EXPECT_EQ(response.headers.at("cache-control"), "no-cache");
    EXPECT_EQ(response.headers.at("x-content-type-options"), "nosniff");
    const std::string& policy = response.headers.at("content-security-policy");
    EXPECT_TRUE(policy.starts_with("default-src 'none'; ")) << policy;
    EXPECT_EQ(policy.find("unsafe"), std::string::npos) << policy;
    EXPECT_EQ(policy.find('*'), std::string::npos) << policy;
    etags.insert(response.headers.at("etag"));
    total += file.bytes.size();
  }
  EXPECT_EQ(etags.size(), http::EmbeddedFiles().size());
  EXPECT_LT(total, 210'000u);
}

TEST_F(Dashboard, FilesNeedNothingInlineAndNothingFromElsewhere) {
  for (const http::EmbeddedFile& file : http::EmbeddedFiles()) {
    for (const char* never : {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                              "eval(", " onclick=\"", " style=\"", "https://"}) {
      EXPECT_EQ(file.bytes.find(never), std::string_view::npos) << file.name << ": " << never;
    }
  }
}

TEST_F(Dashboard, RevalidatesByEtag) {
  Start();
  const std::string etag = Exchange(Get("/dashboard/main.js")).headers.at("etag");
  ASSERT_TRUE(etag.size() > 2 && etag.front() == '"' && etag.back() == '"') << etag;
  RawClient client(port());
  for (const std::string& value :
       {etag, "W/" + etag, "\"other\", " + etag, std::string("*"), "\"a\"\t,\t" + etag + " "}) {
    client.Send(Get("/dashboard/main.js", "If-None-Match: " + value + "\r\n"));
    const RawResponse response = client.ReadResponse(true);
    EXPECT_EQ(response.status, 304) << value;
    EXPECT_EQ(response.headers.at("etag"), etag);
    EXPECT_FALSE(response.headers.contains("content-type"));
    EXPECT_FALSE(response.headers.contains("content-length"));
  }
  for (const std::string& value : {std::string("\"\""), std::string(","), etag.substr(1),
                                   etag + etag, std::string("\"other\"")}) {
    client.Send(Get("/dashboard/main.js", "If-None-Match: " + value + "\r\n"));
    EXPECT_EQ(client.ReadResponse().status, 200) << value;
  }
  client.Send("HEAD /dashboard/main.js HTTP/1.1\r\nHost: a\r\n\r\n" + Get("/version"));
  const RawResponse head = client.ReadResponse(true);
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.headers.at("etag"), etag);
  EXPECT_EQ(client.ReadResponse().status, 200);
}

TEST_F(Dashboard, KnowsNoOtherNames) {
  Start();
  for (const char* path : {"/index.html", "/dashboard", "/dashboard/", "/dashboard/index.html",
                           "/dashboard/../main.js", "/dashboard/main.js/", "/dashboard/embed.cmake",
                           "/dashboard/%6dain.js", "/dashboard//main.js"}) {
    EXPECT_EQ(Exchange(Get(path)).status, 404) << path;
  }
  EXPECT_EQ(Exchange(Post("/", "{}")).status, 405);
}

TEST_F(Dashboard, CanBeLeftOut) {
  ServerSettings settings;
  settings.dashboard = false;
  Start({}, settings);
  EXPECT_EQ(Exchange(Get("/")).status, 404);
  EXPECT_EQ(Exchange(Get("/dashboard/main.js")).status, 404);
}

}  // namespace
}  // namespace moeserve::server::testing
