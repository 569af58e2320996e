#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "base/message.h"
#include "engine/text/chat/chat_template.h"
#include "model_loaders/files/mapped_file.h"
#include "server/base/auth.h"
#include "server/base/logging.h"
#include "server/base/signals.h"
#include "server/base/text_values.h"
#include "server/base/version.h"
#include "server/commands/commands.h"
#include "server/commands/commit.h"
#include "server/commands/model_options.h"
#include "server/context.h"
#include "server/http/api.h"
#include "server/http/server.h"
#include "server/openai/chat_format.h"
#include "server/rpc/server.h"

namespace moeserve::server {
namespace {

struct Options {
  ModelOptionsText model;
  EngineOptionsText engine;
  std::string http = "127.0.0.1:8080";
  std::string grpc = "127.0.0.1:8081";
  std::vector<std::string> served_names;
  std::string api_key_file;
  std::string log_format = "text";
  std::string log_level = "info";
  double drain_seconds = 30.0;
  int max_logprobs = 20;
  int router_stats_interval = RecorderOptions().router_stats_interval;
  int token_stats_mib = 64;
  int64_t hidden_samples = 0;
  std::string chat_template;  // a file
  bool allow_request_chat_template = false;
  bool routing_records = false;
  RoutingControlLimits routing_control;
  bool strict_fields = false;
  bool no_dashboard = false;
  bool allow_open = false;
  std::string moe_metrics = "auto";
  bool moe_expert_weights = false;
  std::vector<std::string> metrics_compat;
};

LogLevel ParseLevel(const std::string& text) {
  if (text == "warning") return LogLevel::kWarning;
  if (text == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

// The name to serve a checkpoint folder under: its last component, whatever way it was written.
std::string DefaultName(const std::string& directory) {
  std::error_code ignored;
  const std::filesystem::path path =
      std::filesystem::absolute(directory, ignored).lexically_normal();
  const std::string name =
      path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
  return name.empty() ? "model" : name;
}

// Runs something once a second until destroyed.
class Ticker {
 public:
  explicit Ticker(ServerContext& context)
      : thread_([this, &context](std::stop_token stop) {
          std::unique_lock lock(mutex_);
          while (!stop.stop_requested()) {
            context.Tick();
            changed_.wait_for(lock, stop, std::chrono::seconds(1), [] { return false; });
          }
        }) {}

 private:
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::jthread thread_;
};

// The first signal, told to the main thread.
class StopFlag {
 public:
  void Set() {
    {
      std::lock_guard lock(mutex_);
      set_ = true;
    }
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

struct Addresses {
  HostPort http;
  HostPort grpc;
};

Result<Addresses> ResolveAddresses(const Options& options, bool has_keys) {
  Addresses out;
  MOESERVE_ASSIGN_OR_RETURN(out.http, ParseHostPort(options.http));
  MOESERVE_ASSIGN_OR_RETURN(out.grpc, ParseHostPort(options.grpc));
  if (!has_keys && !options.allow_open) {
    for (const HostPort* address : {&out.http, &out.grpc}) {
      if (address->IsLoopback()) continue;
      return absl::InvalidArgumentError(Concat(
          "listening on ", address->host,
          " without API keys would open the server to "
          "everybody who can reach it: give --api-key-file, or --allow-open to accept that"));
    }
  }
  return out;
}

void LogConfiguration(const Options& options, const EngineOptions& engine,
                      const ServerContext& context) {
  std::string names;
  for (const std::string& name : context.settings().served_names) {
    names += names.empty() ? name : "," + name;
  }
  LogInfo("serve",
          Concat("moeserve ", kVersion, " model=", options.model.directory, " names=", names,
                 " device=", options.model.device, " dtype=", options.model.dtype, " threads=",
                 options.model.threads, " cpu_isa=", options.model.cpu_isa, " http=", options.http,
                 " grpc=", options.grpc, " max_model_len=", engine.max_model_len,
                 " max_num_seqs=", engine.max_num_seqs, " max_step_tokens=", engine.max_step_tokens,
                 " kv_cache_bytes=", engine.kv_cache_bytes,
                 " api_keys=", context.settings().keys.empty() ? "no" : "yes",
                 " strict_fields=", options.strict_fields ? "yes" : "no"));
}

// The template of --chat-template if that was given. Unlike the model's it must compile: somebody
// asked for it.
Result<std::optional<std::string>> ReadChatTemplate(const std::string& file) {
  if (file.empty()) return std::optional<std::string>();
  auto source = ReadTextFile(file, chat::kMaxTemplateBytes);
  if (!source.ok()) return Prefixed("--chat-template: ", source.status());
  auto compiled = chat::ChatTemplate::Compile(*source);
  if (!compiled.ok()) return Prefixed("--chat-template: ", compiled.status());
  return std::optional<std::string>(*std::move(source));
}

std::shared_ptr<const ChatFormat> MakeChatFormat(TokenizerConfig config,
                                                 const std::optional<std::string>& chat_template) {
  if (chat_template) config.chat_template = chat_template;
  auto format = std::make_shared<const ChatFormat>(config);
  const absl::Status& status = format->status();
  if (absl::IsNotFound(status)) {
    LogInfo("serve", "the model has no chat template: chats will be refused");
  } else if (!status.ok()) {
    LogWarning("serve", Concat("the model's chat template cannot be used, chats will be refused: ",
                               Printable(std::string(status.message()), 300)));
  }
  return format;
}

absl::Status Serve(const Options& options) {
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> chat_template,
                            ReadChatTemplate(options.chat_template));
  ServerSettings settings;
  if (!options.api_key_file.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(settings.keys, ReadApiKeys(options.api_key_file));
  }
  MOESERVE_ASSIGN_OR_RETURN(const Addresses addresses,
                            ResolveAddresses(options, !settings.keys.empty()));
  MOESERVE_ASSIGN_OR_RETURN(EngineOptions engine_options, ResolveEngineOptions(options.engine));
  engine_options.routing_records = options.routing_records;
  engine_options.routing_control = options.routing_control;
  if (engine_options.routing_control.max_top_k > 0) engine_options.routing_control.enabled = true;
  engine_options.recorder.router_stats_interval = options.router_stats_interval;
  engine_options.recorder.token_counts_bytes = int64_t{options.token_stats_mib} << 20;
  engine_options.recorder.hidden_samples = options.hidden_samples;
  settings.served_names = options.served_names;
  if (settings.served_names.empty()) {
    settings.served_names.push_back(DefaultName(options.model.directory));
  }
  settings.device = options.model.device;
  settings.commit = Commit();
  settings.strict_fields = options.strict_fields;
  settings.dashboard = !options.no_dashboard;
  settings.limits.max_logprobs = options.max_logprobs;
  settings.allow_request_chat_template = options.allow_request_chat_template;
  settings.routing_records = options.routing_records;
  MOESERVE_ASSIGN_OR_RETURN(settings.moe_metrics.mode, ParseMoeMetricsMode(options.moe_metrics));
  settings.moe_metrics.weights = options.moe_expert_weights;
  if (!options.engine.engine.expert_stats) {
    settings.moe_metrics.mode = MoeMetricsMode::kOff;
    if (options.routing_records) {
      return absl::InvalidArgumentError(
          "--routing-records needs the counts that --no-expert-stats switches off");
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(settings.metrics_compat, ParseMetricsCompat(options.metrics_compat));

  // Destroyed from the last to the first: servers before the engine, the backend after it.
  RunningModel model;
  ServerContext context(std::move(settings));
  const std::unique_ptr<http::Router> router = http::MakeRouter(context);
  LogConfiguration(options, engine_options, context);

  http::HttpServerOptions http_options;
  http_options.host = addresses.http.host;
  http_options.port = addresses.http.port;
  http_options.limits = context.settings().http;
  MOESERVE_ASSIGN_OR_RETURN(const auto http_server,
                            http::HttpServer::Start(http_options, *router, context.metrics()));
  rpc::GrpcServerOptions grpc_options;
  grpc_options.host = addresses.grpc.host;
  grpc_options.port = addresses.grpc.port;
  MOESERVE_ASSIGN_OR_RETURN(const auto grpc_server, rpc::GrpcServer::Start(grpc_options, context));

  StopFlag stop;
  const SignalWatcher watcher([&] {
    LogInfo("serve", "stopping; a second signal ends the process at once");
    // Loading cannot be interrupted, and there is nobody to be answered yet.
    if (context.state() == ServerState::kLoading) std::quick_exit(0);
    stop.Set();
  });

  const absl::Time start = absl::Now();
  MOESERVE_ASSIGN_OR_RETURN(model, StartModel(options.model, engine_options));
  MOESERVE_RETURN_IF_ERROR(
      ResolveMoeMetrics(context.settings().moe_metrics, model.engine->ExpertSnapshot()).status());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  context.metrics().model_load_seconds = seconds;
  context.SetServing(model.engine, model.defaults,
                     MakeChatFormat(std::move(model.tokenizer_config), chat_template));
  grpc_server->SetServing(true);
  const Ticker ticker(context);
  LogInfo("serve", Concat("ready after ", static_cast<int64_t>(std::lround(seconds * 1000)),
                          " ms: ", model.description, ", context ", model.engine->max_model_len(),
                          " tokens"));
  std::printf("http listening on %s\ngrpc listening on %s\n", http_server->address().c_str(),
              grpc_server->address().c_str());
  std::fflush(stdout);

  stop.Wait();
  grpc_server->SetServing(false);
  context.SetDraining();
  const absl::Time deadline = absl::Now() + absl::Seconds(options.drain_seconds);
  // What was accepted and is still being prepared reaches the engine first.
  http_server->WaitForHandlers(deadline);
  context.work_pool().WaitUntilIdle(std::chrono::steady_clock::now() +
                                    absl::ToChronoNanoseconds(deadline - absl::Now()));
  model.engine->Drain(deadline);
  // What the engine has finished still has to reach the clients.
  http_server->Stop(absl::Seconds(5));
  grpc_server->Stop(absl::Seconds(5));
  LogInfo("serve", "stopped");
  return absl::OkStatus();
}

int Run(const Options& options) {
  BlockTerminationSignals();
  SetUpLogging(options.log_format == "json" ? LogFormat::kJson : LogFormat::kText,
               ParseLevel(options.log_level));
  const absl::Status status = Serve(options);
  return status.ok() ? 0 : Fail(status);
}

}  // namespace

void AddServeCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand("serve", "Serve a model over HTTP and gRPC");
  auto options = std::make_shared<Options>();
  AddModelOptions(*command, options->model);
  AddEngineOptions(*command, options->engine);
  command->add_option("--http", options->http, "HOST:PORT; port 0 takes a free one")
      ->envname("MOESERVE_HTTP")
      ->capture_default_str();
  command->add_option("--grpc", options->grpc, "HOST:PORT; port 0 takes a free one")
      ->envname("MOESERVE_GRPC")
      ->capture_default_str();
  command->add_option("--served-model-name", options->served_names,
                      "Name of the model for clients, can be repeated; default: the folder's name");
  command->add_option("--api-key-file", options->api_key_file, "File with one API key a line");
  command->add_flag("--allow-open", options->allow_open,
                    "Allow listening beyond loopback without API keys");
  command->add_flag("--strict-fields", options->strict_fields,
                    "Refuse requests with unknown fields");
  command->add_flag("--no-dashboard", options->no_dashboard, "Do not serve the page at /");
  command
      ->add_option("--max-logprobs", options->max_logprobs,
                   "Alternatives beside each token that a request may ask for")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--router-stats-interval", options->router_stats_interval,
                   "Router scores are looked at every so many steps, then of about 64 rows of a "
                   "block; 1: of all rows; 0: never")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  command
      ->add_option("--token-stats-mib", options->token_stats_mib,
                   "Most memory of the counts of tokens by expert; larger: none are kept")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--hidden-samples", options->hidden_samples,
                   "Rows of router inputs to keep of each block for /v1/experts/collapse and "
                   "profiles; they can tell about users' texts")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--chat-template", options->chat_template,
                      "File with a Jinja chat template in place of the model's");
  command->add_flag("--allow-request-chat-template", options->allow_request_chat_template,
                    "Let requests bring chat_template and chat_template_kwargs");
  command->add_flag(
      "--routing-records", options->routing_records,
      "Tell requests that ask which experts computed their tokens; takes 12 bytes for "
      "each row and chosen expert of the tokens in the KV cache");
  command->add_flag("--routing-control", options->routing_control.enabled,
                    "Let requests change the routing of their own tokens");
  command
      ->add_option("--routing-max-top-k", options->routing_control.max_top_k,
                   "Most experts for a row that such a request may ask for; 0: all; implies "
                   "--routing-control")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  command
      ->add_option("--moe-metrics", options->moe_metrics,
                   "Series of the experts at /metrics: off, layer (of each layer), top (and of its "
                   "most used experts), full (of every expert), auto (full up to 4096 experts, "
                   "else top)")
      ->capture_default_str();
  command->add_flag("--moe-expert-weights", options->moe_expert_weights,
                    "With full, also the sum of gate weights of every expert");
  command
      ->add_option("--metrics-compat", options->metrics_compat,
                   "Also give the metrics the names of vllm, sglang; can be repeated")
      ->delimiter(',');
  command->add_option("--log-format", options->log_format, "Format of the log on standard error")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->add_option("--log-level", options->log_level, "Least level to log")
      ->check(CLI::IsMember({"info", "warning", "error"}))
      ->capture_default_str();
  command
      ->add_option("--drain-timeout", options->drain_seconds,
                   "Seconds that running requests have left after a signal")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command->callback([options, &selected] { selected = [options] { return Run(*options); }; });
}

}  // namespace moeserve::server
