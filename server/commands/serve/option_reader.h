// Reads the options of `moeserve serve` from the command line, the environment and the file of
// --config, in this order of precedence.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/commands/serve/options.h"
#include "server/config/option_sources.h"

namespace moeserve::server {

// Used by one thread.
class ServeOptionReader {
 public:
  // Adds the options of `serve`, and --config, to `command`, which must outlive the reader.
  explicit ServeOptionReader(CLI::App& command);
  ServeOptionReader(const ServeOptionReader&) = delete;
  ServeOptionReader& operator=(const ServeOptionReader&) = delete;

  // Completes options() once the command line has been parsed. Must be called once. The errors of
  // ReadConfigFile() and OptionSources::Resolve(). With --print-routes, required options may be
  // missing. options().http has the host and the port of --host and --port.
  absl::Status Read();
  // The same with the values of `file` alone, in which required options may be missing.
  absl::Status ReadFileOnly(const std::string& file);

  const ServeOptions& options() const { return options_; }
  const OptionSources& sources() const { return *sources_; }

 private:
  // Replaces the host and the port of options_.http by those of --host and --port, if these do not
  // come from a weaker source than --http. InvalidArgument if both come from the same source.
  absl::Status MergeAddress();

  ServeOptions options_;
  std::string config_file_;
  std::optional<OptionSources> sources_;  // never empty once constructed
};

}  // namespace moeserve::server
