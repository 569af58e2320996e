#include "server/connections/address_paces.h"

namespace moeserve::server {

void AddressPaces::CountRefusal(const ClientAddress& client, Time now, int times) {
  if (!limit_.AppliesTo(client)) return;
  if (paces_.size() >= kMaxClients && !paces_.contains(client)) {
    std::erase_if(paces_, [&](const auto& entry) {
      return entry.second.WaitFrom(now) == RefusalPace::Duration::zero();
    });
    if (paces_.size() >= kMaxClients) return;
  }
  paces_[client].CountRefusal(now, times);
}

RefusalPace::Duration AddressPaces::WaitFrom(const ClientAddress& client, Time now) const {
  const auto found = paces_.find(client);
  return found == paces_.end() ? RefusalPace::Duration::zero() : found->second.WaitFrom(now);
}

bool AddressPaces::Flooding(const ClientAddress& client, Time now) {
  const auto found = paces_.find(client);
  if (found == paces_.end() || found->second.WaitFrom(now) <= RefusalPace::kFlood) return false;
  found->second.CountRefusal(now);
  return true;
}

}  // namespace moeserve::server
