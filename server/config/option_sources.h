// Gives the options of a command the values of the environment and of a configuration file, and
// remembers where every value came from.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/error_text.h"
#include "base/status.h"
#include "server/config/config_file.h"

namespace moeserve::server {

// Returns the value of an environment variable, null if it is not set.
using Environment = std::function<const char*(const char* name)>;

// Where the value of an option came from. A later kind overrides an earlier one.
enum class SourceKind { kDefault, kFile, kEnvironment, kCommandLine };
struct OptionSource {
  SourceKind kind = SourceKind::kDefault;
  std::string text = "default";  // "FILE:LINE", "environment NAME", "command line"
};

// One command's options. The command must outlive the object. Used by one thread.
class OptionSources {
 public:
  // Takes over from the command line parser what it would do too early: the checks for required
  // options and the reading of environment variables. Must be called before the command line is
  // parsed, when `command` has all its options. Options named in `command_line_only`, without
  // dashes, cannot stand in a file. The values of `secret` are never shown.
  OptionSources(CLI::App& command, std::vector<std::string> command_line_only,
                std::vector<std::string> secret);

  // Sets every option that the command line, which was parsed before, has not set: from the
  // environment, else from `file`. Then checks that no required option is missing, unless
  // `partial`. Must be called once. InvalidArgument for unknown names and values that an option
  // does not take, with the place, the option, the expected and the found value.
  absl::Status Resolve(const std::optional<ConfigFile>& file, const Environment& environment,
                       bool partial = false);

  // Returns where the value of the option with this long name, without dashes, came from.
  OptionSource SourceOf(const std::string& name) const;

  // Returns the values as a configuration file, in which a comment names the source of each.
  // Options without a value, and secrets, are commented out.
  std::string ToYaml() const;

  // Returns `error`, followed by where the option that its message names was set, if that was in a
  // file or the environment.
  absl::Status WithSource(const absl::Status& error) const;

 private:
  void ReadEnvironment(const Environment& environment, Problems& problems);
  void ReadEntry(const ConfigEntry& entry, const std::string& file, Problems& problems);
  bool IsSecret(const std::string& name) const;
  // Returns why `option` does not take the values, without their place; empty if it does.
  std::string Set(CLI::Option& option, const std::string& name, const ConfigEntry& entry) const;

  CLI::App& command_;
  std::vector<std::string> names_;  // of the options that a file can set, in the command's order
  std::vector<std::string> command_line_only_;
  std::vector<std::string> secret_;
  std::map<std::string, std::string> variables_;  // by option
  std::vector<std::string> required_;
  std::map<std::string, OptionSource> sources_;  // by option; not of those with their default
};

}  // namespace moeserve::server
