// Ranks as threads of one process that meet over TCP.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "kernels/exchange/tcp/meeting.h"
#include "kernels/exchange/tcp/tcp_transport.h"

namespace moeserve {

// Returns a port of 127.0.0.1 that nobody uses.
inline int FreePort() {
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(socket.get(), any, size), 0);
  EXPECT_EQ(getsockname(socket.get(), any, &size), 0);
  return ntohs(address.sin_port);
}

inline MeetingOptions LocalMeeting(int rank, int ranks, int port) {
  return {.rank = rank,
          .ranks = ranks,
          .host = "127.0.0.1",
          .port = port,
          .key = "a key of tests",
          .name = "host-" + std::to_string(rank),
          .timeout = absl::Seconds(60)};
}

// Runs `f` on a thread for each rank and waits for all.
inline void OnThreads(int ranks, const std::function<void(int rank)>& f) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&f, rank] { f(rank); });
  for (std::thread& thread : threads) thread.join();
}

// Returns transports that are connected over TCP.
inline std::vector<std::unique_ptr<Transport>> TcpTransports(int ranks) {
  std::vector<std::unique_ptr<Transport>> transports(static_cast<size_t>(ranks));
  const int port = FreePort();
  OnThreads(ranks, [&](int rank) {
    auto peers = MeetRanks(LocalMeeting(rank, ranks, port));
    ASSERT_TRUE(peers.ok()) << peers.status();
    transports[static_cast<size_t>(rank)] = TcpTransport(rank, *std::move(peers));
  });
  return transports;
}

}  // namespace moeserve
