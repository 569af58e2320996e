// Reads the YAML of a configuration file. The file may be hostile: its size, depth and number of
// values are bounded, and aliases, which can expand to any size, are refused.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moeserve::server {

struct ConfigValue {
  std::string text;     // as YAML unquotes it; any bytes
  bool quoted = false;  // whether it can only be text, never a number or a truth value
  int line = 0;         // from 1
};

struct ConfigEntry {
  std::string key;
  int line = 0;  // of the key, from 1
  bool is_list = false;
  std::vector<ConfigValue> values;  // one unless `is_list`
};

struct ConfigFile {
  std::string name;                  // as errors show it
  std::vector<ConfigEntry> entries;  // in the order of the file; no key twice
};

constexpr size_t kMaxConfigBytes = size_t{64} << 10;
constexpr size_t kMaxConfigValues = 1000;

// Parses a mapping from keys to values and lists of values. An empty text has no entries.
// InvalidArgument, as "NAME:LINE: ...", for malformed YAML and for everything beyond that form.
Result<ConfigFile> ParseConfig(std::string_view text, std::string_view name);

// Reads a file of at most kMaxConfigBytes. The errors of ReadTextFile() and ParseConfig().
Result<ConfigFile> ReadConfigFile(const std::filesystem::path& file);

}  // namespace moeserve::server
