// Asks two servers of the same model the same things over HTTP and gRPC, and compares the answers.
// One of them runs on the CPU, the other one on the device under test.
//
//   server_check --expected HTTP,GRPC --found HTTP,GRPC [--tokens N] [--tolerance X] [--seconds N]
//
// HTTP and GRPC are addresses such as 127.0.0.1:8080. The servers need a chat template,
// --routing-records and --routing-control. Prints one line for each check, and exits with 1 if one
// failed. Greedy tokens must agree up to the first near tie, and log-probabilities up to X.

#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "moeserve/v1/moeserve.grpc.pb.h"
#include "tests/gpu/http_call.h"

namespace moeserve::gpu_run {
namespace {

using Json = nlohmann::json;

struct Options {
  std::vector<std::string> expected, found;  // the addresses of HTTP and gRPC
  int tokens = 24;
  double tolerance = 2e-4;
  int seconds = 60;  // for one request
};

constexpr char kPrompt[] = "In the beginning";

// A failed check. The message says what was expected and what was found.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void Require(bool condition, const std::string& message) {
  if (!condition) throw Failure(message);
}

// A greedy continuation.
struct Tokens {
  std::vector<std::string> texts;
  std::vector<double> logprobs;
  std::vector<double> margins;  // by how much the most probable token is ahead of the next
};

// Compares up to the first near tie. Returns what was compared.
std::string Compare(const Tokens& expected, const Tokens& found, double tolerance) {
  Require(!expected.texts.empty(), "expected tokens, found none");
  double worst = 0.0;
  for (size_t i = 0; i < expected.texts.size(); ++i) {
    const std::string where = "token " + std::to_string(i);
    Require(i < found.texts.size(),
            where + ": expected '" + expected.texts[i] + "', found no token");
    if (expected.texts[i] != found.texts[i]) {
      Require(expected.margins[i] <= 2 * tolerance,
              where + ": expected '" + expected.texts[i] + "', found '" + found.texts[i] + "'");
      return std::to_string(i) + " tokens up to a near tie, largest difference " +
             std::to_string(worst);
    }
    const double difference = std::abs(expected.logprobs[i] - found.logprobs[i]);
    Require(difference <= tolerance, where + ": expected log-probability " +
                                         std::to_string(expected.logprobs[i]) + ", found " +
                                         std::to_string(found.logprobs[i]));
    worst = std::max(worst, difference);
  }
  char text[80];
  std::snprintf(text, sizeof(text), "%zu tokens, largest difference %.1e", expected.texts.size(),
                worst);
  return text;
}

class Server {
 public:
  Server(const std::vector<std::string>& addresses, const Options& options)
      : http_(addresses[0]),
        options_(options),
        stub_(v1::Inference::NewStub(
            grpc::CreateChannel(addresses[1], grpc::InsecureChannelCredentials()))) {}

  HttpAnswer Get(const std::string& path) const { return Call(path, ""); }
  Json GetJson(const std::string& path) const { return Json::parse(Get(path).body); }
  Json Post(const std::string& path, const Json& body) const {
    return Json::parse(Call(path, body.dump()).body);
  }
  std::string PostText(const std::string& path, const Json& body) const {
    return Call(path, body.dump()).body;
  }

  v1::Inference::Stub& stub() const { return *stub_; }
  std::unique_ptr<grpc::ClientContext> Context() const {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() +
                          std::chrono::seconds(options_.seconds));
    return context;
  }
  const Options& options() const { return options_; }

 private:
  HttpAnswer Call(const std::string& path, const std::string& body) const {
    HttpAnswer answer = HttpCall(http_, path, body, options_.seconds);
    Require(answer.status == 200, path + " at " + http_ + ": expected status 200, found " +
                                      std::to_string(answer.status) + " " + answer.error + " " +
                                      answer.body.substr(0, 300));
    return answer;
  }

