#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "base/mutex.h"
#include "base/steady_clock.h"
#include "server/base/stop_wait.h"
#include "server/base/version.h"
#include "server/chat/chat_format.h"
#include "server/commands/commands.h"
#include "server/commands/ranks/rank_session.h"
#include "server/commands/run_with_ranks.h"
#include "server/commands/serve/configuration.h"
#include "server/commands/serve/option_reader.h"
#include "server/commands/serve/options.h"
#include "server/commands/start_model.h"
#include "server/context.h"
#include "server/generation/engine_watchdog.h"
#include "server/http/routes/api.h"
#include "server/http/server.h"
#include "server/keys/key_file_watcher.h"
#include "server/logging/logging.h"
#include "server/process/address_space.h"
#include "server/process/allocator_trim.h"
#include "server/process/connection_limits.h"
#include "server/process/signals.h"
#include "server/rpc/grpc_log.h"
#include "server/rpc/methods.h"
#include "server/rpc/server.h"
#include "server/tls/tls_store.h"

namespace moeserve::server {
namespace {

// A reader of the log that has stopped reading delays the end of the process by so much.
constexpr std::chrono::seconds kLogFlushTimeout{1};

// A collector that does not answer delays the end of the process by so much.
constexpr std::chrono::seconds kSpanFlushTimeout{2};

// A server that stops gives its clients at least so long to read their answers, even if the time of
// --drain-timeout has passed.
constexpr absl::Duration kTimeToRead = absl::Seconds(5);

// The exit status that the command line parser's errors have, too.
constexpr int kServeUsageError = 2;

LogLevel ParseLevel(const std::string& text) {
  if (text == "warning") return LogLevel::kWarning;
  if (text == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

// Until destroyed, calls ServerContext::Tick and `also` once a second, and lets gRPC's health
// service report an engine that cannot serve any more.
class Ticker {
 public:
  Ticker(ServerContext& context, rpc::GrpcServer& grpc, std::function<void()> also)
      : thread_([this, &context, &grpc, also = std::move(also)](std::stop_token stop) {
          do {
            try {
              context.Tick();
              if (!context.EngineStatus().ok()) grpc.SetServing(false);
              also();
            } catch (const std::bad_alloc&) {
              // The next second may have memory.
            }
          } while (WaitUnlessStopped(stop, std::chrono::seconds(1)));
        }) {}

 private:
  std::jthread thread_;
};

// The first signal sets this flag; the main thread waits for it.
class StopFlag {
 public:
  void Set() {
    {
      MutexLock lock(mutex_);
      set_ = true;
    }
    changed_.notify_all();
  }
  void Wait() {
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return set_; });
  }

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  bool set_ ABSL_GUARDED_BY(mutex_) = false;
};

// Until destroyed, calls `lost` when a rank is lost. `ranks` may be null.
class LossWatch {
 public:
  LossWatch(RankSession* ranks, std::function<void()> lost) : ranks_(ranks) {
    if (ranks_ != nullptr) ranks_->OnLoss(std::move(lost));
  }
  ~LossWatch() {
    if (ranks_ != nullptr) ranks_->OnLoss({});
  }
  LossWatch(const LossWatch&) = delete;
  LossWatch& operator=(const LossWatch&) = delete;

