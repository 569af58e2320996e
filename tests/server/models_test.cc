#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/steady_clock.h"
#include "server/base/api_error.h"
#include "server/models/model_manager.h"
#include "server/models/model_registry.h"
#include "tests/server/exposition.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_fixture.h"
#include "tests/support/native_model.h"

namespace moeserve::server {
namespace {

using testing::FakeEngine;
using testing::HttpTest;
using testing::Post;
using testing::RawClient;
using testing::RawResponse;
using testing::ReadExposition;
using testing::Script;

constexpr absl::Duration kPatience = absl::Seconds(5);

Script Replies(const std::string& text) {
  Script script;
  script.reply = text;
  return script;
}

TEST(ModelName, IsChecked) {
  for (const char* name : {"a", "org/model-1.5_x", "A"}) EXPECT_TRUE(CheckModelName(name).ok());
  for (const std::string& name :
       {std::string(), std::string("/a"), std::string(".a"), std::string("a/../b"),
        std::string("a b"), std::string("a\0b", 3), std::string(129, 'a')}) {
    EXPECT_FALSE(CheckModelName(name).ok()) << name;
  }
}

TEST(ModelRegistry, RefusesNamesThatAreTaken) {
  ModelRegistry registry;
  ASSERT_TRUE(registry.Declare({"a", "alias"}, "").ok());
  EXPECT_FALSE(registry.Declare({"b", "alias"}, "").ok());
  EXPECT_FALSE(registry.Declare({"b", "b"}, "").ok());
  EXPECT_TRUE(registry.Declare({"b"}, "").ok());
  EXPECT_TRUE(absl::IsNotFound(registry.Find("c").status()));
  EXPECT_EQ(ApiCode(registry.Find("alias").status()), "loading");
}

// A server whose models are engines with scripted replies. The "checkpoint" PATH replies with PATH;
// "broken" cannot be loaded, and "large" is too large.
class ModelControl : public HttpTest {
 protected:
  void StartWithModels(ServerSettings settings = {}) {
    Start(Replies("first"), std::move(settings));
    ModelManagerOptions options;
    options.load = [this](const std::string& path, int64_t) -> Result<LoadedModel> {
      const std::string name = path.substr(path.rfind('/') + 1);
      if (name == "broken") return absl::InvalidArgumentError("config.json: expected '{'");
      if (name == "large") return absl::ResourceExhaustedError("the weights need 1 GiB");
      LoadedModel loaded;
      loaded.engine = last_ = std::make_shared<FakeEngine>(Replies(name));
      return loaded;
    };
    options.folder = folder_.path().string();
    options.memory = 1 << 20;
    for (const char* name : {"second", "broken", "large"}) {
      moeserve::testing::WriteFile(folder_.path() / name, "");
    }
    manager_.emplace(context_->models(), std::move(options));
    context_->SetModelManager(&*manager_);
  }

  void TearDown() override { server_.reset(); }

  RawResponse Load(const std::string& body) { return Exchange(Post("/v1/models/load", body)); }
  RawResponse Unload(const std::string& body) { return Exchange(Post("/v1/models/unload", body)); }

  // Returns how many tokens the metrics report for the first model.
  double Generated() {
    return ReadExposition(context_->MetricsText())
        .samples.at(R"(moeserve_generation_tokens_total{model="tiny"})");
  }

  std::string ReplyOf(const std::string& model) {
    const RawResponse response =
        Complete(R"({"prompt": "x", "max_tokens": 20, "model": ")" + model + "\"}");
    if (response.status != 200) return std::to_string(response.status);
    return nlohmann::json::parse(response.body)["choices"][0]["text"];
  }

