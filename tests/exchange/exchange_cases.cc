#include "tests/exchange/exchange_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace moeserve {
namespace {

// The byte at a position of what a rank sends in a round.
char ByteOf(int rank, int round, int64_t position) {
  return static_cast<char>(rank * 31 + round * 7 + position * 13 + (position >> 8));
}

// Fills or checks the part of a rank.
void Fill(char* part, int rank, int round, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) part[i] = ByteOf(rank, round, i);
}
int64_t WrongBytes(const char* part, int rank, int round, int64_t bytes) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < bytes; ++i) wrong += part[i] != ByteOf(rank, round, i);
  return wrong;
}

void Gather(Exchange& exchange, const std::vector<int64_t>& bytes, int round) {
  std::vector<char> buffer(
      static_cast<size_t>(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}) + 1), 0x55);
  int64_t own = 0;
  for (int r = 0; r < exchange.rank(); ++r) own += bytes[static_cast<size_t>(r)];
  Fill(buffer.data() + own, exchange.rank(), round, bytes[static_cast<size_t>(exchange.rank())]);
  exchange.StartGather(buffer.data(), bytes);
  exchange.FinishGather();
  ASSERT_TRUE(exchange.status().ok()) << exchange.status();
  const char* part = buffer.data();
  for (int r = 0; r < exchange.ranks(); ++r) {
    const int64_t size = bytes[static_cast<size_t>(r)];
    EXPECT_EQ(WrongBytes(part, r, round, size), 0) << "round " << round << ", part " << r;
    part += size;
  }
  EXPECT_EQ(*part, 0x55) << "the byte behind the buffer";
}

// bytes[s][r] bytes go from rank s to rank r; bytes[r][r] are those at the rank's own place.
void AllToAll(Exchange& exchange, const std::vector<std::vector<int64_t>>& bytes, int round) {
  const auto own = static_cast<size_t>(exchange.rank());
  std::vector<int64_t> send = bytes[own], receive;
  send[own] = 0;
  for (const std::vector<int64_t>& of_rank : bytes) receive.push_back(of_rank[own]);
  const auto total = [](const std::vector<int64_t>& sizes) {
    return static_cast<size_t>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  };
  // What rank s sends to rank r is the part of "rank" s * ranks + r.
  const auto part_of = [&](size_t s, size_t r) { return static_cast<int>(s * send.size() + r); };
  std::vector<char> sent(total(send)), received(total(receive) + 1, 0x55);
  char* part = sent.data();
  for (size_t r = 0; r < send.size(); part += send[r++]) {
    Fill(part, part_of(own, r), round, send[r]);
  }
  exchange.StartAllToAll(sent.data(), send, received.data(), receive);
  exchange.FinishAllToAll();
  ASSERT_TRUE(exchange.status().ok()) << exchange.status();
  const char* from = received.data();
  for (size_t s = 0; s < receive.size(); from += receive[s++]) {
    if (s == own) {
      EXPECT_EQ(std::count(from, from + receive[s], 0x55), receive[s]) << "the rank's own place";
    } else {
      EXPECT_EQ(WrongBytes(from, part_of(s, own), round, receive[s]), 0)
          << "round " << round << ", part " << s;
    }
  }
  EXPECT_EQ(*from, 0x55) << "the byte behind the buffer";
}

// Parts of random sizes; a third of them are empty.
void ExchangesParts(Exchange& exchange) {
  std::mt19937 random(8);  // the same on all ranks
  const auto ranks = static_cast<size_t>(exchange.ranks());
  for (int round = 0; round < 40; ++round) {
    std::vector<std::vector<int64_t>> bytes(ranks);
    for (std::vector<int64_t>& of_rank : bytes) {
      for (size_t r = 0; r < ranks; ++r) {
        const uint32_t size = random() % (round % 10 == 0 ? 100000 : 2000);
        of_rank.push_back(round == 5 || random() % 3 == 0 ? 0 : size);
      }
    }
    AllToAll(exchange, bytes, round);
  }
}

// Parts of random sizes; a third of them are empty.
void GathersParts(Exchange& exchange) {
  std::mt19937 random(7);  // the same on all ranks
  for (int round = 0; round < 60; ++round) {
    std::vector<int64_t> bytes;
    for (int r = 0; r < exchange.ranks(); ++r) {
      const uint32_t size = random() % (round % 10 == 0 ? 300000 : 3000);
      bytes.push_back(random() % 3 == 0 ? 0 : size);
    }
    Gather(exchange, bytes, round);
  }
}

void GathersNothing(Exchange& exchange) {
  Gather(exchange, std::vector<int64_t>(static_cast<size_t>(exchange.ranks())), 0);
}

void Broadcasts(Exchange& exchange) {
  int round = 0;
  for (const int64_t bytes : {0, 1, 1000, 3'000'000}) {
    std::vector<char> message(static_cast<size_t>(bytes));
    if (exchange.rank() == 0) Fill(message.data(), 0, round, bytes);
    exchange.Broadcast(message);
    EXPECT_EQ(WrongBytes(message.data(), 0, round, bytes), 0);
    ++round;
  }
  EXPECT_TRUE(exchange.status().ok()) << exchange.status();
}

