#include "server/connections/address_pauses.h"

#include <algorithm>

namespace moeserve::server {

void AddressPauses::Pause(const ClientAddress& client, Time now) {
  if (!limit_.AppliesTo(client)) return;
  auto found = entries_.find(client);
  if (found == entries_.end()) {
    if (entries_.size() >= kMaxClients) {
      std::erase_if(entries_, [&](const auto& entry) { return entry.second.until <= now; });
      if (entries_.size() >= kMaxClients) return;
    }
    entries_.emplace(client, Entry{now + kShortest, kShortest});
    return;
  }
  Entry& entry = found->second;
  if (entry.until > now) return;  // the connection began before the pause
  entry.length = now - entry.until > kMemory ? kShortest : std::min(2 * entry.length, kLongest);
  entry.until = now + entry.length;
}

bool AddressPauses::Paused(const ClientAddress& client, Time now) const {
  const auto found = entries_.find(client);
  return found != entries_.end() && found->second.until > now;
}

}  // namespace moeserve::server
