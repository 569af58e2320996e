#include <algorithm>
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

#include "base/message.h"
#include "base/steady_clock.h"
#include "engine/text/chat/chat_template.h"
#include "model_loaders/files/mapped_file.h"
#include "server/base/commit.h"
#include "server/base/descriptors.h"
#include "server/base/logging.h"
#include "server/base/signals.h"
#include "server/base/text_values.h"
#include "server/base/version.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/context.h"
#include "server/generation/engine_watchdog.h"
#include "server/http/routes/api.h"
#include "server/http/server.h"
#include "server/keys/key_file.h"
#include "server/keys/key_file_watcher.h"
#include "server/openai/chat_format.h"
#include "server/rpc/methods.h"
#include "server/rpc/server.h"

namespace moeserve::server {
namespace {

// A reader of the log that has stopped reading delays the end of the process by so much.
constexpr std::chrono::seconds kLogFlushTimeout{1};

// A server that stops gives its clients at least so long to read their answers, even if the time of
// --drain-timeout has passed.
constexpr absl::Duration kTimeToRead = absl::Seconds(5);

struct Options {
  ModelOptionsText model;
  EngineOptionsText engine;
  std::string http = "127.0.0.1:8080";
  std::string grpc = "127.0.0.1:8081";
  std::vector<std::string> served_names;
  std::string api_key_file;
  int min_priority = 0;
  bool print_routes = false;
  std::string grpc_reflection = "on";
  std::string log_format = "text";
  std::string log_level = "info";
  double drain_seconds = 30.0;
  double watchdog_seconds = 60.0;  // 0: no watchdog
  int64_t request_memory_mib = 0;  // 0: DefaultRequestMemory()
  int max_logprobs = 20;
  int router_stats_interval = RecorderOptions().router_stats_interval;
  int token_stats_mib = 64;
  int64_t hidden_samples = 0;
  std::string chat_template;  // path of a file
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

// Returns the default name of a served model: the last component of the checkpoint's path.
std::string DefaultName(const std::string& directory) {
  std::error_code ignored;
  const std::filesystem::path path =
      std::filesystem::absolute(directory, ignored).lexically_normal();
  const std::string name =
      path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
  return name.empty() ? "model" : name;
}

// Until destroyed, calls ServerContext::Tick once a second, and lets gRPC's health service report
// an engine that cannot serve any more.
class Ticker {
 public:
  Ticker(ServerContext& context, rpc::GrpcServer& grpc)
      : thread_([this, &context, &grpc](std::stop_token stop) {
          std::unique_lock lock(mutex_);
          while (!stop.stop_requested()) {
            context.Tick();
            if (!context.EngineStatus().ok()) grpc.SetServing(false);
            changed_.wait_for(lock, stop, std::chrono::seconds(1), [] { return false; });
          }
        }) {}

