// A complete HTTP server with a scripted engine.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "server/context.h"
#include "server/http/routes/api.h"
#include "server/http/server.h"
#include "server/logging/logging.h"
#include "tests/server/fake_engine.h"
#include "tests/server/raw_client.h"

namespace moeserve::server::testing {

// Returns the JSON of each server-sent event; "[DONE]" as a string.
inline std::vector<nlohmann::json> Events(const std::string& body) {
  using Json = nlohmann::json;
  std::vector<Json> events;
  size_t at = 0;
  while (at < body.size()) {
    const size_t end = body.find("\n\n", at);
    EXPECT_NE(end, std::string::npos) << "an event without its end";
    if (end == std::string::npos) break;
    const std::string event = body.substr(at, end - at);
    at = end + 2;
    if (event.starts_with(":")) continue;
    EXPECT_TRUE(event.starts_with("data: ")) << event;
    EXPECT_EQ(event.find('\n'), std::string::npos);
    const std::string data = event.substr(6);
    events.push_back(data == "[DONE]" ? Json("[DONE]") : Json::parse(data));
  }
  return events;
}

class HttpTest : public ::testing::Test {
 protected:
  void Start(const Script& script = {}, ServerSettings settings = {}, bool serving = true) {
    SetUpLogging(LogFormat::kText, LogLevel::kOff);
    if (settings.served_names.empty()) settings.served_names = {"tiny"};
    const HttpLimits limits = settings.http;
    engine_ = std::make_shared<FakeEngine>(script);
    context_ = std::make_unique<ServerContext>(std::move(settings));
    router_ = http::MakeRouter(*context_);
    http::HttpServerOptions options;
    options.port = 0;
    options.limits = limits;
    options.hosts = hosts_;
    options.cors = cors_;
    auto server =
        http::HttpServer::Start(options, *router_, context_->metrics(), context_->memory());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    TokenizerConfig config;
    config.chat_template = chat_template_;
    config.bos_token = "<bos>";
    config.eos_token = "<eos>";
    if (serving) context_->SetServing(engine_, {}, std::make_shared<ChatFormat>(config), config);
  }

  int port() const { return server_->port(); }

  RawResponse Exchange(const std::string& request, bool head = false) {
    RawClient client(port());
    client.Send(request);
    return client.ReadResponse(head);
  }

  RawResponse Complete(const std::string& body, const std::string& headers = "") {
    return Exchange(Post("/v1/completions", body, headers));
  }

  RawResponse Chat(const std::string& body, const std::string& headers = "") {
    return Exchange(Post("/v1/chat/completions", body, headers));
  }

  static nlohmann::json Error(const RawResponse& response) {
    const auto body = nlohmann::json::parse(response.body, nullptr, false);
    EXPECT_TRUE(body.is_object()) << response.body;
    const nlohmann::json error = body.value("error", nlohmann::json::object());
    for (const char* key : {"message", "type", "param", "code"}) EXPECT_TRUE(error.contains(key));
    return error;
  }

  std::optional<std::string> chat_template_;  // passed to the server by Start()
  http::HostCheck hosts_;                     // passed to the server by Start()
  http::Cors cors_;                           // passed to the server by Start()
  std::shared_ptr<FakeEngine> engine_;
  std::unique_ptr<ServerContext> context_;
  std::unique_ptr<http::Router> router_;
  std::unique_ptr<http::HttpServer> server_;
};

}  // namespace moeserve::server::testing
