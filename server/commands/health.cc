#include <cstdio>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "server/base/text_values.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/http/health_probe.h"

namespace moeserve::server {
namespace {

struct HealthArguments {
  std::string http = "127.0.0.1:8080";
  std::string certificate;
  double timeout_seconds = 5.0;
};

absl::Status Probe(const HealthArguments& options) {
  MOESERVE_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(options.http));
  return ProbeReadiness(address, absl::Seconds(options.timeout_seconds), options.certificate);
}

int RunHealth(const HealthArguments& options) {
  const absl::Status status = Probe(options);
  if (!status.ok()) return Fail(status);
  std::printf("ready\n");
  return 0;
}

}  // namespace

void AddHealthCommand(CLI::App& app, Command& selected) {
  CLI::App* command =
      app.add_subcommand("health", "Check whether a running server is ready; exit status 1 if not");
  auto options = std::make_shared<HealthArguments>();
  // "serve" reads its address from the same environment variable.
  command->add_option("--http", options->http, "HOST:PORT that the server listens on")
      ->envname("MOESERVE_HTTP")
      ->capture_default_str();
  command
      ->add_option("--tls-cert", options->certificate,
                   "With TLS: the server's certificate file, which it must show")
      ->envname("MOESERVE_TLS_CERT");
  AddNumberOption(*command, "--timeout", options->timeout_seconds,
                  "Seconds to wait for the response", 0.001, 3600.0);
  command->callback([options, &selected] { selected = [options] { return RunHealth(*options); }; });
}

}  // namespace moeserve::server