 private:
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::jthread thread_;
};

// The first signal sets this flag; the main thread waits for it.
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
    names += names.empty() ? name : Concat(',', name);
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

// Returns the contents of the file of --chat-template; nullopt if `file` is empty. A template that
// does not compile is an error here, whereas a model's own broken template only disables chats.
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

// The configuration that does not depend on the model.
struct Configuration {
  ServerSettings settings;
  EngineOptions engine;
  Addresses addresses;
  std::optional<std::string> chat_template;
  KeyFileWatcher::Version key_file;  // as it was read
};

EngineOptions WithServeOptions(EngineOptions engine, const Options& options) {
  engine.routing_records = options.routing_records;
  engine.routing_control = options.routing_control;
  if (engine.routing_control.max_top_k > 0) engine.routing_control.enabled = true;
  engine.recorder.router_stats_interval = options.router_stats_interval;
  engine.recorder.token_counts_bytes = int64_t{options.token_stats_mib} << 20;
  engine.recorder.hidden_samples = options.hidden_samples;
  return engine;
}

Result<Configuration> Configure(const Options& options) {
  Configuration out;
  MOESERVE_ASSIGN_OR_RETURN(out.chat_template, ReadChatTemplate(options.chat_template));
  ServerSettings& settings = out.settings;
  if (!options.api_key_file.empty()) {
    out.key_file = KeyFileWatcher::Look(options.api_key_file);
    MOESERVE_ASSIGN_OR_RETURN(settings.keys, ReadKeyFile(options.api_key_file));
  }
  MOESERVE_ASSIGN_OR_RETURN(out.addresses, ResolveAddresses(options, !settings.keys.empty()));
  MOESERVE_ASSIGN_OR_RETURN(EngineOptions engine, ResolveEngineOptions(options.engine));
  out.engine = WithServeOptions(std::move(engine), options);
  settings.served_names = options.served_names;
  if (settings.served_names.empty()) {
    settings.served_names.push_back(DefaultName(options.model.directory));
  }
  settings.device = options.model.device;
  settings.commit = Commit();
  settings.min_priority = options.min_priority;
  settings.strict_fields = options.strict_fields;
  settings.dashboard = !options.no_dashboard;
  settings.limits.max_logprobs = options.max_logprobs;
  settings.request_memory = options.request_memory_mib > 0
                                ? static_cast<size_t>(options.request_memory_mib) << 20
                                : DefaultRequestMemory();
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
  return out;
}

// Both listeners keep references to the router and the context, which must outlive them.
struct Listeners {
  std::unique_ptr<http::HttpServer> http;
  std::unique_ptr<rpc::GrpcServer> grpc;
};

Result<Listeners> StartListeners(const Addresses& addresses, bool reflection,
                                 const http::Router& router, ServerContext& context) {
  Listeners out;
  http::HttpServerOptions http_options;
  http_options.host = addresses.http.host;
  http_options.port = addresses.http.port;
  http_options.limits = context.settings().http;
  const ConnectionLimits connections = ShareDescriptors(RaiseDescriptorLimit());
  http_options.limits.max_connections =
      std::min(http_options.limits.max_connections, connections.http);
  MOESERVE_ASSIGN_OR_RETURN(
      out.http, http::HttpServer::Start(http_options, router, context.metrics(), context.memory()));
  rpc::GrpcServerOptions grpc_options;
  grpc_options.host = addresses.grpc.host;
  grpc_options.port = addresses.grpc.port;
  grpc_options.max_connections = connections.grpc;
  grpc_options.reflection = reflection;
  MOESERVE_ASSIGN_OR_RETURN(out.grpc, rpc::GrpcServer::Start(grpc_options, context));
  return out;
}

// Starts a thread that takes the server out of service while the engine is stuck.
std::unique_ptr<EngineWatchdog> StartWatchdog(const Listeners& listeners, ServerContext& context,
                                              std::shared_ptr<const EngineApi> engine,
                                              double limit_seconds) {
  if (limit_seconds <= 0.0) return nullptr;
  const auto changed = [&context, grpc = listeners.grpc.get(), limit_seconds](bool stuck) {
    if (stuck) {
      LogError("engine", Concat("a step has been running for more than ",
                                absl::FormatDuration(absl::Seconds(limit_seconds)),
                                " (--engine-watchdog): requests end with code engine_stuck"));
    } else {
      LogInfo("engine", "the step that was stuck has ended: the server is healthy again");
    }
    context.SetEngineStuck(stuck);
    grpc->SetServing(!stuck && context.state() == ServerState::kServing);
    // The drain can have begun since the state was read.
    if (context.state() == ServerState::kDraining) grpc->SetServing(false);
  };
  return std::make_unique<EngineWatchdog>(std::move(engine), absl::Seconds(limit_seconds), changed);
}

// Refuses new requests, waits up to `drain_seconds` for the running requests to end and for their
// clients to read the answers, and stops the listeners. Returns false if the engine does not end
// its step; it must not be destroyed then, because that would wait for the step.
bool ShutDown(const Listeners& listeners, ServerContext& context, EngineApi& engine,
              double drain_seconds) {
  const absl::Time deadline = SteadyNow() + absl::Seconds(drain_seconds);
  context.SetDraining();
  listeners.grpc->SetServing(false);
  listeners.http->BeginDrain();
  // First wait for requests that were accepted but not yet submitted to the engine.
  listeners.http->WaitForHandlers(deadline);
  context.work_pool().WaitUntilIdle(ToSteadyTimePoint(deadline));
  const bool ended = engine.Drain(deadline);
  if (!ended) {
    LogError("serve", "the engine does not end its step: its requests end without it");
    context.EndRequests();
  }
  // Clients may still have to receive what the engine has finished, or the error that ended it.
  const absl::Time readers = std::max(deadline, SteadyNow() + kTimeToRead);
  listeners.http->Stop(readers - SteadyNow());
  listeners.grpc->Stop(std::max(readers - SteadyNow(), absl::Seconds(1)));
  LogInfo("serve", "stopped");
  return ended;
}

absl::Status Serve(const Options& options) {
  MOESERVE_ASSIGN_OR_RETURN(Configuration configuration, Configure(options));
  // Declared in this order because the variables are destroyed in reverse: the listeners first,
  // then the engine, and the backend last.
  RunningModel model;
  ServerContext context(std::move(configuration.settings));
  const std::unique_ptr<http::Router> router = http::MakeRouter(context);
  LogConfiguration(options, configuration.engine, context);
  std::optional<KeyFileWatcher> keys;
  if (!options.api_key_file.empty()) {
    WarnAboutKeys(options.api_key_file, context.settings().keys, context.settings().served_names);
    keys.emplace(options.api_key_file, configuration.key_file, context.settings().served_names,
                 context.keys());
  }
  MOESERVE_ASSIGN_OR_RETURN(
      const Listeners listeners,
      StartListeners(configuration.addresses, options.grpc_reflection == "on", *router, context));

  StopFlag stop;
  const SignalWatcher watcher(
      [&] {
        LogInfo("serve", "stopping; a second signal ends the process at once");
        // Loading a model cannot be interrupted, and no request is running, so the process may
        // exit.
        if (context.state() == ServerState::kLoading) {
          FlushLog(kLogFlushTimeout);
          std::quick_exit(0);
        }
        stop.Set();
      },
      [&] {
        if (keys) keys->RequestReload();
      });

  const absl::Time start = SteadyNow();
  MOESERVE_ASSIGN_OR_RETURN(
      model, StartModel(options.model, configuration.engine, {}, ProgressOutput::kLog));
  MOESERVE_RETURN_IF_ERROR(
      ResolveMoeMetrics(context.settings().moe_metrics, model.engine->ExpertSnapshot()).status());
  const double seconds = absl::ToDoubleSeconds(SteadyNow() - start);
  context.metrics().model_load_seconds = seconds;
  context.SetServing(
      model.engine, model.defaults,
      MakeChatFormat(std::move(model.tokenizer_config), configuration.chat_template));
  listeners.grpc->SetServing(true);
  const Ticker ticker(context, *listeners.grpc);
  const std::unique_ptr<EngineWatchdog> watchdog =
      StartWatchdog(listeners, context, model.engine, options.watchdog_seconds);
  LogInfo("serve", Concat("ready after ", static_cast<int64_t>(std::lround(seconds * 1000)),
                          " ms: ", model.description, ", context ", model.engine->max_model_len(),
                          " tokens"));
  std::printf("http listening on %s\ngrpc listening on %s\n", listeners.http->address().c_str(),
              listeners.grpc->address().c_str());
  std::fflush(stdout);

  stop.Wait();
  if (!ShutDown(listeners, context, *model.engine, options.drain_seconds)) {
    FlushLog(kLogFlushTimeout);
    std::quick_exit(1);
  }
  return absl::OkStatus();
}

// Prints who may use each route and call: "METHOD PATH ACCESS", where ACCESS is "open" or the
// scopes of which a key needs one.
void PrintRoutes(const Options& options) {
  ServerSettings settings;
  settings.served_names = {"model"};
  settings.dashboard = !options.no_dashboard;
  ServerContext context(std::move(settings));
  const auto access = [](ScopeSet scopes) {
    return scopes.empty() ? std::string("open") : scopes.Text("|");
  };
  const std::unique_ptr<http::Router> router = http::MakeRouter(context);
  for (const http::Router::Route& route : router->routes()) {
    std::printf("%s %s %s\n", route.method.c_str(), route.pattern.c_str(),
                access(route.access.scopes()).c_str());
  }
  for (const rpc::Method* method : rpc::kMethods) {
    std::printf("RPC /%s/%s %s\n", std::string(method->service).c_str(),
                std::string(method->name).c_str(), access(method->scopes).c_str());
  }
  for (const char* health : {"Check", "Watch"}) {
    std::printf("RPC /grpc.health.v1.Health/%s open\n", health);
  }
}

int Run(const Options& options) {
  if (options.print_routes) {
    PrintRoutes(options);
    return 0;
  }
  BlockTerminationSignals();
  // Without a key file nothing can be reloaded, and a hangup ends the process as usual.
  if (!options.api_key_file.empty()) BlockHangup();
  IgnoreBrokenPipes();
  SetUpLogging(options.log_format == "json" ? LogFormat::kJson : LogFormat::kText,
               ParseLevel(options.log_level));
  const absl::Status status = Serve(options);
  FlushLog(kLogFlushTimeout);
  return status.ok() ? 0 : Fail(status);
}

// Adds the options about addresses, model names, API keys and the dashboard.
void AddInterfaceOptions(CLI::App& app, Options& options) {
  app.add_option("--http", options.http, "HOST:PORT of HTTP; port 0 picks a free port")
      ->envname("MOESERVE_HTTP")
      ->capture_default_str();
  app.add_option("--grpc", options.grpc, "HOST:PORT of gRPC; port 0 picks a free port")
      ->envname("MOESERVE_GRPC")
      ->capture_default_str();
  app.add_option("--served-model-name", options.served_names,
                 "Name of the model for clients; can be repeated; default: the folder's name");
  app.add_option("--api-key-file", options.api_key_file,
                 "File with one API key per line, or with keys, scopes and limits as JSON; is "
                 "reloaded when it changes and on SIGHUP");
  app.add_flag("--allow-open", options.allow_open,
               "Allow listening beyond loopback without API keys");
  app.add_flag("--print-routes", options.print_routes,
               "Print every route and call with the scopes of which its key needs one, and exit");
  app.add_option("--grpc-reflection", options.grpc_reflection,
                 "Whether clients can ask for the gRPC interface; needs a key if there are keys")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  app.add_flag("--no-dashboard", options.no_dashboard, "Do not serve the dashboard at /");
}

// Adds the options that set what requests may ask for.
void AddRequestOptions(CLI::App& app, Options& options) {
  app.add_option("--min-priority", options.min_priority,
                 "Lowest priority of requests, which is served first; a key in JSON has its own")
      ->check(CLI::Range(-kMaxPriority, kMaxPriority))
      ->capture_default_str();
  app.add_flag("--strict-fields", options.strict_fields, "Refuse requests with unknown fields");
  app.add_option("--max-logprobs", options.max_logprobs,
                 "Most alternatives per token that a request may ask for")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--request-memory", options.request_memory_mib,
                 "MiB that all requests may hold together: bodies, parsed JSON, answers; 0: an "
                 "eighth of the memory, from 128 to 4096")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--chat-template", options.chat_template,
                 "File with a Jinja chat template that replaces the model's");
  app.add_flag("--allow-request-chat-template", options.allow_request_chat_template,
               "Let requests bring chat_template and chat_template_kwargs");
  app.add_flag("--routing-records", options.routing_records,
               "Let requests ask which experts computed their tokens; needs 12 bytes per row and "
               "selected expert of the tokens in the KV cache");
  app.add_flag("--routing-control", options.routing_control.enabled,
               "Let requests change the routing of their own tokens");
  app.add_option("--routing-max-top-k", options.routing_control.max_top_k,
                 "Most experts per row that a request may select; 0: all; implies "
                 "--routing-control")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
}

void AddStatisticsOptions(CLI::App& app, Options& options) {
  app.add_option("--router-stats-interval", options.router_stats_interval,
                 "Samples about 64 router rows per block every N steps; 1: all rows of every step; "
                 "0: none")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  app.add_option("--token-stats-mib", options.token_stats_mib,
                 "Most memory for the table of counts by token and expert; if the table would be "
                 "larger, it is not kept")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--hidden-samples", options.hidden_samples,
                 "Router input rows to keep per block for /v1/experts/collapse and profiles; they "
                 "can reveal users' texts")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--moe-metrics", options.moe_metrics,
                 "Expert series at /metrics: off, layer (per routed block), top (also for its most "
                 "used experts), full (per expert), auto (full up to 4096 experts, else top)")
      ->capture_default_str();
  app.add_flag("--moe-expert-weights", options.moe_expert_weights,
               "With --moe-metrics full: also the sum of gate weights per expert");
  app.add_option("--metrics-compat", options.metrics_compat,
                 "Also export the metrics under the names of vllm or sglang; can be repeated")
      ->delimiter(',');
}

void AddProcessOptions(CLI::App& app, Options& options) {
  app.add_option("--log-format", options.log_format, "Format of the log on standard error")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  app.add_option("--log-level", options.log_level, "Lowest level to log")
      ->check(CLI::IsMember({"info", "warning", "error"}))
      ->capture_default_str();
  app.add_option("--drain-timeout", options.drain_seconds,
                 "Seconds after a signal for running requests to end")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  app.add_option("--engine-watchdog", options.watchdog_seconds,
                 "Seconds after which a step of the engine that has not ended makes the server "
                 "unhealthy and ends its requests; 0: never")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
}

}  // namespace

void AddServeCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand("serve", "Serve a model over HTTP and gRPC");
  auto options = std::make_shared<Options>();
  AddModelOptions(*command, options->model);
  AddEngineOptions(*command, options->engine);
  AddInterfaceOptions(*command, *options);
  AddRequestOptions(*command, *options);
  AddStatisticsOptions(*command, *options);
  AddProcessOptions(*command, *options);
  command->callback([options, &selected] { selected = [options] { return Run(*options); }; });
}

}  // namespace moeserve::server
