// /ping, /server_info and /tokenizer_info, and the bodies of requests that need no key.
#include <string>

#include "server/base/version.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;

class ServerRoutes : public HttpTest {
 protected:
  Json Read(const std::string& path, const std::string& headers = "") {
    const RawResponse response = Exchange(Get(path, headers));
    EXPECT_EQ(response.status, 200) << response.body;
    return Json::parse(response.body);
  }
};

TEST_F(ServerRoutes, PingTellsWhetherTheServerIsReady) {
  Start({}, {}, /*serving=*/false);
  const std::string bare = "POST /ping HTTP/1.1\r\nHost: a\r\n\r\n";
  EXPECT_EQ(Exchange(Get("/ping")).status, 503);
  EXPECT_EQ(Exchange(bare).status, 503);
  context_->SetServing(engine_, {});
  EXPECT_EQ(Exchange(Get("/ping")).status, 200);
  EXPECT_EQ(Exchange(bare).status, 200) << "a POST without a body and its type";
  EXPECT_EQ(Exchange("PUT /ping HTTP/1.1\r\nHost: a\r\n\r\n").headers.at("allow"),
            "GET, HEAD, POST");
  engine_->SetHealthy(false);
  EXPECT_EQ(Exchange(Get("/ping")).status, 503);
  engine_->SetHealthy(true);
  context_->SetDraining();
  EXPECT_EQ(Exchange(bare).status, 503);
}

TEST_F(ServerRoutes, BodiesWithoutAKeyAreSmall) {
  Start();
  const std::string small(4096, ' ');
  const std::string large(4097, ' ');
  const auto post = [&](const std::string& path, const std::string& body) {
    return Exchange(Post(path, body)).status;
  };
  EXPECT_EQ(post("/ping", small), 200);
  const RawResponse refused = Exchange(Post("/ping", large));
  EXPECT_EQ(refused.status, 413);
  EXPECT_EQ(Error(refused)["code"], "body_too_large");
  EXPECT_EQ(refused.headers.at("connection"), "close");
  EXPECT_EQ(
      Exchange("POST /ping HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1001\r\n" +
               large + "\r\n0\r\n\r\n")
          .status,
      413);
  EXPECT_EQ(
      Exchange("GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 4097\r\n\r\n" + large).status,
      413);
  EXPECT_EQ(post("/tokenize", R"({"prompt": "a"})" + large), 200) << "this route may need a key";
}

TEST_F(ServerRoutes, ServerInfoTellsWhatShapesAnswers) {
  ServerSettings settings;
  settings.served_names = {"tiny", "alias"};
  settings.commit = "0123abc";
  settings.strict_fields = true;
  settings.limits.max_logprobs = 7;
  settings.cors_origins = {"https://a.example"};
  Start({}, settings);
  const Json info = Read("/server_info");
  EXPECT_EQ(info["version"], std::string(kVersion));
  EXPECT_EQ(info["commit"], "0123abc");
  EXPECT_EQ(info["device"], "cpu");
  EXPECT_EQ(info["state"], "serving");
  EXPECT_GE(info["uptime_seconds"], 0.0);
  ASSERT_EQ(info["models"].size(), 1u);
  const Json& model = info["models"][0];
  EXPECT_EQ(model["id"], "tiny");
  EXPECT_EQ(model["aliases"], Json({"alias"}));
  EXPECT_EQ(model["state"], "ready");
  EXPECT_EQ(model["max_model_len"], 256);
  EXPECT_EQ(model["vocab_size"], engine_->spec().vocab_size);
  EXPECT_EQ(info["limits"]["max_logprobs"], 7);
  EXPECT_EQ(info["limits"]["max_body_bytes"], 16 << 20);
  EXPECT_EQ(info["settings"]["strict_fields"], true);
  EXPECT_EQ(info["settings"]["api_keys"], false);
  EXPECT_EQ(info["settings"]["cors_origins"], Json({"https://a.example"}));
}

TEST_F(ServerRoutes, ServerInfoShowsNoOtherModelsAndNoKeys) {
  ServerSettings settings;
  KeySpec spec;
  spec.name = "team";
  spec.digest = KeyDigest("secret-team");
  spec.limits.models = {"elsewhere"};
  settings.keys = {spec};
  Start({}, settings);
  EXPECT_EQ(Exchange(Get("/server_info")).status, 401);
  const Json info = Read("/server_info", "Authorization: Bearer secret-team\r\n");
  EXPECT_EQ(info["models"], Json::array());
  EXPECT_EQ(info["settings"]["api_keys"], true);
  EXPECT_EQ(info.dump().find("team"), std::string::npos);
}

TEST_F(ServerRoutes, TokenizerInfo) {
  chat_template_ = "{{ messages[0].content }}";
  Start();
  const Json info = Read("/tokenizer_info");
  EXPECT_EQ(info["model"], "tiny");
  EXPECT_EQ(info["tokenizer_class"], "PreTrainedTokenizerFast");
  EXPECT_EQ(info["vocab_size"], kVocabSize);
  EXPECT_EQ(info["model_max_length"], 256);
  EXPECT_EQ(info["bos_token"], "<bos>");
  EXPECT_EQ(info["eos_token"], "<eos>");
  EXPECT_EQ(info["pad_token"], nullptr);
  EXPECT_EQ(info["chat_template"], *chat_template_);
  ASSERT_EQ(info["special_tokens"].size(), static_cast<size_t>(kVocabSize - 256));
  EXPECT_EQ(info["special_tokens"][0], (Json{{"id", kEos}, {"token", "<eos>"}}));
  EXPECT_EQ(Read("/tokenizer_info?model=tiny"), info);
  EXPECT_EQ(Exchange(Get("/tokenizer_info?model=other")).status, 404);
}

TEST_F(ServerRoutes, TheChatTemplateCanBeHidden) {
  chat_template_ = "{{ messages[0].content }}";
  ServerSettings settings;
  settings.show_chat_template = false;
  Start({}, settings);
  EXPECT_EQ(Read("/tokenizer_info")["chat_template"], nullptr);
}

TEST_F(ServerRoutes, TokenizerInfoWithoutAConfiguration) {
  Start({}, {}, /*serving=*/false);
  EXPECT_EQ(Exchange(Get("/tokenizer_info")).status, 503);
  context_->SetServing(engine_, {});
  const Json info = Read("/tokenizer_info");
  const auto& ids = engine_->spec().eos_token_ids;
  const Json eos = ids.empty() ? Json(nullptr) : Json("<eos>");
  EXPECT_EQ(info["eos_token"], eos) << "the model's configuration names it by its id";
  EXPECT_EQ(info["chat_template"], nullptr);
}

}  // namespace
}  // namespace moeserve::server::testing
