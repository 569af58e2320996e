#include "server/commands/serve/configuration.h"

#include <climits>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "base/error_text.h"
#include "engine/text/chat/chat_template.h"
#include "model_loaders/files/mapped_file.h"
#include "server/base/commit.h"
#include "server/base/version.h"
#include "server/keys/key_file.h"

namespace moeserve::server {
namespace {

// Returns the default name of a served model: the last component of the checkpoint's path.
std::string DefaultName(const std::string& directory) {
  std::error_code ignored;
  const std::filesystem::path path =
      std::filesystem::absolute(directory, ignored).lexically_normal();
  const std::string name =
      path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
  return name.empty() ? "model" : name;
}

// Splits "NAME=PATH". A text without '=', or that starts like a path ('.' or '/'), is only a path.
ModelSource ParseModelSource(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0 || text.front() == '.' || text.front() == '/') {
    return {.names = {DefaultName(text)}, .path = text};
  }
  return {.names = {text.substr(0, equals)}, .path = text.substr(equals + 1)};
}

Result<std::vector<ModelSource>> ResolveModels(const ServeOptions& options) {
  std::vector<ModelSource> models;
  if (options.models.empty()) return absl::InvalidArgumentError("--model: expected a model");
  for (const std::string& text : options.models) models.push_back(ParseModelSource(text));
  if (!options.served_names.empty()) {
    if (models.size() > 1) {
      return absl::InvalidArgumentError(Concat("--served-model-name: expected one --model, found ",
                                               models.size(),
                                               ": give the names with --model NAME=PATH"));
    }
    models.front().names = options.served_names;
  }
  std::set<std::string> names;
  for (const ModelSource& model : models) {
    for (const std::string& name : model.names) {
      if (names.insert(name).second) continue;
      return absl::InvalidArgumentError(
          Concat("--model: the name ", Quoted(name, 64), " is given twice: use --model NAME=PATH"));
    }
  }
  return models;
}

Result<HostPort> ParseAddress(std::string_view option, const std::string& text) {
  auto address = ParseHostPort(text);
  if (!address.ok()) return Prefixed(Concat(option, ": "), address.status());
  return address;
}

Result<Addresses> ResolveAddresses(const ServeOptions& options, bool guarded) {
  Addresses out;
  MOESERVE_ASSIGN_OR_RETURN(out.http, ParseAddress("--http", options.http));
  MOESERVE_ASSIGN_OR_RETURN(out.grpc, ParseAddress("--grpc", options.grpc));
  if (out.http.port != 0 && out.http.port == out.grpc.port && out.http.host == out.grpc.host) {
    return absl::InvalidArgumentError(
        Concat("--http and --grpc: expected two addresses, found ", options.http, " for both"));
  }
  if (!guarded && !options.allow_open) {
    for (const HostPort* address : {&out.http, &out.grpc}) {
      if (address->IsLoopback()) continue;
      return absl::InvalidArgumentError(Concat(
          "listening on ", address->host,
          " without API keys would open the server to "
          "everybody who can reach it: give --api-key-file or --tls-client-ca, or --allow-open to "
          "accept that"));
    }
  }
  return out;
}

Result<TlsOptions> ResolveTls(const ServeOptions& options) {
  TlsOptions out;
  out.certificate = options.tls_cert;
  out.key = options.tls_key;
  out.client_ca = options.tls_client_ca;
  out.only_1_3 = options.tls_min_version == "1.3";
  if (out.certificate.empty() != out.key.empty()) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key must be given together");
  }
  if (!out.client_ca.empty() && !out.enabled()) {
    return absl::InvalidArgumentError("--tls-client-ca needs --tls-cert and --tls-key");
  }
  return out;
}

// Without keys, a server on loopback trusts everybody who reaches it. A web page must not.
Result<http::HostCheck> ResolveHosts(const ServeOptions& options, const HostPort& address,
                                     bool guarded) {
  std::vector<std::string> hosts = options.allowed_hosts;
  if (hosts.empty() && address.IsLoopback() && !guarded) {
    hosts = {"localhost", "127.0.0.1", "[::1]", address.host};
  }
  auto check = http::HostCheck::Parse(hosts);
  if (!check.ok()) return Prefixed("--allowed-hosts: ", check.status());
  return check;
}

