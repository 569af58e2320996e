// Slows down client addresses whose requests are refused again and again.
#pragma once

#include <cstddef>
#include <unordered_map>

#include "server/base/refusal_pace.h"
#include "server/connections/address_limit.h"

namespace moeserve::server {

// The paces of clients by their addresses. Not thread-safe.
class AddressPaces {
 public:
  using Time = RefusalPace::Time;

  // Slows no address that `limit` does not apply to: such an address can stand for many clients.
  explicit AddressPaces(const AddressLimit& limit) : limit_(limit) {}

  void CountRefusal(const ClientAddress& client, Time now, int times = 1);
  RefusalPace::Duration WaitFrom(const ClientAddress& client, Time now) const;
  // Returns whether a new connection of the client is to be dropped, and counts it if so.
  bool Flooding(const ClientAddress& client, Time now);

  // Limit on the clients that are remembered; beyond it, others are not slowed.
  static constexpr size_t kMaxClients = 4096;

 private:
  AddressLimit limit_;
  std::unordered_map<ClientAddress, RefusalPace, ClientAddress::Hash> paces_;
};

}  // namespace moeserve::server
