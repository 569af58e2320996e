#include "server/commands/serve/options.h"

#include <string>
#include <vector>

#include "engine/request.h"
#include "server/commands/checked_options.h"
#include "server/commands/run_with_ranks.h"
#include "server/tools/call_syntax.h"

namespace moeserve::server {
namespace {

std::vector<std::string> ToolCallParsers() {
  std::vector<std::string> names = {"auto"};
  for (const CallSyntax& syntax : CallSyntaxes()) names.emplace_back(syntax.name);
  return names;
}

// Adds the options about addresses, model names, API keys and the dashboard.
void AddInterfaceOptions(CLI::App& app, ServeOptions& options) {
  app.add_option("--http", options.http, "HOST:PORT of HTTP; port 0 picks a free port")
      ->envname("MOESERVE_HTTP")
      ->capture_default_str();
  app.add_option("--host", options.host, "Host of HTTP, in place of that of --http");
  app.add_option("--port", options.port, "Port of HTTP, in place of that of --http")
      ->check(CLI::Range(0, 65535));
  app.add_option("--grpc", options.grpc, "HOST:PORT of gRPC; port 0 picks a free port")
      ->envname("MOESERVE_GRPC")
      ->capture_default_str();
  app.add_option("--api-key-file", options.api_key_file,
                 "File with one API key per line, or with keys, scopes and limits as JSON; is "
                 "reloaded when it changes and on SIGHUP");
  app.add_flag("--allow-open", options.allow_open,
               "Allow listening beyond loopback without API keys and client certificates");
  app.add_option("--tls-cert", options.tls_cert,
                 "TLS on both ports: file with the server's certificate and intermediate ones in "
                 "PEM; the TLS files are read again when they change and on SIGHUP")
      ->envname("MOESERVE_TLS_CERT");
  app.add_option("--tls-key", options.tls_key,
                 "File with the certificate's private key in PEM, not encrypted")
      ->envname("MOESERVE_TLS_KEY");
  app.add_option("--tls-client-ca", options.tls_client_ca,
                 "File with the authorities in PEM of which clients must have a certificate; over "
                 "HTTP, health and metrics need none")
      ->envname("MOESERVE_TLS_CLIENT_CA");
  AddChoiceOption(app, "--tls-min-version", options.tls_min_version, "Lowest version of TLS",
                  {"1.2", "1.3"});
  app.add_option("--allowed-hosts", options.allowed_hosts,
                 "Host name that HTTP requests and web pages may use, without a port; *: every "
                 "name; can be repeated; default: localhost, 127.0.0.1 and [::1] on loopback "
                 "without API keys, else every name")
      ->delimiter(',');
  app.add_option("--cors-origin", options.cors_origins,
                 "Origin of web pages that may use the server (CORS), such as https://example.org; "
                 "*: every page, within what --allowed-hosts and keys allow; can be repeated")
      ->delimiter(',');
  app.add_option("--max-connections-per-address", options.max_connections_per_address,
                 "Most connections to each port from one client address (of IPv6: /64); 0: no "
                 "limit; default: a quarter of what the port takes, without limit for loopback")
      ->check(CLI::Range(0, 65536));
  app.add_flag("--print-routes", options.print_routes,
               "Print every route and call with the scopes of which its key needs one, and exit");
  AddChoiceOption(app, "--grpc-reflection", options.grpc_reflection,
                  "Whether clients can ask for the gRPC interface; needs a key if there are keys",
                  {"on", "off"});
  app.add_flag("--no-dashboard", options.no_dashboard, "Do not serve the dashboard at /");
}

// Adds the options about the models that are served.
void AddServedModels(CLI::App& app, ServeOptions& options) {
  app.add_option("-m,--model,MODEL", options.models,
                 "Checkpoint folder, also of Hugging Face's cache, or file (.gguf, "
                 "model.safetensors); NAME=PATH names the model; can be repeated")
      ->required();
  app.add_option("--served-model-name", options.served_names,
                 "Name of the only model for clients; can be repeated; default: the folder's name");
  app.add_flag("--model-control", options.model_control,
               "Let clients load, replace and unload models; needs a key with the scope admin if "
               "there are keys");
  app.add_option("--models-folder", options.models_folder,
                 "Folder of further checkpoints that clients may load; implies --model-control");
  app.add_option("--model-memory", options.model_memory,
                 "Most memory for the weights and KV caches of all models, such as 24GiB; a model "
                 "that is replaced needs it twice; default: no limit");
}

// Adds the options that set what requests may ask for.
void AddRequestOptions(CLI::App& app, ServeOptions& options) {
  AddNumberOption(app, "--min-priority", options.min_priority,
                  "Lowest priority of requests, which is served first; a key in JSON has its own",
                  -kMaxPriority, kMaxPriority);
  app.add_flag("--strict-fields", options.strict_fields, "Refuse requests with unknown fields");
  AddNumberOption(app, "--max-logprobs", options.max_logprobs,
                  "Most alternatives per token that a request may ask for", 0, 1 << 20);
  AddNumberOption(app, "--request-timeout", options.request_seconds,
                  "Seconds after which an answer is cut, with finish_reason length; 0: never", 0.0,
                  1e9);
  AddNumberOption(app, "--request-memory", options.request_memory_mib,
                  "MiB that all requests may hold together: bodies, parsed JSON, answers; 0: an "
                  "eighth of the memory, from 128 to 4096",
                  int64_t{0}, int64_t{1} << 20);
  app.add_option("--chat-template", options.chat_template,
                 "File with a Jinja chat template that replaces the model's");
  AddChoiceOption(app, "--tool-call-parser", options.tool_call_parser,
                  "How the model writes calls of tools; auto: as its chat template suggests",
                  ToolCallParsers());
  app.add_flag("--allow-request-chat-template", options.allow_request_chat_template,
               "Let requests bring a chat_template of their own");
  app.add_flag("--hide-chat-template", options.hide_chat_template,
               "Leave the chat template out of what /tokenizer_info answers");
  app.add_flag("--routing-records", options.routing_records,
               "Let requests ask which experts computed their tokens; needs 12 bytes per row and "
               "selected expert of the tokens in the KV cache");
  app.add_flag("--routing-control", options.routing_control.enabled,
               "Let requests change the routing of their own tokens");
  AddNumberOption(app, "--routing-max-top-k", options.routing_control.max_top_k,
                  "Most experts per row that a request may select; 0: all; implies "
                  "--routing-control",
                  0, 65536);
}

void AddStatisticsOptions(CLI::App& app, ServeOptions& options) {
  AddNumberOption(
      app, "--router-stats-interval", options.router_stats_interval,
      "Samples about 64 router rows per block every N steps; 1: all rows of every step; "
      "0: none",
      0, 1 << 30);
  AddNumberOption(app, "--token-stats-mib", options.token_stats_mib,
                  "Most memory for the table of counts by token and expert; if the table would be "
                  "larger, only the tokens that occur most often are counted",
                  0, 1 << 20);
  AddNumberOption(app, "--hidden-samples", options.hidden_samples,
                  "Router input rows to keep per block for /v1/experts/collapse and profiles; they "
                  "can reveal users' texts",
                  int64_t{0}, int64_t{1} << 20);
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

// Adds the options about the log and OpenTelemetry.
void AddObservationOptions(CLI::App& app, ServeOptions& options) {
  AddChoiceOption(app, "--log-format", options.log_format, "Format of the log on standard error",
                  {"text", "json"});
  AddChoiceOption(app, "--log-level", options.log_level, "Lowest level to log",
                  {"info", "warning", "error"});
  AddChoiceOption(app, "--access-log", options.access_log,
                  "Log a line for each request (level info): off, on (without health checks and "
                  "/metrics that succeed), all",
                  {"off", "on", "all"});
  app.add_option(
         "--otlp-endpoint", options.otlp_endpoint,
         "http://HOST:PORT of an OpenTelemetry collector that gets a span for each request, "
         "by OTLP over HTTP in JSON; default: no spans")
      ->envname("MOESERVE_OTLP_ENDPOINT");
  app.add_option("--otlp-headers", options.otlp_headers,
                 "Headers for the collector, NAME=VALUE,NAME=VALUE; better in the environment if "
                 "they are secret")
      ->envname("MOESERVE_OTLP_HEADERS");
  app.add_option("--otlp-service-name", options.otlp_service_name, "Name of the service in spans")
      ->capture_default_str();
  AddNumberOption(
      app, "--trace-sample-ratio", options.trace_sample_ratio,
      "Part of the requests without a traceparent of which spans are exported; with one, "
      "its flag decides",
      0.0, 1.0);
}

void AddProcessOptions(CLI::App& app, ServeOptions& options) {
  AddNumberOption(app, "--drain-timeout", options.drain_seconds,
                  "Seconds after a signal for running requests to end", 0.0, 3600.0);
  AddNumberOption(app, "--engine-watchdog", options.watchdog_seconds,
                  "Seconds after which a step of the engine that has not ended makes the server "
                  "unhealthy and ends its requests; 0: never",
                  0.0, 86400.0);
}

}  // namespace

void AddServeOptions(CLI::App& command, ServeOptions& options) {
  AddServedModels(command, options);
  options.model.packed_cache = "auto";
  AddComputeOptions(command, options.model);
  AddRankOptions(command, options.model.ranks);
  AddDraftModel(command, options.model);
  AddPoolingOption(command, options.model);
  AddEngineOptions(command, options.engine);
  AddInterfaceOptions(command, options);
  AddRequestOptions(command, options);
  AddStatisticsOptions(command, options);
  AddObservationOptions(command, options);
  AddProcessOptions(command, options);
}

}  // namespace moeserve::server
