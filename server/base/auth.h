// API keys.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"

namespace moeserve::server {

// Immutable and thread-safe.
class ApiKeys {
 public:
  ApiKeys() = default;  // no keys: every route is open
  explicit ApiKeys(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  bool empty() const { return keys_.empty(); }
  // Returns one key for a client to send. Requires that there is one.
  const std::string& first() const { return keys_.front(); }

  // Checks an `authorization` value ("Bearer <key>"). OK if there are no keys. Takes constant
  // time, however much of a key is right.
  absl::Status Check(std::string_view authorization) const;

 private:
  std::vector<std::string> keys_;
};

// Reads one key per line; blank lines and lines starting with '#' are skipped. A file without a key
// is an error: it would open the server by accident.
Result<ApiKeys> ReadApiKeys(const std::filesystem::path& file);

}  // namespace moeserve::server
