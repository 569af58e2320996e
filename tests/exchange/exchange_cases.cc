#include "tests/exchange/exchange_cases.h"

#include <gtest/gtest.h>

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
    Gather(exchange, std::vector<int64_t>(static_cast<size_t>(exchange.ranks()), 64), round);
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

}  // namespace

const std::vector<ExchangeCase>& ExchangeCases() {
  static const auto* const cases = new std::vector<ExchangeCase>{
      {"GathersParts", GathersParts},       {"GathersNothing", GathersNothing},
      {"Broadcasts", Broadcasts},           {"GathersAtTheLeader", GathersAtTheLeader},
      {"FunctionsInTurn", FunctionsInTurn}, {"CountsBytes", CountsBytes}};
  return *cases;
}

void GatherLargeParts(Exchange& exchange) {
  // With two ranks, the first part alone has more than 2^31 bytes.
  std::vector<int64_t> bytes(static_cast<size_t>(exchange.ranks()), int64_t{3} << 28);
  bytes[0] = (int64_t{1} << 31) + 12345;
  Gather(exchange, bytes, 3);
}

}  // namespace moeserve
