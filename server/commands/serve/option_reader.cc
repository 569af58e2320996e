#include "server/commands/serve/option_reader.h"

#include <cstdlib>
#include <utility>

#include "base/message.h"

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
  return sources_->Resolve(file, &std::getenv, options_.print_routes);
}

absl::Status ServeOptionReader::ReadFileOnly(const std::string& file) {
  MOESERVE_ASSIGN_OR_RETURN(ConfigFile read, ReadConfigFile(file));
  return sources_->Resolve(
      std::move(read), [](const char*) { return nullptr; }, /*partial=*/true);
}

}  // namespace moeserve::server