  std::string http_;
  Options options_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

void CheckStatus(const grpc::Status& status, const char* method) {
  Require(status.ok(), std::string(method) + ": expected OK, found " +
                           std::to_string(status.error_code()) + " " + status.error_message());
}

Json Greedy(const Server& server) {
  return {{"prompt", kPrompt},
          {"max_tokens", server.options().tokens},
          {"temperature", 0},
          {"ignore_eos", true}};
}

Json Chat(const Server& server, const char* question) {
  return {{"messages", {{{"role", "user"}, {"content", question}}}},
          {"max_tokens", server.options().tokens},
          {"temperature", 0}};
}

double Margin(std::vector<double> top) {
  std::sort(top.rbegin(), top.rend());
  return top.size() < 2 ? 1e9 : top[0] - top[1];
}

Tokens Completion(const Server& server) {
  Json body = Greedy(server);
  body["logprobs"] = 2;
  const Json choice = server.Post("/v1/completions", body)["choices"][0];
  Tokens out;
  for (const Json& text : choice["logprobs"]["tokens"]) out.texts.push_back(text);
  for (const Json& value : choice["logprobs"]["token_logprobs"]) out.logprobs.push_back(value);
  for (const Json& top : choice["logprobs"]["top_logprobs"]) {
    std::vector<double> values;
    for (const Json& value : top) values.push_back(value);
    out.margins.push_back(Margin(values));
  }
  return out;
}

// Returns the text of a completion that arrives in events.
std::string Streamed(const Server& server) {
  Json body = Greedy(server);
  body["stream"] = true;
  const std::string events = server.PostText("/v1/completions", body);
  std::string text;
  for (size_t at = 0; (at = events.find("data: {", at)) != std::string::npos;) {
    const size_t end = events.find('\n', at);
    const Json event = Json::parse(events.substr(at + 6, end - at - 6));
    if (!event["choices"].empty()) text += event["choices"][0]["text"].get<std::string>();
    at = end;
  }
  Require(events.find("data: [DONE]") != std::string::npos, "expected data: [DONE] at the end");
  return text;
}

Tokens ChatAnswer(const Server& server) {
  Json body = Chat(server, "Tell me a story");
  body["logprobs"] = true;
  body["top_logprobs"] = 2;
  const Json choice = server.Post("/v1/chat/completions", body)["choices"][0];
  Tokens out;
  for (const Json& token : choice["logprobs"]["content"]) {
    out.texts.push_back(token["token"]);
    out.logprobs.push_back(token["logprob"]);
    std::vector<double> values;
    for (const Json& top : token["top_logprobs"]) values.push_back(top["logprob"]);
    out.margins.push_back(Margin(values));
  }
  return out;
}

v1::GenerateRequest GrpcGreedy(const Server& server) {
  v1::GenerateRequest request;
  request.set_text(kPrompt);
  request.mutable_sampling()->set_max_tokens(server.options().tokens);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_ignore_eos(true);
  request.set_logprobs(2);
  return request;
}

struct GrpcAnswer {
  Tokens tokens;
  std::vector<uint32_t> experts;  // of all rows
};

GrpcAnswer Generate(const Server& server, const v1::GenerateRequest& request) {
  const auto context = server.Context();
  const auto reader = server.stub().Generate(context.get(), request);
  GrpcAnswer out;
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
    for (const v1::TokenLogprob& token : message.logprobs()) {
      out.tokens.texts.push_back(token.token());
      out.tokens.logprobs.push_back(token.logprob());
      std::vector<double> values;
      for (const v1::Alternative& top : token.top()) values.push_back(top.logprob());
      out.tokens.margins.push_back(Margin(values));
    }
    const auto& experts = message.routing().experts();
    out.experts.insert(out.experts.end(), experts.begin(), experts.end());
  }
  CheckStatus(reader->Finish(), "Generate");
  return out;
}

std::string CheckScore(const Server& expected, const Server& found) {
  v1::ScoreRequest request;
  request.set_text("In the beginning God created the heaven and the earth.");
  v1::ScoreResponse answers[2];
  const Server* servers[] = {&expected, &found};
  for (int i = 0; i < 2; ++i) {
    CheckStatus(servers[i]->stub().Score(servers[i]->Context().get(), request, &answers[i]),
                "Score");
  }
  Tokens tokens[2];
  for (int i = 0; i < 2; ++i) {
    for (const v1::TokenLogprob& token : answers[i].tokens()) {
      tokens[i].texts.push_back(token.token());
      tokens[i].logprobs.push_back(token.logprob());
      tokens[i].margins.push_back(1e9);
    }
  }
  return Compare(tokens[0], tokens[1], expected.options().tolerance);
}

