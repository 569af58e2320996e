// Keeps clients that flood the server away for some time.
#pragma once

#include <chrono>
#include <unordered_map>

#include "server/connections/address_limit.h"

namespace moeserve::server {

// A client whose connection was dropped for a flood would otherwise connect again at once, and each
// new connection has new allowances. Not thread-safe. All times are of the steady clock.
class AddressPauses {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Pauses no client if `limit` is off, and no loopback address that it does not apply to: such an
  // address can stand for many clients.
  explicit AddressPauses(const AddressLimit& limit) : limit_(limit) {}

  // Pauses the client for a second; for twice as long as before if its last pause ended less than
  // kMemory ago, but at most for kLongest.
  void Pause(const ClientAddress& client, Time now);
  bool Paused(const ClientAddress& client, Time now) const;

  static constexpr std::chrono::seconds kShortest{1};
  static constexpr std::chrono::seconds kLongest{64};
  static constexpr std::chrono::seconds kMemory{120};
  // Limit on the clients that are remembered; beyond it, clients are forgotten and not paused.
  static constexpr size_t kMaxClients = 4096;

 private:
  struct Entry {
    Time until;
    std::chrono::seconds length;
  };

  const AddressLimit limit_;
  std::unordered_map<ClientAddress, Entry, ClientAddress::Hash> entries_;
};

}  // namespace moeserve::server