 private:
  RankSession* const ranks_;
};

void LogConfiguration(const ServeOptions& options, const EngineOptions& engine,
                      const ServerContext& context) {
  std::string names;
  for (const std::string& name : context.models().Names()) {
    names += names.empty() ? name : Concat(',', name);
  }
  std::string models;
  for (const std::string& model : options.models) {
    models += models.empty() ? model : Concat(',', model);
  }
  LogInfo("serve",
          Concat("moeserve ", kVersion, " model=", models, " names=", names,
                 " device=", options.model.device, " dtype=", options.model.dtype, " threads=",
                 options.model.threads, " cpu_isa=", options.model.cpu_isa, " http=", options.http,
                 " grpc=", options.grpc, " max_model_len=", engine.max_model_len,
                 " max_num_seqs=", engine.max_num_seqs, " max_step_tokens=", engine.max_step_tokens,
                 " kv_cache_bytes=", engine.kv_cache_bytes,
                 " api_keys=", context.settings().keys.empty() ? "no" : "yes",
                 " strict_fields=", options.strict_fields ? "yes" : "no"));
}

std::shared_ptr<const ChatFormat> MakeChatFormat(const TokenizerConfig& config,
                                                 const CallSyntax* call_syntax) {
  auto format = std::make_shared<const ChatFormat>(config, call_syntax);
  const absl::Status& status = format->status();
  if (absl::IsNotFound(status)) {
    LogInfo("serve", "the model has no chat template: chats will be refused");
  } else if (!status.ok()) {
    LogWarning("serve", Concat("the model's chat template cannot be used, chats will be refused: ",
                               Printable(std::string(status.message()), 300)));
  }
  return format;
}

// Both listeners keep references to the router and the context, which must outlive them.
struct Listeners {
  std::unique_ptr<http::HttpServer> http;
  std::unique_ptr<rpc::GrpcServer> grpc;
};

// By default, one client address can take a quarter of the connections of a port. A proxy on this
// machine may take them all.
AddressLimit PerAddress(const ServeOptions& options, int max_connections) {
  if (options.max_connections_per_address) return {*options.max_connections_per_address, true};
  return {std::max(max_connections / 4, 1), false};
}

Result<Listeners> StartListeners(const ServeOptions& options, const Configuration& configuration,
                                 const http::Router& router, ServerContext& context) {
  const Addresses& addresses = configuration.addresses;
  Listeners out;
  http::HttpServerOptions http_options;
  http_options.host = addresses.http.host;
  http_options.port = addresses.http.port;
  http_options.limits = context.settings().http;
  http_options.observer = context.settings().observer;
  http_options.hosts = configuration.hosts;
  http_options.cors = configuration.cors;
  http_options.tls = context.settings().tls.get();
  ConnectionLimits connections = ShareDescriptors(RaiseDescriptorLimit());
  if (http_options.tls != nullptr) {
    connections =
        LimitMemory(connections, kTlsConnectionBytes, context.settings().request_memory / 4);
  }
  http_options.limits.max_connections =
      std::min(http_options.limits.max_connections, connections.http);
  http_options.address_limit = PerAddress(options, http_options.limits.max_connections);
  auto http = http::HttpServer::Start(http_options, router, context.metrics(), context.memory());
  if (!http.ok()) return Prefixed("--http: ", http.status());
  out.http = *std::move(http);
  rpc::GrpcServerOptions grpc_options;
  grpc_options.host = addresses.grpc.host;
  grpc_options.port = addresses.grpc.port;
  grpc_options.max_connections = connections.grpc;
  grpc_options.address_limit = PerAddress(options, connections.grpc);
  grpc_options.tls = context.settings().tls.get();
  grpc_options.reflection = options.grpc_reflection == "on";
  auto grpc = rpc::GrpcServer::Start(grpc_options, context);
  if (!grpc.ok()) return Prefixed("--grpc: ", grpc.status());
  out.grpc = *std::move(grpc);
  return out;
}

// Lets gRPC's health service report whether the server takes requests for all its models.
void ReportHealth(const ServerContext& context, rpc::GrpcServer& grpc) {
  grpc.SetServing(context.state() == ServerState::kServing && context.EngineStatus().ok());
  // The drain can have begun since the state was read.
  if (context.state() == ServerState::kDraining) grpc.SetServing(false);
}

// Starts a thread that takes the server out of service while the model's engine is stuck.
void StartWatchdog(ServedModel& model, rpc::GrpcServer& grpc, ServerContext& context,
                   double limit_seconds) {
  if (limit_seconds <= 0.0) return;
  const auto changed = [&context, &grpc, limit_seconds, name = model.name()](bool stuck) {
    if (stuck) {
      LogError("engine", Concat("a step of ", name, " has been running for more than ",
                                absl::FormatDuration(absl::Seconds(limit_seconds)),
                                " (--engine-watchdog): requests end with code engine_stuck"));
    } else {
      LogInfo("engine", Concat("the step of ", name, " that was stuck has ended"));
    }
    ReportHealth(context, grpc);
  };
  model.StartWatchdog(absl::Seconds(limit_seconds), changed);
}

// Loads the checkpoint at `path` with the options of the command line.
Result<LoadedModel> LoadModel(const ServeOptions& options, const Configuration& configuration,
                              const std::string& path, int64_t max_bytes) {
  ModelOptionsText text = options.model;
  text.directory = path;
  const absl::Time start = SteadyNow();
  MOESERVE_ASSIGN_OR_RETURN(RunningModel running, StartModel(text, configuration.engine, {},
                                                             ProgressOutput::kLog, max_bytes));
  LoadedModel out;
  out.tokenizer_config = std::move(running.tokenizer_config);
  if (configuration.chat_template) out.tokenizer_config.chat_template = configuration.chat_template;
  out.chat = MakeChatFormat(out.tokenizer_config, configuration.call_syntax);
  out.engine = std::move(running.engine);
  out.defaults = running.defaults;
  out.text_settings = std::move(running.text_settings);
  out.description = std::move(running.description);
  out.resources = std::move(running.backend);
  out.load_seconds = absl::ToDoubleSeconds(SteadyNow() - start);
  return out;
}

std::unique_ptr<ModelManager> MakeModelManager(const ServeOptions& options,
                                               const Configuration& configuration,
                                               ServerContext& context, rpc::GrpcServer& grpc) {
  ModelManagerOptions manager;
  manager.load = [&options, &configuration](const std::string& path, int64_t max_bytes) {
    return LoadModel(options, configuration, path, max_bytes);
  };
  manager.folder = options.models_folder;
  manager.memory = configuration.model_memory;
  manager.metrics = context.settings().moe_metrics;
  manager.constraint_cache_bytes = context.settings().constraint_cache_bytes();
  manager.started = [&options, &context, &grpc](ServedModel& model) {
    StartWatchdog(model, grpc, context, options.watchdog_seconds);
  };
  manager.changed = [&context, &grpc] { ReportHealth(context, grpc); };
  return std::make_unique<ModelManager>(context.models(), std::move(manager));
}

// Refuses new requests, waits up to `drain_seconds` for the running requests to end and for their
// clients to read the answers, and stops the listeners. Returns false if an engine does not end its
// step; it must not be destroyed then, because that would wait for the step.
bool ShutDown(const Listeners& listeners, ServerContext& context, double drain_seconds) {
  const absl::Time deadline = SteadyNow() + absl::Seconds(drain_seconds);
  context.SetDraining();
  context.SetModelManager(nullptr);
  listeners.grpc->SetServing(false);
  listeners.http->BeginDrain();
  // First wait for requests that were accepted but not yet submitted to the engine.
  listeners.http->WaitForHandlers(deadline);
  context.work_pool().WaitUntilIdle(ToSteadyTimePoint(deadline));
  bool ended = true;
  for (const auto& model : context.models().InMemory()) {
    ended = model->engine().Drain(deadline) && ended;
  }
  if (!ended) {
    LogError("serve", "the engine does not end its step: its requests end without it");
    context.EndRequests();
  }
  // Clients may still have to receive what the engine has finished, or the error that ended it.
  const absl::Time readers = std::max(deadline, SteadyNow() + kTimeToRead);
  listeners.http->Stop(readers - SteadyNow());
  listeners.grpc->Stop(std::max(readers - SteadyNow(), absl::Seconds(1)));
  context.settings().observer->Flush(kSpanFlushTimeout);
  LogInfo("serve", "stopped");
  return ended;
}

absl::Status Serve(const ServeOptions& options, Configuration configuration) {
  // Declared in this order because the variables are destroyed in reverse: the models last.
  if (configuration.tls.enabled()) {
    MOESERVE_ASSIGN_OR_RETURN(configuration.settings.tls, TlsStore::Start(configuration.tls));
  }
  if (RankSession* const ranks = options.model.session; ranks != nullptr) {
    configuration.settings.ranks = [ranks] { return ranks->Ranks(); };
  }
  configuration.settings.observer = std::make_shared<RequestObserver>(configuration.observer);
  ServerContext context(std::move(configuration.settings));
  for (const ModelSource& model : configuration.models) {
    if (&model == &configuration.models.front()) continue;  // the context has declared it
    MOESERVE_RETURN_IF_ERROR(context.models().Declare(model.names, model.path));
  }
  const std::unique_ptr<http::Router> router = http::MakeRouter(context);
  LogConfiguration(options, configuration.engine, context);
  std::unique_ptr<FileWatcher> keys;
  if (!options.api_key_file.empty()) {
    WarnAboutKeys(options.api_key_file, context.settings().keys, context.models().Names());
    keys = WatchKeyFile(options.api_key_file, configuration.key_file, context.models().Names(),
                        context.keys());
  }
  MOESERVE_ASSIGN_OR_RETURN(const Listeners listeners,
                            StartListeners(options, configuration, *router, context));

  StopFlag stop;
  const auto stop_serving = [&] {
    // Loading a model cannot be interrupted, and no request is running, so the process may exit.
    if (context.state() == ServerState::kLoading) {
      FlushLog(kLogFlushTimeout);
      std::quick_exit(0);
    }
    stop.Set();
  };
  const bool on_terminal = isatty(STDIN_FILENO) == 1;  // no longer, once it was closed
  const SignalWatcher watcher(
      [&](int) {
        LogInfo("serve", "stopping; a second signal ends the process at once");
        stop_serving();
      },
      [&] {
        if (keys != nullptr) keys->RequestReload();
        if (context.settings().tls != nullptr) context.settings().tls->RequestReload();
        if (keys != nullptr || context.settings().tls != nullptr) return;
        if (!on_terminal) {
          LogInfo("serve", "SIGHUP: there is nothing to reload, neither keys nor certificates");
          return;
        }
        LogInfo("serve", "stopping, because the terminal was closed");
        stop_serving();
      });

  const std::unique_ptr<ModelManager> manager =
      MakeModelManager(options, configuration, context, *listeners.grpc);
  const absl::Time start = SteadyNow();
  for (const ModelSource& model : configuration.models) {
    const absl::Status loaded = manager->LoadNow(model.names.front(), model.path).status();
    // With several models, the error may not say which one it is about.
    if (!loaded.ok() && configuration.models.size() > 1) {
      return Prefixed(Concat("--model ", Printable(model.path, PATH_MAX), ": "), loaded);
    }
    MOESERVE_RETURN_IF_ERROR(loaded);
  }
  if (options.model_control || !options.models_folder.empty()) {
    context.SetModelManager(manager.get());
  }
  context.SetServing();
  listeners.grpc->SetServing(true);
  RankSession* const ranks = options.model.session;
  // The service ends with a rank. mpirun ends this process soon, so nothing waits for that.
  const LossWatch losses(ranks, [&stop] { stop.Set(); });
  const Ticker ticker(context, *listeners.grpc, [&stop, ranks] {
    if (ranks != nullptr && !ranks->status().ok()) stop.Set();
  });
  LogInfo("serve", Concat("ready after ", absl::ToInt64Milliseconds(SteadyNow() - start), " ms"));
  std::printf("http listening on %s\ngrpc listening on %s\n", listeners.http->address().c_str(),
              listeners.grpc->address().c_str());
  std::fflush(stdout);

  stop.Wait();
  if (ranks != nullptr) ranks->StopMoves();
  const bool lost = ranks != nullptr && !ranks->status().ok();
  if (lost) LogError("serve", std::string(ranks->status().message()));
  if (!ShutDown(listeners, context, lost ? 0.0 : options.drain_seconds)) {
    FlushLog(kLogFlushTimeout);
    std::quick_exit(1);
  }
  // Loading a model cannot be interrupted, and no request is running.
  for (const ModelStatus& model : context.models().List()) {
    if (!model.loading) continue;
    FlushLog(kLogFlushTimeout);
    std::quick_exit(0);
  }
  return absl::OkStatus();
}

// Prints who may use each route and call: "METHOD PATH ACCESS", where ACCESS is "open" or the
// scopes of which a key needs one.
void PrintRoutes(const ServeOptions& options) {
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

int RunServe(ServeOptionReader& reader) {
  if (const absl::Status status = reader.Read(); !status.ok()) {
    Fail(status);
    return kServeUsageError;
  }
  const ServeOptions& options = reader.options();
  if (options.print_routes) {
    PrintRoutes(options);
    return 0;
  }
  BlockTerminationSignals();
  BlockHangup();
  if (options.model.ranks.transport != "off") BlockDrainSignal();
  IgnoreBrokenPipes();
  LimitKeptMemory();
  SetUpLogging(options.log_format == "json" ? LogFormat::kJson : LogFormat::kText,
               ParseLevel(options.log_level));
  if (const absl::Status room = CheckAddressSpace(options.model.threads); !room.ok()) {
    return Fail(room);
  }
  rpc::RouteGrpcLog();
  auto configuration = Configure(options);
  if (!configuration.ok()) {
    FlushLog(kLogFlushTimeout);
    return Fail(reader.sources().WithSource(configuration.status()));
  }
  ServeOptions ranked = options;
  ranked.model.directory = configuration->models.front().path;  // what followers load
  return RunWithRanks(ranked.model, [&] {
    const absl::Status status = Serve(ranked, *std::move(configuration));
    FlushLog(kLogFlushTimeout);
    return StatusToExit(status);
  });
}

}  // namespace

void AddServeCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand("serve", "Serve a model over HTTP and gRPC");
  auto reader = std::make_shared<ServeOptionReader>(*command);
  command->callback([reader, &selected] { selected = [reader] { return RunServe(*reader); }; });
}

}  // namespace moeserve::server