void GathersAtTheLeader(Exchange& exchange) {
  int round = 0;
  for (const int64_t bytes : {0, 32, 100'000}) {
    std::vector<char> own(static_cast<size_t>(bytes));
    std::vector<char> all(exchange.rank() == 0 ? own.size() * static_cast<size_t>(exchange.ranks())
                                               : 0);
    Fill(own.data(), exchange.rank(), round, bytes);
    exchange.GatherAtLeader(own, all);
    for (int r = 0; exchange.rank() == 0 && r < exchange.ranks(); ++r) {
      EXPECT_EQ(WrongBytes(all.data() + r * bytes, r, round, bytes), 0) << "rank " << r;
    }
    ++round;
  }
  EXPECT_TRUE(exchange.status().ok()) << exchange.status();
}

// Messages of one function must not be taken for those of the next one.
void FunctionsInTurn(Exchange& exchange) {
  for (int round = 0; round < 30; ++round) {
    std::vector<char> message(64);
    if (exchange.rank() == 0) Fill(message.data(), 0, round, 64);
    exchange.Broadcast(message);
    EXPECT_EQ(WrongBytes(message.data(), 0, round, 64), 0);
    const auto ranks = static_cast<size_t>(exchange.ranks());
    Gather(exchange, std::vector<int64_t>(ranks, 64), round);
    AllToAll(exchange, {ranks, std::vector<int64_t>(ranks, 64)}, round);
    std::vector<char> own(64);
    std::vector<char> all(exchange.rank() == 0 ? 64 * static_cast<size_t>(exchange.ranks()) : 0);
    Fill(own.data(), exchange.rank(), round + 1, 64);
    exchange.GatherAtLeader(own, all);
    for (int r = 0; exchange.rank() == 0 && r < exchange.ranks(); ++r) {
      EXPECT_EQ(WrongBytes(all.data() + int64_t{64} * r, r, round + 1, 64), 0);
    }
  }
}

void CountsBytes(Exchange& exchange) {
  const ExchangeCounts before = exchange.counts();
  std::vector<int64_t> bytes;
  for (int r = 0; r < exchange.ranks(); ++r) bytes.push_back(100 * r + 10);
  const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  const int64_t own = bytes[static_cast<size_t>(exchange.rank())];
  Gather(exchange, bytes, 0);
  const ExchangeCounts& after = exchange.counts();
  EXPECT_EQ(after.gathers - before.gathers, 1u);
  EXPECT_EQ(static_cast<int64_t>(after.bytes_sent - before.bytes_sent),
            own * (exchange.ranks() - 1));
  EXPECT_EQ(static_cast<int64_t>(after.bytes_received - before.bytes_received), total - own);
  ASSERT_EQ(after.wait_seconds.size(), static_cast<size_t>(exchange.ranks()));
  EXPECT_EQ(after.wait_seconds[static_cast<size_t>(exchange.rank())], 0);
}

void CountsBytesOfAllToAlls(Exchange& exchange) {
  const ExchangeCounts before = exchange.counts();
  // Rank s sends 100 s + 10 r bytes to rank r.
  std::vector<std::vector<int64_t>> bytes(static_cast<size_t>(exchange.ranks()));
  int64_t sent = 0, received = 0;
  for (int s = 0; s < exchange.ranks(); ++s) {
    for (int r = 0; r < exchange.ranks(); ++r) {
      const int64_t size = 100 * s + 10 * r;
      bytes[static_cast<size_t>(s)].push_back(size);
      if (s == r) continue;
      if (s == exchange.rank()) sent += size;
      if (r == exchange.rank()) received += size;
    }
  }
  AllToAll(exchange, bytes, 0);
  const ExchangeCounts after = exchange.counts();
  constexpr auto kKind = static_cast<size_t>(ExchangeKind::kAllToAll);
  EXPECT_EQ(after.gathers - before.gathers, 1u);
  EXPECT_EQ(static_cast<int64_t>(after.sent_by[kKind] - before.sent_by[kKind]), sent);
  EXPECT_EQ(static_cast<int64_t>(after.bytes_sent - before.bytes_sent), sent);
  EXPECT_EQ(static_cast<int64_t>(after.bytes_received - before.bytes_received), received);
}

}  // namespace

const std::vector<ExchangeCase>& ExchangeCases() {
  static const auto* const cases =
      new std::vector<ExchangeCase>{{"GathersParts", GathersParts},
                                    {"GathersNothing", GathersNothing},
                                    {"ExchangesParts", ExchangesParts},
                                    {"Broadcasts", Broadcasts},
                                    {"GathersAtTheLeader", GathersAtTheLeader},
                                    {"FunctionsInTurn", FunctionsInTurn},
                                    {"CountsBytes", CountsBytes},
                                    {"CountsBytesOfAllToAlls", CountsBytesOfAllToAlls}};
  return *cases;
}

void GatherLargeParts(Exchange& exchange) {
  // With two ranks, the first part alone has more than 2^31 bytes.
  std::vector<int64_t> bytes(static_cast<size_t>(exchange.ranks()), int64_t{3} << 28);
  bytes[0] = (int64_t{1} << 31) + 12345;
  Gather(exchange, bytes, 3);
}

void ExchangeLargeParts(Exchange& exchange) {
  const auto ranks = static_cast<size_t>(exchange.ranks());
  std::vector<std::vector<int64_t>> bytes(ranks, std::vector<int64_t>(ranks, int64_t{1} << 20));
  bytes[0][1] = (int64_t{1} << 31) + 12345;
  bytes[1][0] = (int64_t{1} << 30) + 1;
  AllToAll(exchange, bytes, 4);
}

}  // namespace moeserve