// The same override of the routing, with the routes of every row. Rows with nearly equal scores may
// have other experts.
std::string CheckRouting(const Server& expected, const Server& found) {
  v1::GetExpertStatsResponse stats;
  CheckStatus(expected.stub().GetExpertStats(expected.Context().get(), {}, &stats),
              "GetExpertStats");
  v1::GenerateRequest request = GrpcGreedy(expected);
  request.set_return_routing(true);
  v1::RoutingControl::Expert* masked = request.mutable_routing_control()->add_experts();
  masked->set_layer(stats.blocks(0).layer());
  masked->set_block(stats.blocks(0).block());
  masked->set_expert(0);
  const GrpcAnswer e = Generate(expected, request), f = Generate(found, request);
  const std::string compared = Compare(e.tokens, f.tokens, expected.options().tolerance);
  Require(!e.experts.empty(), "expected a record of the routing, found none");
  Require(e.experts.size() == f.experts.size() || compared.find("near tie") != std::string::npos,
          "expected " + std::to_string(e.experts.size()) + " routes, found " +
              std::to_string(f.experts.size()));
  size_t equal = 0;
  const size_t all = std::min(e.experts.size(), f.experts.size());
  for (size_t i = 0; i < all; ++i) equal += e.experts[i] == f.experts[i];
  const double least = compared.find("near tie") == std::string::npos ? 0.98 : 0.0;
  Require(static_cast<double>(equal) >= least * static_cast<double>(all),
          "expected the routes of the CPU, found " + std::to_string(equal) + " equal ones of " +
              std::to_string(all));
  return compared + ", " + std::to_string(equal) + " of " + std::to_string(all) + " routes equal";
}

std::string CheckTools(const Server& expected, const Server& found) {
  for (const Server* server : {&expected, &found}) {
    Json body = Chat(*server, "How is the weather in Oslo?");
    body["max_tokens"] = 64;
    body["tool_choice"] = "required";
    body["tools"] = Json::parse(R"([{"type": "function", "function": {"name": "weather",
        "strict": true, "parameters": {"type": "object", "properties": {"city": {"type": "string",
        "enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": false}}}])");
    const Json choice = server->Post("/v1/chat/completions", body)["choices"][0];
    Require(choice["finish_reason"] == "tool_calls", "expected tool_calls, found " + choice.dump());
    const Json call = choice["message"]["tool_calls"][0]["function"];
    const Json arguments = Json::parse(call["arguments"].get<std::string>());
    Require(
        call["name"] == "weather" && (arguments["city"] == "Rome" || arguments["city"] == "Oslo"),
        "expected a call of weather, found " + call.dump());
  }
  return "both called the tool";
}

std::string CheckStatistics(const Server& expected, const Server& found) {
  v1::GetExpertStatsResponse stats[2];
  const Server* servers[] = {&expected, &found};
  for (int i = 0; i < 2; ++i) {
    CheckStatus(servers[i]->stub().GetExpertStats(servers[i]->Context().get(), {}, &stats[i]),
                "GetExpertStats");
  }
  Require(stats[0].blocks_size() == stats[1].blocks_size() && stats[0].blocks_size() > 0,
          "expected the same routed blocks");
  double worst = 0.0;
  for (int b = 0; b < stats[0].blocks_size(); ++b) {
    const auto& e = stats[0].blocks(b).counts();
    const auto& f = stats[1].blocks(b).counts();
    Require(e.size() == f.size() && e.size() > 0, "expected the same experts");
    double sums[2] = {0, 0}, difference = 0;
    for (const uint64_t n : e) sums[0] += static_cast<double>(n);
    for (const uint64_t n : f) sums[1] += static_cast<double>(n);
    Require(sums[0] > 0 && sums[1] > 0, "expected counts above 0");
    for (int i = 0; i < e.size(); ++i) {
      difference +=
          std::abs(static_cast<double>(e[i]) / sums[0] - static_cast<double>(f[i]) / sums[1]);
    }
    worst = std::max(worst, difference / 2);
  }
  Require(worst <= 0.1,
          "expected the shares of the CPU's experts, found a distance of " + std::to_string(worst));
  return "largest distance of shares " + std::to_string(worst) + ", " +
         std::to_string(stats[1].tokens()) + " tokens";
}

