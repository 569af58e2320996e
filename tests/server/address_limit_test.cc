// Limits on the connections of one client address.
#include "server/connections/address_limit.h"

#include <gtest/gtest.h>

#include <boost/asio/ip/address.hpp>

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

}  // namespace
}  // namespace moeserve::server