  moeserve::testing::TempFolder folder_;
  std::shared_ptr<FakeEngine> last_;
  std::optional<ModelManager> manager_;
};

TEST_F(ModelControl, AddsModels) {
  StartWithModels();
  EXPECT_EQ(ReplyOf("second"), "404");
  const RawResponse loaded = Load(R"({"model": "second"})");
  EXPECT_EQ(loaded.status, 200) << loaded.body;
  const auto json = nlohmann::json::parse(loaded.body);
  EXPECT_EQ(json["state"], "ready");
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(ReplyOf("second"), "second");
  EXPECT_EQ(ReplyOf("tiny"), "first");
  EXPECT_EQ(ReplyOf(""), "first");
  EXPECT_EQ(Load(R"({"model": "third", "path": "second"})").status, 200);
  EXPECT_EQ(ReplyOf("third"), "second");
  // Each model has its own metrics.
  const auto samples = ReadExposition(context_->MetricsText()).samples;
  EXPECT_EQ(samples.at(R"(moeserve_request_n_count{model="tiny"})"), 2);
  EXPECT_EQ(samples.at(R"(moeserve_request_n_count{model="second"})"), 1);
  EXPECT_EQ(samples.at(R"(moeserve_engine_up{model="third"})"), 1);
}

TEST_F(ModelControl, CountsTheKeptStatistics) {
  StartWithModels();
  EXPECT_EQ(context_->models().memory_bytes(), 0);  // the scripted engine has no weights
  context_->Tick();
  const size_t kept = (*context_->models().Find("tiny"))->expert_history(Stack::kOnly)->bytes();
  EXPECT_GT(kept, 0u);
  EXPECT_EQ(context_->models().memory_bytes(), static_cast<int64_t>(kept));
}

TEST_F(ModelControl, UnloadedModelsAreNotFound) {
  StartWithModels();
  ASSERT_EQ(Load(R"({"model": "second"})").status, 200);
  EXPECT_EQ(Unload(R"({"model": "second"})").status, 200);
  EXPECT_EQ(ReplyOf("second"), "404");
  EXPECT_EQ(Unload(R"({"model": "second"})").status, 400);
  EXPECT_EQ(ReplyOf("tiny"), "first");
  ASSERT_EQ(Load(R"({"model": "second"})").status, 200);
  EXPECT_EQ(ReplyOf("second"), "second");
}

// A request that has begun before the swap is finished by the old version, and the old version is
// destroyed afterwards; requests that begin after the swap are run by the new one.
TEST_F(ModelControl, SwapsDisturbNoRequest) {
  StartWithModels();
  EXPECT_EQ(ReplyOf("tiny"), "first");
  Script held = Replies("first");
  held.held = true;
  engine_->SetScript(held);
  RawClient client(port());
  client.Send(Post("/v1/completions", R"({"prompt": "x", "max_tokens": 20})"));
  ASSERT_TRUE(engine_->WaitForActive(1));
  const std::weak_ptr<ServedModel> old = *context_->models().Find("tiny");
  const RawResponse swapped = Load(R"({"model": "tiny", "path": "second"})");
  ASSERT_EQ(swapped.status, 200) << swapped.body;
  EXPECT_EQ(nlohmann::json::parse(swapped.body)["version"], 2);
  EXPECT_EQ(ReplyOf("tiny"), "second");
  EXPECT_FALSE(old.expired());
  // The replies and their ends: the version that still runs is counted, too.
  EXPECT_EQ(Generated(), 5 + 1 + 6 + 1);
  engine_->Release();
  const RawResponse response = client.ReadResponse();
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(nlohmann::json::parse(response.body)["choices"][0]["text"], "first");
  const absl::Time deadline = SteadyNow() + kPatience;
  while (!old.expired() && SteadyNow() < deadline) std::this_thread::yield();
  EXPECT_TRUE(old.expired());
}

TEST_F(ModelControl, BrokenVersionsLeaveTheOldOneServing) {
  StartWithModels();
  const RawResponse broken = Load(R"({"model": "tiny", "path": "broken"})");
  EXPECT_EQ(broken.status, 400);
  EXPECT_NE(Error(broken)["message"].get<std::string>().find("config.json"), std::string::npos);
  EXPECT_EQ(ReplyOf("tiny"), "first");
  ASSERT_EQ(Load(R"({"model": "tiny", "path": "second"})").status, 200);
  ASSERT_EQ(Load(R"({"model": "tiny", "path": "broken"})").status, 400);
  EXPECT_EQ(ReplyOf("tiny"), "second");
  // Without a path, the checkpoint is loaded that was loaded last, not the broken one.
  EXPECT_EQ(Load(R"({"model": "tiny"})").status, 200);
  EXPECT_EQ(ReplyOf("tiny"), "second");
  const RawResponse large = Load(R"({"model": "tiny", "path": "large"})");
  EXPECT_EQ(large.status, 503);
  EXPECT_EQ(Error(large)["code"], "model_memory");
  EXPECT_EQ(ReplyOf("tiny"), "second");
  EXPECT_EQ(Load(R"({"model": "new", "path": "broken"})").status, 400);
  EXPECT_EQ(ReplyOf("new"), "404");
}

TEST_F(ModelControl, RefusesPathsOutsideOfTheFolder) {
  StartWithModels();
  for (const char* body :
       {R"({"model": "m", "path": "../second"})", R"({"model": "m", "path": "/etc/passwd"})",
        R"({"model": "m", "path": "a/../../second"})", R"({"model": "../second"})",
        R"({"model": "m", "path": "second\u0000"})", R"({"model": "", "path": "second"})",
        R"({"path": "second"})", R"({"model": "m", "file": "second"})", R"([])", R"({)"}) {
    EXPECT_EQ(Load(body).status, 400) << body;
  }
  EXPECT_EQ(Load(R"({"model": "missing"})").status, 404);
}

TEST_F(ModelControl, IsOffByDefault) {
  Start();
  const RawResponse response = Load(R"({"model": "tiny"})");
  EXPECT_EQ(response.status, 400);
  EXPECT_EQ(Error(response)["code"], "model_control_off");
}

TEST_F(ModelControl, NeedsTheAdminScope) {
  ServerSettings settings;
  KeySpec user;
  user.name = "user";
  user.digest = KeyDigest("generate-key");
  user.scopes = {Scope::kGenerate, Scope::kStatistics};
  settings.keys.push_back(user);
  StartWithModels(std::move(settings));
  for (const char* path : {"/v1/models/load", "/v1/models/unload"}) {
    const std::string body = R"({"model": "tiny"})";
    EXPECT_EQ(Exchange(Post(path, body)).status, 401);
    EXPECT_EQ(Exchange(Post(path, body, "Authorization: Bearer generate-key\r\n")).status, 403);
  }
}

TEST_F(ModelControl, ServersWithoutModelsAreUnavailable) {
  StartWithModels();
  EXPECT_EQ(Unload(R"({"model": "tiny"})").status, 200);
  const RawResponse response = Complete(R"({"prompt": "x"})");
  EXPECT_EQ(response.status, 503);
  EXPECT_EQ(Error(response)["code"], "no_model");
}

// Whatever loading throws ends that load only.
TEST(ModelManager, ReportsExceptions) {
  ModelRegistry registry;
  ASSERT_TRUE(registry.Declare({"a"}, "").ok());
  ModelManagerOptions options;
  options.load = [](const std::string& path, int64_t) -> Result<LoadedModel> {
    if (path == "large") throw std::bad_alloc();
    throw std::runtime_error("broken");
  };
  ModelManager manager(registry, std::move(options));
  EXPECT_EQ(ApiCode(manager.LoadNow("a", "large").status()), "model_memory");
  EXPECT_TRUE(absl::IsInternal(manager.LoadNow("a", "broken").status()));
  EXPECT_FALSE(registry.List().front().loading);
}

TEST(ModelManager, ReloadsNamesOfTheCommandLine) {
  ModelRegistry registry;
  ASSERT_TRUE(registry.Declare({"My model"}, "").ok());
  std::string loaded;
  ModelManagerOptions options;
  options.load = [&](const std::string& path, int64_t) -> Result<LoadedModel> {
    loaded = path;
    LoadedModel model;
    model.engine = std::make_shared<FakeEngine>();
    return model;
  };
  ModelManager manager(registry, std::move(options));
  ASSERT_TRUE(manager.LoadNow("My model", "here").ok());
  loaded.clear();
  std::promise<absl::Status> done;
  manager.Load("My model", "",
               [&](Result<ModelStatus> result) { done.set_value(result.status()); });
  const absl::Status status = done.get_future().get();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(loaded, "here");
}

// The counters of a name never fall, and count the work of all its versions.
TEST_F(ModelControl, CountersContinueAfterASwap) {
  StartWithModels();
  EXPECT_EQ(ReplyOf("tiny"), "first");
  ASSERT_EQ(Load(R"({"model": "tiny", "path": "second"})").status, 200);
  EXPECT_EQ(ReplyOf("tiny"), "second");
  const auto samples = ReadExposition(context_->MetricsText()).samples;
  EXPECT_EQ(samples.at(R"(moeserve_request_n_count{model="tiny"})"), 2);
  EXPECT_EQ(samples.at(R"(moeserve_model_version{model="tiny"})"), 2);
  // "first", "second" and two ends. The old version's engine may or may not be destroyed by now.
  EXPECT_EQ(Generated(), 5 + 6 + 2);
  const absl::Time deadline = SteadyNow() + kPatience;
  while (context_->models().InMemory().size() > 1 && SteadyNow() < deadline) {
    EXPECT_EQ(Generated(), 5 + 6 + 2);
  }
  EXPECT_EQ(context_->models().InMemory().size(), 1u);
  EXPECT_EQ(Generated(), 5 + 6 + 2);
}

}  // namespace
}  // namespace moeserve::server
