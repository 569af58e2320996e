#include "server/base/auth.h"

#include <fstream>

#include "base/message.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

bool EqualInConstantTime(std::string_view expected, std::string_view given) {
  // The run time depends only on the length of `given`, which the client already knows.
  unsigned char difference = expected.size() == given.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i) {
    const char other = expected.empty() ? '\0' : expected[i % expected.size()];
    difference = static_cast<unsigned char>(difference | (given[i] ^ other));
  }
  return difference == 0;
}

std::string_view Trimmed(std::string_view text) {
  const auto space = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && space(text.front())) text.remove_prefix(1);
  while (!text.empty() && space(text.back())) text.remove_suffix(1);
  return text;
}

bool StartsWithBearer(std::string_view text) {
  constexpr std::string_view kScheme = "bearer ";
  if (text.size() < kScheme.size()) return false;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = text[i] >= 'A' && text[i] <= 'Z' ? static_cast<char>(text[i] + 32) : text[i];
    if (c != kScheme[i]) return false;
  }
  return true;
}

}  // namespace

absl::Status ApiKeys::Check(std::string_view authorization) const {
  if (keys_.empty()) return absl::OkStatus();
  const auto refuse = [](const char* message) {
    return MakeError(absl::StatusCode::kUnauthenticated, "invalid_api_key", message);
  };
  if (!StartsWithBearer(authorization)) return refuse("an API key is required (Bearer)");
  const std::string_view given = Trimmed(authorization.substr(7));
  bool found = false;
  for (const std::string& key : keys_) found |= EqualInConstantTime(key, given);
  return found ? absl::OkStatus() : refuse("the API key is not valid");
}

Result<ApiKeys> ReadApiKeys(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) return absl::NotFoundError(Concat("cannot read the API key file ", file.string()));
  std::vector<std::string> keys;
  for (std::string line; std::getline(in, line);) {
    const std::string_view key = Trimmed(line);
    if (!key.empty() && key.front() != '#') keys.emplace_back(key);
  }
  if (keys.empty()) {
    return absl::InvalidArgumentError(Concat("the API key file ", file.string(), " has no key"));
  }
  return ApiKeys(std::move(keys));
}

}  // namespace moeserve::server
