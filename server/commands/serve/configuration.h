// The configuration of `moeserve serve` that does not depend on the model's files.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "server/base/file_watcher.h"
#include "server/base/text_values.h"
#include "server/commands/serve/options.h"
#include "server/context.h"
#include "server/http/checks/cors.h"
#include "server/http/checks/host_check.h"
#include "server/tls/tls_context.h"
#include "server/tools/call_syntax.h"

namespace moeserve::server {

struct Addresses {
  HostPort http;
  HostPort grpc;
};

// A model of --model.
struct ModelSource {
  std::vector<std::string> names;  // its name, then its aliases
  std::string path;
};

struct Configuration {
  ServerSettings settings;
  EngineOptions engine;
  std::vector<ModelSource> models;  // at least one
  int64_t model_memory = 0;         // bytes; 0: no limit
  Addresses addresses;
  http::HostCheck hosts;
  http::Cors cors;
  std::optional<std::string> chat_template;
  const CallSyntax* call_syntax = nullptr;  // null: as the chat template suggests
  RequestObserverOptions observer;
  std::vector<FileVersion> key_file;  // as it was read
  TlsOptions tls;
};

// Checks the options' values and reads the key file and the chat template. Returns InvalidArgument
// or the error of the file, naming the option.
Result<Configuration> Configure(const ServeOptions& options);

}  // namespace moeserve::server
