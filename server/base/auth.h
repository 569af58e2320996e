// API keys of the server.
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
  ApiKeys() = default;  // without keys, every request is authorized
  explicit ApiKeys(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  bool empty() const { return keys_.empty(); }
  // Returns the first key, which a client sends. Requires that there is a key.
  const std::string& first() const { return keys_.front(); }

  // Checks the value of an `authorization` header ("Bearer <key>"). Returns OK if there are no
  // keys. The run time does not reveal how much of a wrong key is correct.
  absl::Status Check(std::string_view authorization) const;

 private:
  std::vector<std::string> keys_;
};

// Reads one key per line. Skips blank lines and lines starting with '#'. A file without a key is an
// error, because it would leave the server open to everybody by accident.
Result<ApiKeys> ReadApiKeys(const std::filesystem::path& file);

}  // namespace moeserve::server
