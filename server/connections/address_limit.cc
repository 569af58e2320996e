#include "server/connections/address_limit.h"

#include <boost/asio/ip/address_v4.hpp>
#include <boost/asio/ip/address_v6.hpp>
#include <functional>

namespace moeserve::server {

namespace ip = boost::asio::ip;

ClientAddress::ClientAddress(const ip::address& address) {
  loopback_ = address.is_loopback();
  if (address.is_v4()) {
    kind_ = Kind::kV4;
    bits_ = address.to_v4().to_uint();
    return;
  }
  const ip::address_v6 v6 = address.to_v6();
  if (v6.is_v4_mapped()) {
    *this = ClientAddress(ip::make_address_v4(ip::v4_mapped, v6));
    return;
  }
  kind_ = Kind::kV6;
  const auto bytes = v6.to_bytes();
  for (size_t i = 0; i < 8; ++i) bits_ = bits_ << 8 | bytes[i];
}

size_t ClientAddress::Hash::operator()(const ClientAddress& address) const {
  return std::hash<uint64_t>()(address.bits_ ^ static_cast<uint64_t>(address.kind_) << 62);
}

bool AddressCounter::Full(const ClientAddress& client) const {
  if (!limit_.AppliesTo(client)) return false;
  const auto found = counts_.find(client);
  return found != counts_.end() && found->second >= limit_.max_connections;
}

void AddressCounter::Remove(const ClientAddress& client) {
  const auto found = counts_.find(client);
  if (found != counts_.end() && --found->second == 0) counts_.erase(found);
}

}  // namespace moeserve::server
