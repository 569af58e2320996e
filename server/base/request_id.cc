#include "server/base/request_id.h"

#include <cstdint>
#include <random>

namespace moeserve::server {

bool IsValidRequestId(std::string_view id) {
  if (id.empty() || id.size() > 128) return false;
  for (const char c : id) {
    const bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                    c == '.' || c == '_' || c == '-';
    if (!ok) return false;
  }
  return true;
}

std::string NewRequestId() {
  thread_local std::mt19937_64 generator = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  constexpr char kDigits[] = "0123456789abcdef";
  std::string id;
  uint64_t bits = 0;
  for (int i = 0; i < 24; ++i) {
    if (i % 16 == 0) bits = generator();
    id.push_back(kDigits[bits & 15]);
    bits >>= 4;
  }
  return id;
}

std::string ChooseRequestId(std::string_view from_client) {
  return IsValidRequestId(from_client) ? std::string(from_client) : NewRequestId();
}

}  // namespace moeserve::server
