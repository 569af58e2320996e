// The exchange over TCP between threads.
#include <gtest/gtest.h>

#include "base/error_text.h"
#include "kernels/exchange/message_exchange.h"
#include "kernels/exchange/tcp/tcp_transport.h"
#include "tests/exchange/exchange_cases.h"
#include "tests/exchange/rank_threads.h"

namespace moeserve {
namespace {

using Options = MessageExchange::Options;

void OnTcpRanks(int ranks, const Options& options, const std::function<void(Exchange&)>& f) {
  std::vector<std::unique_ptr<Transport>> transports = TcpTransports(ranks);
  OnThreads(ranks, [&](int rank) {
    MessageExchange exchange(std::move(transports[static_cast<size_t>(rank)]), options);
    f(exchange);
  });
}

class TcpExchangeTest : public ::testing::TestWithParam<int> {};

TEST_P(TcpExchangeTest, MovesBytes) {
  for (const bool check_order : {false, true}) {
    OnTcpRanks(GetParam(), {.check_order = check_order}, [](Exchange& exchange) {
      for (const ExchangeCase& test : ExchangeCases()) {
        SCOPED_TRACE(test.name);
        test.run(exchange);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TcpExchangeTest, ::testing::Values(1, 2, 3, 4));

TEST(TcpExchangeTest, LargePartsArrive) {
  // Far more than connections keep in the system.
  OnTcpRanks(2, {}, [](Exchange& exchange) {
    constexpr int64_t kBytes = 50'000'000;
    std::vector<char> buffer(2 * kBytes, static_cast<char>(exchange.rank() + 1));
    exchange.StartGather(buffer.data(), std::vector<int64_t>(2, kBytes));
    exchange.FinishGather();
    ASSERT_TRUE(exchange.status().ok()) << exchange.status();
    const std::vector<char> first(kBytes, 1);
    const std::vector<char> second(kBytes, 2);
    EXPECT_TRUE(std::equal(first.begin(), first.end(), buffer.begin()));
    EXPECT_TRUE(std::equal(second.begin(), second.end(), buffer.begin() + kBytes));
  });
}

TEST(TcpExchangeTest, ARankThatEndsIsNamed) {
  OnTcpRanks(3, {.timeout = absl::Seconds(60)}, [](Exchange& exchange) {
    if (exchange.rank() == 2) return;
    std::vector<char> buffer(30);
    exchange.StartGather(buffer.data(), std::vector<int64_t>(3, 10));
    exchange.FinishGather();
    EXPECT_EQ(exchange.status().code(), absl::StatusCode::kUnavailable);
    // A rank that has noticed the loss ends, too, and may be the first that the other one misses.
    const std::string message(exchange.status().message());
    EXPECT_TRUE(message == "rank 2 was lost: its process has ended" ||
                message == Concat("rank ", 1 - exchange.rank(), " was lost: its process has ended"))
        << message;
  });
}

TEST(TcpExchangeTest, ASilentRankIsLostAfterTheTimeout) {
  std::vector<std::unique_ptr<Transport>> transports = TcpTransports(2);
  MessageExchange exchange(std::move(transports[0]), {.timeout = absl::Milliseconds(50)});
  std::vector<char> buffer(20);
  exchange.StartGather(buffer.data(), std::vector<int64_t>(2, 10));
  exchange.FinishGather();
  EXPECT_EQ(exchange.status(),
            absl::UnavailableError("rank 1 was lost: it sent nothing within 50ms"));
}

// Whatever the other end sends, nothing outside of a buffer is written.
TEST(TcpExchangeTest, AWrongSizeIsALoss) {
  OnTcpRanks(2, {.timeout = absl::Seconds(60)}, [](Exchange& exchange) {
    std::vector<char> message(exchange.rank() == 0 ? 20 : 10);
    exchange.Broadcast(message);
    if (exchange.rank() == 0) return;
    EXPECT_EQ(exchange.status(),
              absl::UnavailableError(
                  "rank 0 was lost: a message has another size than its receiver expects"));
  });
}

}  // namespace
}  // namespace moeserve