std::string CheckProfiles(const Server& server) {
  const HttpAnswer profile = server.Get("/v1/experts/profile");
  Require(profile.body.find("moeserve-expert") != std::string::npos,
          "expected a profile, found " + std::to_string(profile.body.size()) + " bytes");
  size_t bytes = profile.body.size();
  const Json layout = server.GetJson("/v1/experts/layout");
  const std::string block = "layer=" + std::to_string(layout["blocks"][0]["layer"].get<int>()) +
                            "&block=" + layout["blocks"][0]["block"].get<std::string>();
  for (const std::string& path :
       {std::string("/v1/experts/stats"), std::string("/v1/experts/collapse"),
        "/v1/experts/tokens?" + block, "/v1/experts/similarity?" + block}) {
    bytes += server.GetJson(path).dump().size();
  }
  return std::to_string(bytes) + " bytes of statistics";
}

// The page and every file of it that files name, as a browser would fetch them.
std::string CheckPage(const Server& server) {
  std::vector<std::pair<std::string, std::string>> files = {{"/", ""}};
  std::set<std::string> seen = {"/"};
  size_t bytes = 0;
  for (size_t i = 0; i < files.size() && i < 200; ++i) {
    const std::string body = server.Get(files[i].first).body;
    bytes += body.size();
    const std::string folder = files[i].first.substr(0, files[i].first.rfind('/') + 1);
    for (size_t at = 0; (at = body.find_first_of("\"'", at)) != std::string::npos; ++at) {
      const size_t end = body.find_first_of("\"'\n", at + 1);
      if (end == std::string::npos) break;
      std::string name = body.substr(at + 1, end - at - 1);
      const bool asset = name.ends_with(".js") || name.ends_with(".css") || name.ends_with(".svg");
      if (!asset || name.find_first_of(" ${") != std::string::npos) continue;
      std::string from = folder;
      if (name.starts_with("./")) name = name.substr(2);
      while (name.starts_with("../") && from.size() > 1) {
        name = name.substr(3);
        from = from.substr(0, from.rfind('/', from.size() - 2) + 1);
      }
      if (seen.insert(from + name).second) files.emplace_back(from + name, "");
    }
  }
  Require(files.size() > 10,
          "expected the files of the page, found " + std::to_string(files.size()));
  server.GetJson("/v1/metrics/history");
  const HttpAnswer metrics = server.Get("/metrics");
  Require(metrics.body.find("moeserve_") != std::string::npos, "expected metrics");
  return std::to_string(files.size()) + " files, " + std::to_string(bytes) + " bytes";
}

// Random draws repeat with a seed, alone and as one of several choices.
std::string CheckSeeds(const Server& server) {
  Json body = Greedy(server);
  body["temperature"] = 1.0;
  body["top_p"] = 0.9;
  body["seed"] = 7;
  body["n"] = 3;
  const Json first = server.Post("/v1/completions", body)["choices"];
  const Json again = server.Post("/v1/completions", body)["choices"];
  Require(first.size() == 3 && first == again,
          "expected the same draws, found " + first.dump() + " and " + again.dump());
  return "3 choices drawn twice";
}

std::string CheckOtherChats(const Server& expected, const Server& found) {
  std::string texts[2];
  const Server* servers[] = {&expected, &found};
  for (int i = 0; i < 2; ++i) {
    Json body = Chat(*servers[i], "Tell me a story");
    const Json message = servers[i]->Post("/v1/messages", body);
    Require(message["usage"]["output_tokens"].get<int>() > 0, "messages: expected output tokens");
    const Json response = servers[i]->Post(
        "/v1/responses", {{"input", "Tell me"},
                          {"temperature", 0},
                          {"max_output_tokens", std::max(16, servers[i]->options().tokens)}});
    Require(response["usage"]["output_tokens"].get<int>() > 0, "responses: expected output tokens");
    texts[i] = message["content"].dump() + response["output"][0]["content"][0]["text"].dump();
  }
  return texts[0] == texts[1] ? "both APIs gave the CPU's text" : "both APIs answered, other texts";
}

