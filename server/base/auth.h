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
  ApiKeys() = default;  // none: everything is open
  explicit ApiKeys(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  bool empty() const { return keys_.empty(); }
  // One of them, for a client to send; there must be any.
  const std::string& first() const { return keys_.front(); }

  // Checks an `authorization` value ("Bearer <key>"). OK if there are no keys. The time taken does
  // not depend on how much of a key was right.
  absl::Status Check(std::string_view authorization) const;

 private:
  std::vector<std::string> keys_;
};

// One key a line; blank lines and lines starting with '#' are skipped. A file without a key is an
// error: it would open the server by accident.
Result<ApiKeys> ReadApiKeys(const std::filesystem::path& file);

}  // namespace moeserve::server
