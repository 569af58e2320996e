// Tests the gRPC server through a real channel.
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "moeserve/v1/moeserve.grpc.pb.h"
#include "server/context.h"
#include "server/generation/engine_watchdog.h"
#include "server/logging/logging.h"
#include "server/rpc/methods.h"
#include "server/rpc/server.h"
#include "tests/server/fake_engine.h"
#include "tests/server/generic_call.h"

namespace moeserve::server::testing {
namespace {

class Grpc : public ::testing::Test {
 protected:
  void Start(const Script& script = {}, ServerSettings settings = {}, bool serving = true) {
    SetUpLogging(LogFormat::kText, LogLevel::kOff);
    settings.served_names = {"tiny"};
    engine_ = std::make_shared<FakeEngine>(script);
    context_ = std::make_unique<ServerContext>(std::move(settings));
    rpc::GrpcServerOptions options;
    options.port = 0;
    options.reflection = reflection_;
    auto server = rpc::GrpcServer::Start(options, *context_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
    stub_ = v1::Inference::NewStub(channel_);
    if (serving) {
      context_->SetServing(engine_, {});
      server_->SetServing(true);
    }
  }

  struct Answer {
    grpc::Status status;
    std::vector<v1::GenerateResponse> messages;
    std::string error_code;
    std::string request_id;

    std::string Text(uint32_t index = 0) const {
      std::string text;
      for (const auto& message : messages) {
        if (message.index() == index) text += message.text();
      }
      return text;
    }
  };

  static std::string Trailer(const grpc::ClientContext& context, const char* key) {
    const auto& trailers = context.GetServerTrailingMetadata();
    const auto it = trailers.find(key);
    return it == trailers.end() ? "" : std::string(it->second.data(), it->second.size());
  }

  Answer Generate(const v1::GenerateRequest& request, grpc::ClientContext* given = nullptr) {
    grpc::ClientContext own;
    grpc::ClientContext& context = given != nullptr ? *given : own;
    Answer answer;
    const auto reader = stub_->Generate(&context, request);
    for (v1::GenerateResponse message; reader->Read(&message);) answer.messages.push_back(message);
    answer.status = reader->Finish();
    answer.error_code = Trailer(context, "x-error-code");
    answer.request_id = Trailer(context, "x-request-id");
    return answer;
  }

  static v1::GenerateRequest Text(const std::string& text) {
    v1::GenerateRequest request;
    request.set_text(text);
    return request;
  }

  // Returns the status of grpc.health.v1's Check; -1 for an error, whose code is stored in `code`.
  int Health(const std::string& service, grpc::StatusCode* code = nullptr) {
    std::string request;
    if (!service.empty()) {
      request = std::string("\x0a") + static_cast<char>(service.size()) + service;
    }
    std::string response;
    const grpc::Status status =
        GenericUnaryCall(channel_, "/grpc.health.v1.Health/Check", request, &response);
    if (code != nullptr) *code = status.error_code();
    if (!status.ok()) return -1;
    return response.size() == 2 && response[0] == 8 ? response[1] : 0;
  }

  bool reflection_ = true;  // used by Start()
  std::shared_ptr<FakeEngine> engine_;
  std::unique_ptr<ServerContext> context_;
  std::unique_ptr<rpc::GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

TEST_F(Grpc, ConstraintIsCompiledBeforeAdmission) {
  Start();
  v1::GenerateRequest request = Text("abc");
  request.mutable_structured_output()->set_regex("h[a-z]+");
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  ASSERT_EQ(engine_->submitted().size(), 1u);
  EXPECT_NE(engine_->submitted()[0].sampling.constraint, nullptr);

  request.mutable_structured_output()->set_json_schema(R"({"type": "nonsense"})");
  const Answer refused = Generate(request);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(refused.error_code, "invalid_schema");
  EXPECT_NE(refused.status.error_message().find("structured_output.json_schema"),
            std::string::npos);
  request.mutable_sampling()->set_ignore_eos(true);
  EXPECT_EQ(Generate(request).error_code, "invalid_value");
  request.mutable_sampling()->set_ignore_eos(false);
  request.mutable_structured_output()->mutable_choice();
  EXPECT_EQ(Generate(request).error_code, "invalid_schema");
  EXPECT_EQ(engine_->submitted().size(), 1u);
}

TEST_F(Grpc, CancelWhileAConstraintIsCompiled) {
  Start();
  std::promise<void> go;
  const std::shared_future<void> ready = go.get_future().share();
  // Both threads of the work pool are busy, so the request waits in its queue.
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(context_->work_pool().Post([ready] { ready.wait(); }));
  }
  v1::GenerateRequest request = Text("abc");
  request.mutable_structured_output()->set_json_object(true);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  context.TryCancel();
  v1::GenerateResponse message;
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  go.set_value();
  EXPECT_TRUE(Generate(request).status.ok());
}

TEST_F(Grpc, AnExpiredDeadlineIsCountedAsOne) {
  Script script;
  script.held = true;
  Start(script);
  const auto soon = [] {
    return std::chrono::system_clock::now() + std::chrono::milliseconds(200);
  };
  const auto counted = [this](const char* method, const char* code) {
    const std::string line =
        absl::StrCat("moeserve_grpc_requests_total{method=\"", method, "\",code=\"", code, "\"} ");
    const std::string text = context_->MetricsText();
    const size_t at = text.find(line);
    return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + line.size());
  };
  // On a busy machine, a call may arrive late: the client then cancels it before the server sees
  // the deadline (it counts as cancelled), or the call never reaches the server. So several calls
  // may be needed.
  for (int i = 0; i < 50 && counted("Generate", "DEADLINE_EXCEEDED") == 0; ++i) {
    grpc::ClientContext context;
    context.set_deadline(soon());
    EXPECT_EQ(Generate(Text("abc"), &context).status.error_code(),
              grpc::StatusCode::DEADLINE_EXCEEDED);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_GT(counted("Generate", "DEADLINE_EXCEEDED"), 0);
  v1::ScoreRequest request;
  request.set_text("abc");
  for (int i = 0; i < 50 && counted("Score", "DEADLINE_EXCEEDED") == 0; ++i) {
    grpc::ClientContext context;
    context.set_deadline(soon());
    v1::ScoreResponse response;
    EXPECT_EQ(stub_->Score(&context, request, &response).error_code(),
              grpc::StatusCode::DEADLINE_EXCEEDED);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_GT(counted("Score", "DEADLINE_EXCEEDED"), 0);
  // A call that its client cancels early counts as cancelled, whatever its deadline.
  const int cancelled = counted("Generate", "CANCELLED");
  const size_t submitted = engine_->submitted().size();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(5));
  const auto reader = stub_->Generate(&context, Text("abc"));
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto wait = [&limit](auto&& until) {
    while (!until() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return until();
  };
  EXPECT_TRUE(wait([&] { return engine_->submitted().size() > submitted; }));
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(wait([&] { return counted("Generate", "CANCELLED") > cancelled; }));
}

TEST_F(Grpc, GeneratesAStream) {
  Start();
  v1::GenerateRequest request = Text("abc");
  request.set_logprobs(2);
  request.set_prompt_logprobs(1);
  grpc::ClientContext context;
  context.AddMetadata("x-request-id", "mine-1");
  const Answer answer = Generate(request, &context);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.request_id, "mine-1");
  EXPECT_EQ(answer.Text(), "hello");
  const auto& first = answer.messages.front();
  EXPECT_EQ(first.model(), "tiny");
  ASSERT_EQ(first.prompt_logprobs_size(), 3);
  EXPECT_FALSE(first.prompt_logprobs(0).has_logprob());
  EXPECT_EQ(first.prompt_logprobs(0).token(), "a");
  EXPECT_FLOAT_EQ(first.prompt_logprobs(2).logprob(), FakeLogprob('c'));
  const auto& last = answer.messages.back();
  EXPECT_EQ(last.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(last.usage().prompt_tokens(), 3u);
  EXPECT_EQ(last.usage().completion_tokens(), 6u);
  ASSERT_EQ(last.logprobs_size(), 1);
  EXPECT_EQ(last.logprobs(0).token(), "<eos>");
  EXPECT_EQ(last.logprobs(0).top_size(), 2);
}

TEST_F(Grpc, SeveralChoicesFromIds) {
  Start();
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(97);
  request.set_n(3);
  request.mutable_sampling()->set_max_tokens(3);
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok());
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(answer.Text(i), "hel");
  EXPECT_EQ(engine_->submitted()[2].sampling.sample_index, 2);
}

TEST_F(Grpc, Errors) {
  Start();
  const auto expect = [&](const v1::GenerateRequest& request, grpc::StatusCode code,
                          const std::string& api_code) {
    const Answer answer = Generate(request);
    EXPECT_EQ(answer.status.error_code(), code) << answer.status.error_message();
    EXPECT_EQ(answer.error_code, api_code);
    EXPECT_FALSE(answer.request_id.empty());
  };
  constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  expect({}, kInvalid, "missing_field");
  expect(Text(""), kInvalid, "invalid_value");
  expect(Text(std::string(300, 'a')), kInvalid, "context_length_exceeded");
  v1::GenerateRequest request = Text("a");
  request.set_model("other");
  expect(request, grpc::StatusCode::NOT_FOUND, "model_not_found");
  request = Text("a");
  request.mutable_sampling()->set_temperature(std::numeric_limits<double>::quiet_NaN());
  expect(request, kInvalid, "invalid_value");
  request = Text("a");
  request.mutable_sampling()->set_top_p(-0.1);
  expect(request, kInvalid, "invalid_value");
  request = Text("a");
  request.mutable_sampling()->add_stop("");
  expect(request, kInvalid, "invalid_value");
  request = Text("a");
  request.mutable_token_ids()->add_ids(-1);
  expect(request, kInvalid, "invalid_value");
  request = Text("a");
  request.set_n(129);
  expect(request, kInvalid, "invalid_value");
  request = Text("a");
  request.set_logprobs(21);
  expect(request, kInvalid, "invalid_value");
  Script script;
  script.submit_error = absl::ResourceExhaustedError("full");
  engine_->SetScript(script);
  expect(Text("a"), grpc::StatusCode::RESOURCE_EXHAUSTED, "queue_full");
  script.submit_error = absl::AlreadyExistsError("running");
  engine_->SetScript(script);
  expect(Text("a"), grpc::StatusCode::ALREADY_EXISTS, "duplicate_request_id");
  script = Script();
  script.fail_after = 2;
  engine_->SetScript(script);
  const Answer failed = Generate(Text("a"));
  EXPECT_EQ(failed.status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(failed.status.error_message().find("secrets"), std::string::npos);
}

TEST_F(Grpc, TooLargeAMessage) {
  Start();
  const Answer answer = Generate(Text(std::string(17 << 20, 'a')));
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(Grpc, CancelReachesTheEngine) {
  Script script;
  script.endless = true;
  script.delay = absl::Milliseconds(5);
  Start(script);
  v1::GenerateRequest request = Text("a");
  request.mutable_sampling()->set_max_tokens(200);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request);
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  context.TryCancel();
  EXPECT_TRUE(engine_->WaitForCancelled(1));
  EXPECT_TRUE(engine_->WaitForActive(0));
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(Grpc, CancelWhileQueued) {
  Script script;
  script.held = true;
  Start(script);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Text("a"));
  ASSERT_TRUE(engine_->WaitForActive(1));
  context.TryCancel();
  EXPECT_TRUE(engine_->WaitForCancelled(1));
}

TEST_F(Grpc, DeadlineEndsTheSequence) {
  Script script;
  script.held = true;
  Start(script);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(150));
  const Answer answer = Generate(Text("a"), &context);
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(engine_->WaitForActive(0));
}

TEST_F(Grpc, OurOwnTimeLimitIsADeadlineToo) {
  Script script;
  script.held = true;
  ServerSettings settings;
  settings.limits.max_request_time = absl::Milliseconds(100);
  Start(script, settings);
  const Answer answer = Generate(Text("a"));
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(answer.error_code, "timeout");
}

TEST_F(Grpc, SlowReaderIsDropped) {
  Script script;
  script.endless = true;
  script.bytes_per_token = 60'000;
  script.delay = absl::Milliseconds(4);
  ServerSettings settings;
  settings.http.write_stall_timeout = absl::Milliseconds(300);
  Start(script, settings);
  v1::GenerateRequest request = Text("a");
  request.mutable_sampling()->set_max_tokens(250);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request);
  EXPECT_TRUE(engine_->WaitForCancelled(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(Grpc, AStuckEngineEndsCalls) {
  Script script;
  script.endless = true;
  script.delay = absl::Milliseconds(5);
  Start(script);
  const EngineWatchdog watchdog(engine_, absl::Milliseconds(100), [&](bool stuck) {
    (*context_->models().Find("tiny"))->SetEngineStuck(stuck);
    server_->SetServing(!stuck);
  });
  v1::GenerateRequest request = Text("a");
  request.mutable_sampling()->set_max_tokens(250);
  std::future<Answer> running = std::async(std::launch::async, [&] { return Generate(request); });
  ASSERT_TRUE(engine_->WaitForActive(1));
  engine_->SetStuck(true);
  const Answer cut = running.get();
  EXPECT_EQ(cut.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(cut.error_code, "engine_stuck");
  const Answer refused = Generate(request);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.error_code, "engine_stuck");
  constexpr int kServing = 1;
  constexpr int kNotServing = 2;
  for (int i = 0; i < 5000 && Health("") != kNotServing; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(Health(""), kNotServing);
  engine_->SetStuck(false);
  for (int i = 0; i < 5000 && Health("") != kServing; ++i) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(Health(""), kServing);
  engine_->SetScript({});
  EXPECT_TRUE(Generate(Text("a")).status.ok());
}

TEST_F(Grpc, ManyStreamsAtOnce) {
  Script script;
  script.reply = "0123456789";
  script.delay = absl::Milliseconds(1);
  Start(script);
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 32; ++i) {
    threads.emplace_back([&] { good += Generate(Text("abc")).Text() == "0123456789"; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 32);
}

TEST_F(Grpc, Score) {
  Start();
  v1::ScoreRequest request;
  request.set_text("abc");
  request.set_top_logprobs(2);
  v1::ScoreResponse response;
  grpc::ClientContext context;
  const grpc::Status status = stub_->Score(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.tokens_size(), 3);
  EXPECT_EQ(response.scored_tokens(), 2u);
  EXPECT_NEAR(response.sum_logprob(), FakeLogprob('b') + FakeLogprob('c'), 1e-6);
  EXPECT_EQ(response.tokens(1).top_size(), 2);
}

TEST_F(Grpc, ExpertStatisticsCanBeSwitchedOff) {
  ServerSettings settings;
  settings.moe_metrics.mode = MoeMetricsMode::kOff;
  Start({}, settings);
  grpc::ClientContext context;
  v1::GetExpertStatsResponse stats;
  EXPECT_EQ(stub_->GetExpertStats(&context, {}, &stats).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(Grpc, UnaryCalls) {
  Start();
  v1::TokenizeRequest tokenize;
  tokenize.set_text("ab");
  tokenize.set_return_token_strs(true);
  v1::TokenizeResponse tokens;
  grpc::ClientContext c1;
  ASSERT_TRUE(stub_->Tokenize(&c1, tokenize, &tokens).ok());
  EXPECT_EQ(tokens.token_ids_size(), 2);
  EXPECT_EQ(tokens.token_strs(1), "b");
  v1::DetokenizeRequest detokenize;
  detokenize.add_token_ids(97);
  v1::DetokenizeResponse text;
  grpc::ClientContext c2;
  ASSERT_TRUE(stub_->Detokenize(&c2, detokenize, &text).ok());
  EXPECT_EQ(text.text(), "a");
  detokenize.add_token_ids(300);
  grpc::ClientContext c3;
  EXPECT_EQ(stub_->Detokenize(&c3, detokenize, &text).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  v1::GetModelInfoResponse info;
  grpc::ClientContext c4;
  ASSERT_TRUE(stub_->GetModelInfo(&c4, {}, &info).ok());
  EXPECT_EQ(info.names(0), "tiny");
  EXPECT_EQ(info.routed_blocks(), 1u);
  v1::GetExpertStatsResponse stats;
  grpc::ClientContext c5;
  ASSERT_TRUE(stub_->GetExpertStats(&c5, {}, &stats).ok());
  ASSERT_EQ(stats.blocks_size(), 1);
  EXPECT_EQ(stats.blocks(0).counts(0), 10u);
  EXPECT_DOUBLE_EQ(stats.activation_ratio(), 0.75);
}

// Calls use the model that they name, and the health service reports each model.
TEST_F(Grpc, SeveralModels) {
  Start();
  ModelRegistry& models = context_->models();
  ASSERT_TRUE(models.Declare({"second", "alias"}, "").ok());
  const auto version = models.BeginLoad("second", "");
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(Health("model/tiny"), 1);
  server_->SetServing(true);
  EXPECT_EQ(Health("model/alias"), 2);
  Script script;
  script.reply = "second";
  LoadedModel loaded;
  loaded.engine = std::make_shared<FakeEngine>(script, 128);
  models.EndLoad("second", ServedModel::Create("second", *version, std::move(loaded), {}, 0));
  server_->SetServing(true);
  EXPECT_EQ(Health("model/alias"), 1);
  v1::GenerateRequest request = Text("a");
  request.set_model("alias");
  EXPECT_EQ(Generate(request).Text(), "second");
  EXPECT_EQ(Generate(Text("a")).Text(), "hello");
  v1::GetModelInfoRequest asked;
  asked.set_model("alias");
  v1::GetModelInfoResponse info;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->GetModelInfo(&context, asked, &info).ok());
  EXPECT_EQ(info.max_model_len(), 128u);
  ASSERT_EQ(info.names_size(), 2);
  EXPECT_EQ(info.names(0), "second");
  EXPECT_EQ(info.names(1), "alias");
}

TEST_F(Grpc, Keys) {
  ServerSettings settings;
  settings.keys = PlainKeys({"secret"});
  Start({}, settings);
  EXPECT_EQ(Generate(Text("a")).status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  v1::GetModelInfoResponse info;
  grpc::ClientContext c1;
  EXPECT_EQ(stub_->GetModelInfo(&c1, {}, &info).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  grpc::ClientContext c2;
  c2.AddMetadata("authorization", "Bearer secret");
  EXPECT_TRUE(Generate(Text("a"), &c2).status.ok());
  grpc::ClientContext c3;
  c3.AddMetadata("authorization", "Bearer secret");
  c3.AddMetadata("authorization", "Bearer other");
  EXPECT_EQ(Generate(Text("a"), &c3).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Health(""), 1) << "health needs no key";
}

TEST_F(Grpc, HealthFollowsTheState) {
  Start({}, {}, /*serving=*/false);
  const std::vector<std::string> names = {"", "moeserve.v1.Inference", "model/tiny"};
  for (const std::string& name : names) EXPECT_EQ(Health(name), 2) << name;
  const Answer loading = Generate(Text("a"));
  EXPECT_EQ(loading.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(loading.error_code, "loading");
  context_->SetServing(engine_, {});
  server_->SetServing(true);
  for (const std::string& name : names) EXPECT_EQ(Health(name), 1) << name;
  grpc::StatusCode code;
  EXPECT_EQ(Health("nothing", &code), -1);
  EXPECT_EQ(code, grpc::StatusCode::NOT_FOUND);
  context_->SetDraining();
  server_->SetServing(false);
  for (const std::string& name : names) EXPECT_EQ(Health(name), 2) << name;
  EXPECT_EQ(Generate(Text("a")).error_code, "draining");
}

// Sends one request of each kind through both versions of reflection.
template <typename Reflection, typename Request, typename Response>
void AskReflection(const std::shared_ptr<grpc::Channel>& channel) {
  const auto stub = Reflection::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->ServerReflectionInfo(&context);
  const auto ask = [&](const Request& request) {
    Response response;
    EXPECT_TRUE(stream->Write(request));
    EXPECT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.original_request().SerializeAsString(), request.SerializeAsString());
    return response;
  };
  Request request;
  request.set_list_services("*");
  std::vector<std::string> names;
  const Response list = ask(request);
  for (const auto& service : list.list_services_response().service()) {
    names.push_back(service.name());
  }
  const std::vector<std::string> expected = {
      "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
      "grpc.reflection.v1alpha.ServerReflection", "inference.GRPCInferenceService",
      "moeserve.v1.Inference"};
  EXPECT_EQ(names, expected);
  for (const char* symbol :
       {"moeserve.v1.Inference", "moeserve.v1.Inference.Generate", "moeserve.v1.SamplingParams"}) {
    request.set_file_containing_symbol(symbol);
    const Response response = ask(request);
    ASSERT_EQ(response.file_descriptor_response().file_descriptor_proto_size(), 1) << symbol;
    google::protobuf::FileDescriptorProto file;
    ASSERT_TRUE(file.ParseFromString(response.file_descriptor_response().file_descriptor_proto(0)));
    EXPECT_EQ(file.name(), "moeserve/v1/moeserve.proto");
  }
  for (const char* file : {"moeserve/v1/moeserve.proto", "google/rpc/status.proto",
                           "google/rpc/error_details.proto", "grpc/health/v1/health.proto"}) {
    request.set_file_by_filename(file);
    EXPECT_TRUE(ask(request).has_file_descriptor_response()) << file;
  }
  request.set_all_extension_numbers_of_type("moeserve.v1.SamplingParams");
  EXPECT_TRUE(ask(request).has_all_extension_numbers_response());
  const auto expect_error = [&](grpc::StatusCode code) {
    EXPECT_EQ(ask(request).error_response().error_code(), code) << request.ShortDebugString();
  };
  for (const char* unknown : {"", "nothing", "google.protobuf.FileDescriptorProto"}) {
    request.set_file_containing_symbol(unknown);
    expect_error(grpc::StatusCode::NOT_FOUND);
    request.set_all_extension_numbers_of_type(unknown);
    expect_error(grpc::StatusCode::NOT_FOUND);
  }
  request.set_file_by_filename("google/protobuf/descriptor.proto");
  expect_error(grpc::StatusCode::NOT_FOUND);
  request.mutable_file_containing_extension()->set_containing_type("moeserve.v1.SamplingParams");
  expect_error(grpc::StatusCode::NOT_FOUND);
  request.Clear();
  expect_error(grpc::StatusCode::INVALID_ARGUMENT);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(Grpc, ReflectionDescribesTheInterface) {
  Start();
  namespace v1alpha = grpc::reflection::v1alpha;
  AskReflection<v1alpha::ServerReflection, v1alpha::ServerReflectionRequest,
                v1alpha::ServerReflectionResponse>(channel_);
  namespace v1 = grpc::reflection::v1;
  AskReflection<v1::ServerReflection, v1::ServerReflectionRequest, v1::ServerReflectionResponse>(
      channel_);
}

TEST_F(Grpc, ReflectionCanBeSwitchedOff) {
  reflection_ = false;
  Start();
  std::string response;
  for (const char* version : {"v1", "v1alpha"}) {
    const grpc::Status status = GenericUnaryCall(
        channel_,
        absl::StrCat("/grpc.reflection.", version, ".ServerReflection/ServerReflectionInfo"),
        "\x3a\x01*", &response, /*streaming=*/true);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  }
}

KeySpec KeyOf(const std::string& name, ScopeSet scopes) {
  KeySpec spec;
  spec.name = name;
  spec.digest = KeyDigest("secret-" + name);
  spec.scopes = scopes;
  spec.limits.min_priority = 0;
  return spec;
}

// Every call of every service of the interface, under keys with one scope each and without a key.
TEST_F(Grpc, EveryCallAsksForItsScope) {
  const std::vector<Scope> scopes = {Scope::kGenerate, Scope::kStatistics, Scope::kRouting,
                                     Scope::kAdmin};
  ServerSettings settings;
  for (const Scope scope : scopes) {
    settings.keys.push_back(KeyOf(std::string(Name(scope)), {scope}));
  }
  settings.keys.push_back(KeyOf("expired", ScopeSet::All()));
  settings.keys.back().expires = absl::FromUnixSeconds(0);
  Start({}, settings);
  for (const rpc::Method* method : rpc::kMethods) {
    const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
        std::string(method->service));
    ASSERT_NE(service, nullptr);
    const auto* descriptor = service->FindMethodByName(std::string(method->name));
    ASSERT_NE(descriptor, nullptr);
    const std::string path =
        absl::StrCat("/", std::string(method->service), "/", std::string(method->name));
    SCOPED_TRACE(path);
    const bool streaming = descriptor->client_streaming() || descriptor->server_streaming();
    const auto call = [&](const std::vector<std::string>& keys) {
      std::string response;
      return GenericUnaryCall(channel_, path, "", &response, streaming, keys).error_code();
    };
    EXPECT_EQ(call({}), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_EQ(call({"Bearer wrong"}), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_EQ(call({"Bearer secret-expired"}), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_EQ(call({"Bearer secret-admin", "Bearer secret-admin"}),
              grpc::StatusCode::INVALID_ARGUMENT);
    for (const Scope scope : scopes) {
      const grpc::StatusCode code =
          call({absl::StrCat("Bearer secret-", std::string(Name(scope)))});
      if (method->scopes.Has(scope)) {
        EXPECT_NE(code, grpc::StatusCode::PERMISSION_DENIED) << Name(scope);
        EXPECT_NE(code, grpc::StatusCode::UNAUTHENTICATED) << Name(scope);
      } else {
        EXPECT_EQ(code, grpc::StatusCode::PERMISSION_DENIED) << Name(scope);
      }
    }
  }
}

TEST_F(Grpc, KeysLimitCalls) {
  ServerSettings settings;
  settings.keys = {KeyOf("a", {Scope::kGenerate}), KeyOf("b", {Scope::kGenerate})};
  settings.keys[0].limits.requests_per_minute = 2;
  settings.routing_records = true;
  Start({}, settings);
  const auto generate = [&](const char* key, const v1::GenerateRequest& request,
                            grpc::ClientContext& context) {
    context.AddMetadata("authorization", absl::StrCat("Bearer secret-", key));
    return Generate(request, &context);
  };
  grpc::ClientContext c1, c2, c3, c4, c5, c6;
  EXPECT_TRUE(generate("a", Text("a"), c1).status.ok());
  const std::string salt_of_a = engine_->submitted().back().cache_salt;
  EXPECT_EQ(Trailer(c1, "x-ratelimit-remaining-requests"), "1");
  EXPECT_TRUE(generate("a", Text("a"), c2).status.ok());
  const Answer refused = generate("a", Text("a"), c3);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.error_code, "rate_limit_exceeded");
  EXPECT_EQ(Trailer(c3, "retry-after"), "30");

  EXPECT_TRUE(generate("b", Text("a"), c4).status.ok());
  EXPECT_NE(engine_->submitted().back().cache_salt, salt_of_a);
  v1::GenerateRequest urgent = Text("a");
  urgent.set_priority(-1);
  EXPECT_EQ(generate("b", urgent, c5).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::GenerateRequest routing = Text("a");
  routing.set_return_routing(true);
  EXPECT_EQ(generate("b", routing, c6).status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  const std::string metrics = context_->MetricsText();
  EXPECT_NE(metrics.find("key_refusals_total{key=\"b\",reason=\"scope\"} 1"), std::string::npos);
  EXPECT_NE(metrics.find("key_refusals_total{key=\"a\",reason=\"requests\"} 1"), std::string::npos);
}

TEST_F(Grpc, StopWaitsForRunningCalls) {
  Script script;
  script.delay = absl::Milliseconds(30);
  Start(script);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Text("a"));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  std::thread stopper([&] { server_->Stop(absl::Seconds(10)); });
  std::string text = message.text();
  while (reader->Read(&message)) text += message.text();
  EXPECT_EQ(text, "hello");
  EXPECT_TRUE(reader->Finish().ok());
  stopper.join();
}

TEST_F(Grpc, AnOccupiedPortIsAnError) {
  Start();
  rpc::GrpcServerOptions options;
  options.port = server_->port();
  EXPECT_EQ(rpc::GrpcServer::Start(options, *context_).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace moeserve::server::testing