std::string CheckSchemas(const Server& expected, const Server& found) {
  std::string texts[2];
  const Server* servers[] = {&expected, &found};
  for (int i = 0; i < 2; ++i) {
    Json body = Chat(*servers[i], "Which animal is it?");
    body["max_tokens"] = 64;
    body["response_format"] = Json::parse(R"({"type": "json_schema", "json_schema": {"name": "a",
        "strict": true, "schema": {"type": "object", "properties": {"animal": {"enum": ["cat",
        "dog", "zebra"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 8}},
        "required": ["animal", "legs"], "additionalProperties": false}}})");
    const Json choice = servers[i]->Post("/v1/chat/completions", body)["choices"][0];
    texts[i] = choice["message"]["content"].get<std::string>();
    const Json object = Json::parse(texts[i]);
    texts[i] = object.dump();
    Require(object.size() == 2 && object["legs"].is_number_integer(), "found " + object.dump());
  }
  return texts[1] + (texts[0] == texts[1] ? " as on the CPU" : ", on the CPU " + texts[0]);
}

int Run(const Options& options) {
  const Server expected(options.expected, options), found(options.found, options);
  Tokens completed;
  const std::pair<const char*, std::function<std::string()>> checks[] = {
      {"http.completion",
       [&] {
         completed = Completion(found);
         return Compare(Completion(expected), completed, options.tolerance);
       }},
      {"http.stream",
       [&] {
         std::string whole;
         for (const std::string& text : completed.texts) whole += text;
         const std::string text = Streamed(found);
         Require(text == whole, "expected '" + whole + "', found '" + text + "'");
         return std::to_string(text.size()) + " bytes as in one answer";
       }},
      {"http.seeds",
       [&] {
         CheckSeeds(expected);  // so that both have the same statistics
         return CheckSeeds(found);
       }},
      {"http.chat",
       [&] { return Compare(ChatAnswer(expected), ChatAnswer(found), options.tolerance); }},
      {"http.schema", [&] { return CheckSchemas(expected, found); }},
      {"http.tools", [&] { return CheckTools(expected, found); }},
      {"http.messages+responses", [&] { return CheckOtherChats(expected, found); }},
      {"grpc.generate",
       [&] {
         return Compare(Generate(expected, GrpcGreedy(expected)).tokens,
                        Generate(found, GrpcGreedy(found)).tokens, options.tolerance);
       }},
      {"grpc.score", [&] { return CheckScore(expected, found); }},
      {"grpc.routing", [&] { return CheckRouting(expected, found); }},
      {"grpc.statistics", [&] { return CheckStatistics(expected, found); }},
      {"http.profiles", [&] { return CheckProfiles(found); }},
      {"http.page", [&] { return CheckPage(found); }}};
  int failed = 0;
  for (const auto& [name, check] : checks) {
    const auto start = std::chrono::steady_clock::now();
    std::string said = "failed";
    try {
      said = "passed: " + check();
    } catch (const std::exception& error) {  // Failure, or JSON of another form
      said = std::string("FAILED: ") + error.what();
      ++failed;
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%-24s %6.2f s  %s\n", name, took.count(), said.c_str());
    std::fflush(stdout);
  }
  std::printf("%zu checks, %d failed\n", std::size(checks), failed);
  return failed > 0 ? 1 : 0;
}

}  // namespace
}  // namespace moeserve::gpu_run

int main(int argc, char** argv) {
  moeserve::gpu_run::Options options;
  CLI::App app("Compares the answers of two servers of one model");
  app.add_option("--expected", options.expected, "HTTP,GRPC of the server on the CPU")
      ->delimiter(',')
      ->expected(2)
      ->required();
  app.add_option("--found", options.found, "HTTP,GRPC of the server on the device")
      ->delimiter(',')
      ->expected(2)
      ->required();
  app.add_option("--tokens", options.tokens, "Tokens of an answer")->check(CLI::Range(1, 4096));
  app.add_option("--tolerance", options.tolerance, "Of a log-probability");
  app.add_option("--seconds", options.seconds, "For one request")->check(CLI::Range(1, 3600));
  CLI11_PARSE(app, argc, argv);
  return moeserve::gpu_run::Run(options);
}
