// Limits on the connections of one client address.
#include "server/connections/address_limit.h"

#include <gtest/gtest.h>

#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/address_v4.hpp>
#include <chrono>
#include <cstdint>

#include "server/base/refusal_pace.h"
#include "server/connections/address_paces.h"
#include "server/connections/address_pauses.h"

namespace moeserve::server {
namespace {

ClientAddress Client(const char* text) {
  return ClientAddress(boost::asio::ip::make_address(text));
}

TEST(ClientAddress, OneClientIsAnIpv4AddressOrAnIpv6Network) {
  EXPECT_EQ(Client("10.0.0.1"), Client("10.0.0.1"));
  EXPECT_NE(Client("10.0.0.1"), Client("10.0.0.2"));
  EXPECT_EQ(Client("::ffff:10.0.0.1"), Client("10.0.0.1"));
  EXPECT_EQ(Client("2001:db8:1:2::1"), Client("2001:db8:1:2:ffff::9"));
  EXPECT_NE(Client("2001:db8:1:2::1"), Client("2001:db8:1:3::1"));
  EXPECT_NE(Client("::a00:1:0:0:0:1"), Client("10.0.0.1"));
  EXPECT_NE(Client("0.0.0.0"), ClientAddress());
}

TEST(ClientAddress, KnowsLoopback) {
  for (const char* local : {"127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"}) {
    EXPECT_TRUE(Client(local).is_loopback()) << local;
  }
  for (const char* remote : {"10.0.0.1", "128.0.0.1", "::2", "::ffff:10.0.0.1"}) {
    EXPECT_FALSE(Client(remote).is_loopback()) << remote;
  }
}

TEST(AddressCounter, CountsEachClient) {
  AddressCounter counter({.max_connections = 2});
  const ClientAddress a = Client("10.0.0.1");
  const ClientAddress b = Client("10.0.0.2");
  counter.Add(a);
  EXPECT_FALSE(counter.Full(a));
  counter.Add(a);
  EXPECT_TRUE(counter.Full(a));
  EXPECT_FALSE(counter.Full(b));
  counter.Remove(a);
  EXPECT_FALSE(counter.Full(a));
  counter.Remove(a);
  counter.Add(a);
  counter.Add(a);
  EXPECT_TRUE(counter.Full(a));
}

TEST(AddressCounter, LoopbackAndNoLimit) {
  AddressCounter remote({.max_connections = 1, .loopback = false});
  AddressCounter all({.max_connections = 1, .loopback = true});
  AddressCounter none({.max_connections = 0, .loopback = true});
  const ClientAddress local = Client("127.0.0.1");
  for (AddressCounter* counter : {&remote, &all, &none}) counter->Add(local);
  EXPECT_FALSE(remote.Full(local));
  EXPECT_TRUE(all.Full(local));
  EXPECT_FALSE(none.Full(local));
}

// Returns the wait in milliseconds.
int64_t Wait(const RefusalPace& pace, RefusalPace::Time now) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(pace.WaitFrom(now)).count();
}

TEST(RefusalPace, SlowsOnlyAfterManyRefusals) {
  const RefusalPace::Time start{std::chrono::hours(1)};
  RefusalPace pace;
  for (int i = 0; i < RefusalPace::kBurst; ++i) {
    EXPECT_EQ(Wait(pace, start), 0) << i;
    pace.CountRefusal(start);
  }
  EXPECT_EQ(Wait(pace, start), 0);
  pace.CountRefusal(start);
  EXPECT_EQ(Wait(pace, start), 50);
  pace.CountRefusal(start);
  EXPECT_EQ(Wait(pace, start), 100);
  EXPECT_EQ(Wait(pace, start + std::chrono::milliseconds(60)), 40);
  EXPECT_EQ(Wait(pace, start + std::chrono::milliseconds(200)), 0);
}

TEST(RefusalPace, LimitsTheWait) {
  const RefusalPace::Time start{std::chrono::hours(1)};
  RefusalPace pace;
  for (int i = 0; i < 1000; ++i) pace.CountRefusal(start);
  EXPECT_EQ(Wait(pace, start), 2000);
  // After a minute without refusals, the client may be refused as often as at first.
  const auto later = start + std::chrono::minutes(1);
  for (int i = 0; i < RefusalPace::kBurst; ++i) pace.CountRefusal(later);
  EXPECT_EQ(Wait(pace, later), 0);
}

TEST(AddressPaces, BelongToOneClient) {
  const AddressPaces::Time now{std::chrono::hours(1)};
  AddressPaces paces({.max_connections = 1});
  const ClientAddress client = Client("10.0.0.1");
  const ClientAddress other = Client("10.0.0.2");
  // Waits of at most a second are no flood.
  for (int i = 0; i < RefusalPace::kBurst + 20; ++i) paces.CountRefusal(client, now);
  EXPECT_EQ(paces.WaitFrom(client, now), std::chrono::seconds(1));
  EXPECT_FALSE(paces.Flooding(client, now));
  paces.CountRefusal(client, now);
  EXPECT_TRUE(paces.Flooding(client, now));
  EXPECT_EQ(paces.WaitFrom(client, now), std::chrono::milliseconds(1100));
  EXPECT_FALSE(paces.Flooding(client, now + std::chrono::milliseconds(100)));
  EXPECT_EQ(paces.WaitFrom(other, now), std::chrono::seconds(0));
  EXPECT_FALSE(paces.Flooding(other, now));
}

TEST(AddressPaces, AnUnusedHandshakeCountsSeveralTimes) {
  const AddressPaces::Time now{std::chrono::hours(1)};
  AddressPaces paces({.max_connections = 1});
  const ClientAddress client = Client("10.0.0.1");
  constexpr int kHandshakes = (RefusalPace::kBurst + 20) / RefusalPace::kUnusedHandshake;
  for (int i = 0; i < kHandshakes; ++i) {
    EXPECT_FALSE(paces.Flooding(client, now));
    paces.CountRefusal(client, now, RefusalPace::kUnusedHandshake);
  }
  EXPECT_EQ(paces.WaitFrom(client, now), std::chrono::seconds(1));
  paces.CountRefusal(client, now, RefusalPace::kUnusedHandshake);
  EXPECT_TRUE(paces.Flooding(client, now));
}

TEST(AddressPaces, HoldOnlyWhereTheLimitApplies) {
  const AddressPaces::Time now{std::chrono::hours(1)};
  AddressPaces off({.max_connections = 0, .loopback = true});
  AddressPaces remote({.max_connections = 1, .loopback = false});
  for (int i = 0; i < 1000; ++i) {
    off.CountRefusal(Client("10.0.0.1"), now);
    remote.CountRefusal(Client("127.0.0.1"), now);
  }
  EXPECT_FALSE(off.Flooding(Client("10.0.0.1"), now));
  EXPECT_FALSE(remote.Flooding(Client("127.0.0.1"), now));
}

TEST(AddressPaces, RememberALimitedNumberOfClients) {
  const AddressPaces::Time now{std::chrono::hours(1)};
  AddressPaces paces({.max_connections = 1});
  const auto count = [&](size_t i, AddressPaces::Time time) {
    const ClientAddress client(boost::asio::ip::address_v4(static_cast<uint32_t>(0x0a000000 + i)));
    for (int j = 0; j <= RefusalPace::kBurst; ++j) paces.CountRefusal(client, time);
    return paces.WaitFrom(client, time) > RefusalPace::Duration::zero();
  };
  for (size_t i = 0; i < AddressPaces::kMaxClients; ++i) EXPECT_TRUE(count(i, now));
  EXPECT_FALSE(count(AddressPaces::kMaxClients, now));
  // Later, others take their places.
  EXPECT_TRUE(count(AddressPaces::kMaxClients, now + std::chrono::minutes(1)));
}

TEST(AddressPauses, GrowWhileTheClientGoesOn) {
  const AddressPauses::Time start{std::chrono::hours(1)};
  const auto seconds = [&](int64_t count) { return start + std::chrono::seconds(count); };
  AddressPauses pauses({.max_connections = 1});
  const ClientAddress client = Client("10.0.0.1");
  EXPECT_FALSE(pauses.Paused(client, start));
  int64_t now = 0;
  for (const int length : {1, 2, 4, 8, 16, 32, 64, 64}) {
    pauses.Pause(client, seconds(now));
    pauses.Pause(client, seconds(now));  // another connection of the same time
    EXPECT_TRUE(pauses.Paused(client, seconds(now + length) - std::chrono::milliseconds(1)));
    EXPECT_FALSE(pauses.Paused(client, seconds(now + length))) << length;
    EXPECT_FALSE(pauses.Paused(Client("10.0.0.2"), seconds(now)));
    now += length;
  }
  now += AddressPauses::kMemory.count() + 1;
  pauses.Pause(client, seconds(now));
  EXPECT_FALSE(pauses.Paused(client, seconds(now + 1)));
}

TEST(AddressPauses, HoldOnlyWhereTheLimitApplies) {
  const AddressPauses::Time now{std::chrono::hours(1)};
  AddressPauses off({.max_connections = 0, .loopback = true});
  off.Pause(Client("10.0.0.1"), now);
  EXPECT_FALSE(off.Paused(Client("10.0.0.1"), now));
  AddressPauses remote({.max_connections = 1, .loopback = false});
  remote.Pause(Client("127.0.0.1"), now);
  EXPECT_FALSE(remote.Paused(Client("127.0.0.1"), now));
}

TEST(AddressPauses, RememberALimitedNumberOfClients) {
  const AddressPauses::Time now{std::chrono::hours(1)};
  AddressPauses pauses({.max_connections = 1});
  const auto client = [](size_t i) {
    return ClientAddress(boost::asio::ip::address_v4(static_cast<uint32_t>(0x0a000000 + i)));
  };
  for (size_t i = 0; i <= AddressPauses::kMaxClients; ++i) pauses.Pause(client(i), now);
  EXPECT_TRUE(pauses.Paused(client(AddressPauses::kMaxClients - 1), now));
  EXPECT_FALSE(pauses.Paused(client(AddressPauses::kMaxClients), now));
  // Later, others take their places.
  const auto later = now + AddressPauses::kShortest;
  pauses.Pause(client(AddressPauses::kMaxClients), later);
  EXPECT_TRUE(pauses.Paused(client(AddressPauses::kMaxClients), later));
}

}  // namespace
}  // namespace moeserve::server
