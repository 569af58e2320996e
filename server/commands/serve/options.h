// The options of `moeserve serve` as they are given on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/commands/model_options.h"

namespace moeserve::server {

struct ServeOptions {
  ModelOptionsText model;
  EngineOptionsText engine;
  std::string http = "127.0.0.1:8080";
  std::string host;         // replaces the host of `http` unless empty
  std::optional<int> port;  // replaces the port of `http`
  std::string grpc = "127.0.0.1:8081";
  std::vector<std::string> models;  // "DIR" or "NAME=DIR"
  std::vector<std::string> served_names;
  std::string models_folder;
  bool model_control = false;
  std::string model_memory;  // text of the option; empty: no limit
  std::string api_key_file;
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string tls_min_version = "1.2";
  int min_priority = 0;
  bool print_routes = false;
  std::string grpc_reflection = "on";
  std::string log_format = "text";
  std::string log_level = "info";
  std::string access_log = "on";
  std::string otlp_endpoint;  // URL; empty: no spans
  std::string otlp_headers;   // "NAME=VALUE,NAME=VALUE"; secret
  std::string otlp_service_name = "moeserve";
  double trace_sample_ratio = 1.0;
  double drain_seconds = 30.0;
  double watchdog_seconds = 60.0;  // 0: no watchdog
  double request_seconds = 600.0;  // 0: no limit
  int64_t request_memory_mib = 0;  // 0: DefaultRequestMemory()
  int max_logprobs = 20;
  int router_stats_interval = RecorderOptions().router_stats_interval;
  int token_stats_mib = 64;
  int64_t hidden_samples = 0;
  std::string chat_template;  // path of a file
  std::string tool_call_parser = "auto";
  bool allow_request_chat_template = false;
  bool hide_chat_template = false;
  bool routing_records = false;
  RoutingControlLimits routing_control;
  bool strict_fields = false;
  bool no_dashboard = false;
  bool allow_open = false;
  std::optional<int> max_connections_per_address;  // 0: no limit
  std::vector<std::string> allowed_hosts;          // empty: depends on the address and the keys
  std::vector<std::string> cors_origins;           // empty: no CORS
  std::string moe_metrics = "auto";
  bool moe_expert_weights = false;
  std::vector<std::string> metrics_compat;
};

// Adds all options of `serve` to `command`. `options` must outlive `command`.
void AddServeOptions(CLI::App& command, ServeOptions& options);

}  // namespace moeserve::server