Result<http::Cors> ResolveCors(const ServeOptions& options) {
  auto cors = http::Cors::Parse(options.cors_origins);
  if (!cors.ok()) return Prefixed("--cors-origin: ", cors.status());
  return cors;
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

EngineOptions WithServeOptions(EngineOptions engine, const ServeOptions& options) {
  engine.routing_records = options.routing_records;
  engine.routing_control = options.routing_control;
  if (engine.routing_control.max_top_k > 0) engine.routing_control.enabled = true;
  engine.recorder.router_stats_interval = options.router_stats_interval;
  engine.recorder.token_counts_bytes = int64_t{options.token_stats_mib} << 20;
  engine.recorder.hidden_samples = options.hidden_samples;
  return engine;
}

Result<RequestObserverOptions> ObserverOptions(const ServeOptions& options) {
  RequestObserverOptions out;
  out.access_log = options.access_log == "off"   ? AccessLog::kOff
                   : options.access_log == "all" ? AccessLog::kAll
                                                 : AccessLog::kOn;
  out.sample_ratio = options.trace_sample_ratio;
  out.resource.service_name = options.otlp_service_name;
  out.resource.service_version = std::string(kVersion);
  out.resource.instance_id = RandomHex(32);
  auto headers = ParseOtlpHeaders(options.otlp_headers);
  if (!headers.ok()) return Prefixed("--otlp-headers: ", headers.status());
  if (options.otlp_endpoint.empty()) return out;
  auto endpoint = ParseOtlpEndpoint(options.otlp_endpoint);
  if (!endpoint.ok()) return Prefixed("--otlp-endpoint: ", endpoint.status());
  out.exporter.emplace();
  out.exporter->endpoint = *std::move(endpoint);
  out.exporter->headers = *std::move(headers);
  return out;
}

}  // namespace

Result<Configuration> Configure(const ServeOptions& options) {
  Configuration out;
  MOESERVE_ASSIGN_OR_RETURN(out.chat_template, ReadChatTemplate(options.chat_template));
  out.call_syntax = FindCallSyntax(options.tool_call_parser);
  ServerSettings& settings = out.settings;
  if (!options.api_key_file.empty()) {
    out.key_file = LookAtFiles({options.api_key_file});
    auto keys = ReadKeyFile(options.api_key_file);
    if (!keys.ok()) return Prefixed("--api-key-file: ", keys.status());
    settings.keys = *std::move(keys);
  }
  MOESERVE_ASSIGN_OR_RETURN(out.tls, ResolveTls(options));
  const bool guarded = !settings.keys.empty() || !out.tls.client_ca.empty();
  MOESERVE_ASSIGN_OR_RETURN(out.addresses, ResolveAddresses(options, guarded));
  MOESERVE_ASSIGN_OR_RETURN(out.hosts, ResolveHosts(options, out.addresses.http, guarded));
  MOESERVE_ASSIGN_OR_RETURN(out.cors, ResolveCors(options));
  settings.cors_origins = out.cors.origins();
  MOESERVE_ASSIGN_OR_RETURN(EngineOptions engine, ResolveEngineOptions(options.engine));
  out.engine = WithServeOptions(std::move(engine), options);
  MOESERVE_ASSIGN_OR_RETURN(out.models, ResolveModels(options));
  if (options.model.ranks.transport != "off" &&
      (out.models.size() > 1 || options.model_control || !options.models_folder.empty())) {
    return absl::InvalidArgumentError(
        "--ranks: expected one --model without --model-control and --models-folder, found more: "
        "several processes compute one model");
  }
  settings.served_names = out.models.front().names;
  if (!options.models_folder.empty()) {
    std::error_code error;
    if (!std::filesystem::is_directory(options.models_folder, error)) {
      const bool exists = std::filesystem::exists(options.models_folder, error);
      return absl::InvalidArgumentError(
          Concat("--models-folder: ", Printable(options.models_folder, PATH_MAX),
                 ": expected a folder of models, found ", exists ? "a file" : "nothing"));
    }
  }
  if (!options.model_memory.empty()) {
    auto bytes = ParseBytes(options.model_memory);
    if (!bytes.ok()) return Prefixed("--model-memory: ", bytes.status());
    out.model_memory = *bytes;
  }
  settings.device = options.model.device;
  settings.commit = Commit();
  settings.min_priority = options.min_priority;
  settings.strict_fields = options.strict_fields;
  settings.dashboard = !options.no_dashboard;
  settings.limits.max_logprobs = options.max_logprobs;
  settings.limits.max_request_time = options.request_seconds > 0
                                         ? absl::Seconds(options.request_seconds)
                                         : absl::InfiniteDuration();
  settings.request_memory = options.request_memory_mib > 0
                                ? static_cast<size_t>(options.request_memory_mib) << 20
                                : DefaultRequestMemory();
  settings.allow_request_chat_template = options.allow_request_chat_template;
  settings.show_chat_template = !options.hide_chat_template;
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
  MOESERVE_ASSIGN_OR_RETURN(out.observer, ObserverOptions(options));
  return out;
}

}  // namespace moeserve::server
