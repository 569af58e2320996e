#include "server/commands/serve/option_reader.h"

#include <cstdlib>
#include <utility>

#include "base/error_text.h"
#include "server/base/text_values.h"

namespace moeserve::server {

ServeOptionReader::ServeOptionReader(CLI::App& command) {
  command.add_option("--config", config_file_,
                     "YAML file with options by their long names; the environment and the command "
                     "line override it");
  AddServeOptions(command, options_);
  sources_.emplace(command, std::vector<std::string>{"config", "print-routes"},
                   std::vector<std::string>{"otlp-headers"});
}

absl::Status ServeOptionReader::Read() {
  std::optional<ConfigFile> file;
  if (!config_file_.empty()) {
    auto read = ReadConfigFile(config_file_);
    if (!read.ok()) return Prefixed("--config: ", read.status());
    file = *std::move(read);
  }
  MOESERVE_RETURN_IF_ERROR(sources_->Resolve(file, &std::getenv, options_.print_routes));
  return MergeAddress();
}

absl::Status ServeOptionReader::ReadFileOnly(const std::string& file) {
  MOESERVE_ASSIGN_OR_RETURN(ConfigFile read, ReadConfigFile(file));
  MOESERVE_RETURN_IF_ERROR(sources_->Resolve(
      std::move(read), [](const char*) { return nullptr; }, /*partial=*/true));
  return MergeAddress();
}

absl::Status ServeOptionReader::MergeAddress() {
  const OptionSource http = sources_->SourceOf("http");
  bool replaces[2] = {};  // the host, the port
  for (const bool is_port : {false, true}) {
    const char* const name = is_port ? "port" : "host";
    const OptionSource source = sources_->SourceOf(name);
    if (source.kind == SourceKind::kDefault || source.kind < http.kind) continue;
    if (source.kind == http.kind) {
      return absl::InvalidArgumentError(
          Concat("--http and --", name, ": expected one of them, found both (", http.text,
                 source.text == http.text ? "" : Concat(" and ", source.text), ')'));
    }
    replaces[is_port ? 1 : 0] = true;
  }
  if (!replaces[0] && !replaces[1]) return absl::OkStatus();
  auto address = ParseHostPort(options_.http);
  if (!address.ok()) return Prefixed("--http: ", address.status());
  if (replaces[0]) {
    std::string host = options_.host;
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
      host = host.substr(1, host.size() - 2);
    }
    address->host = host;
  }
  if (replaces[1]) address->port = *options_.port;
  const bool ipv6 = address->host.find(':') != std::string::npos;
  options_.http = Concat(ipv6 ? "[" : "", address->host, ipv6 ? "]:" : ":", address->port);
  if (auto merged = ParseHostPort(options_.http); !merged.ok()) {
    return Prefixed("--host: ", merged.status());
  }
  return absl::OkStatus();
}

}  // namespace moeserve::server
