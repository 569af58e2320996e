// Limits how many connections one client address may have at a time.
#pragma once

#include <boost/asio/ip/address.hpp>
#include <cstdint>
#include <unordered_map>

namespace moeserve::server {

// What counts as one client: an IPv4 address, or the first 64 bits of an IPv6 address, because one
// host usually has all the others to itself. An IPv4 address inside an IPv6 address is the former.
class ClientAddress {
 public:
  ClientAddress() = default;  // equals no client's address
  explicit ClientAddress(const boost::asio::ip::address& address);

  bool is_loopback() const { return loopback_; }
  bool operator==(const ClientAddress&) const = default;
  struct Hash {
    size_t operator()(const ClientAddress& address) const;
  };

 private:
  enum class Kind : uint8_t { kNone, kV4, kV6 };
  Kind kind_ = Kind::kNone;
  bool loopback_ = false;
  uint64_t bits_ = 0;
};

// How many connections one client may have. A listener has a limit of its own for all of them.
struct AddressLimit {
  int max_connections = 0;  // 0: no limit
  // Whether the limit applies to loopback addresses, too. All clients of a proxy on the same
  // machine have such an address.
  bool loopback = false;

  bool AppliesTo(const ClientAddress& client) const {
    return max_connections > 0 && (loopback || !client.is_loopback());
  }
};

// Counts connections by client. Not thread-safe.
class AddressCounter {
 public:
  explicit AddressCounter(const AddressLimit& limit) : limit_(limit) {}

  // Returns whether the client has as many connections as it may have.
  bool Full(const ClientAddress& client) const;
  void Add(const ClientAddress& client) { ++counts_[client]; }
  void Remove(const ClientAddress& client);  // of one that was added

 private:
  const AddressLimit limit_;
  std::unordered_map<ClientAddress, int, ClientAddress::Hash> counts_;  // without zeros
};

}  // namespace moeserve::server
