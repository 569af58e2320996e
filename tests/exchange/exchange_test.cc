// The exchange between threads: what it moves, and what happens when a rank is lost.
#include <gtest/gtest.h>

#include <thread>

#include "base/error_text.h"
#include "kernels/exchange/loopback_transport.h"
#include "kernels/exchange/message_exchange.h"
#include "tests/exchange/exchange_cases.h"

namespace moeserve {
namespace {

using Options = MessageExchange::Options;

// Runs `f` on `ranks` threads, each with its exchange.
void OnRanks(int ranks, const Options& options, const std::function<void(Exchange&)>& f) {
  std::vector<std::unique_ptr<Transport>> transports = LoopbackTransports(ranks);
  std::vector<std::thread> threads;
  for (std::unique_ptr<Transport>& transport : transports) {
    threads.emplace_back([&f, &options, transport = std::move(transport)]() mutable {
      MessageExchange exchange(std::move(transport), options);
      f(exchange);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class LoopbackExchangeTest : public ::testing::TestWithParam<int> {};

TEST_P(LoopbackExchangeTest, MovesBytes) {
  for (const bool check_order : {false, true}) {
    for (const ExchangeCase& test : ExchangeCases()) {
      SCOPED_TRACE(test.name);
      OnRanks(GetParam(), {.check_order = check_order}, test.run);
    }
  }
}

// All cases in one exchange: nothing is left over from a case.
TEST_P(LoopbackExchangeTest, MovesBytesOfAllCasesInTurn) {
  OnRanks(GetParam(), {}, [](Exchange& exchange) {
    for (const ExchangeCase& test : ExchangeCases()) test.run(exchange);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LoopbackExchangeTest, ::testing::Values(1, 2, 3, 4, 8));

// The last rank takes no part.
TEST(ExchangeTest, ARankThatSendsNothingIsLost) {
  OnRanks(3, {.timeout = absl::Milliseconds(50)}, [](Exchange& exchange) {
    if (exchange.rank() == 2) return;
    std::vector<char> buffer(30);
    const std::vector<int64_t> bytes(3, 10);
    exchange.StartGather(buffer.data(), bytes);
    exchange.FinishGather();
    EXPECT_EQ(exchange.status(),
              absl::UnavailableError("rank 2 was lost: it sent nothing within 50ms"));
    EXPECT_EQ(exchange.counts().gathers, 0u);
    // What follows returns at once: a wait would end after the time-out only.
    for (int i = 0; i < 100; ++i) {
      exchange.StartGather(buffer.data(), bytes);
      exchange.FinishGather();
      exchange.Broadcast(buffer);
    }
    EXPECT_EQ(exchange.counts().gathers, 0u);
  });
}

TEST(ExchangeTest, ARankThatSendsNoPartIsLost) {
  OnRanks(3, {.timeout = absl::Milliseconds(50)}, [](Exchange& exchange) {
    if (exchange.rank() == 2) return;
    std::vector<char> send(20), receive(30);
    std::vector<int64_t> sent(3, 10);
    sent[static_cast<size_t>(exchange.rank())] = 0;
    for (int i = 0; i < 100; ++i) {  // all but the first return at once
      exchange.StartAllToAll(send.data(), sent, receive.data(), std::vector<int64_t>(3, 10));
      exchange.FinishAllToAll();
    }
    EXPECT_EQ(exchange.status(),
              absl::UnavailableError("rank 2 was lost: it sent nothing within 50ms"));
    EXPECT_EQ(exchange.counts().gathers, 0u);
  });
}

TEST(ExchangeTest, ARankThatTakesNothingIsLost) {
  OnRanks(2, {.timeout = absl::Milliseconds(50)}, [](Exchange& exchange) {
    if (exchange.rank() == 1) return;
    std::vector<char> message(10);
    exchange.Broadcast(message);
    EXPECT_EQ(exchange.status().code(), absl::StatusCode::kUnavailable) << exchange.status();
  });
}

// Another thread, such as that of a connection, ends a wait that has no end of its own.
TEST(ExchangeTest, ALossEndsAWait) {
  OnRanks(2, {.timeout = absl::InfiniteDuration()}, [](Exchange& exchange) {
    if (exchange.rank() == 1) return;
    std::thread link([&] {
      exchange.Lose(1, "its connection was closed");
      exchange.Lose(1, "a second reason");
    });
    std::vector<char> buffer(20);
    exchange.StartGather(buffer.data(), std::vector<int64_t>(2, 10));
    exchange.FinishGather();
    link.join();
    EXPECT_EQ(exchange.status(),
              absl::UnavailableError("rank 1 was lost: its connection was closed"));
  });
}

// A rank that waits looks for a reason of its own, and stops as soon as it has one.
TEST(ExchangeTest, AFailedCheckEndsAWait) {
  OnRanks(2, {.timeout = absl::Minutes(10)}, [](Exchange& exchange) {
    if (exchange.rank() == 1) return;
    int checks = 0;
    exchange.SetWaitCheck([&]() -> absl::Status {
      if (++checks < 3) return absl::OkStatus();
      return absl::InternalError("my file is damaged");
    });
    std::vector<char> buffer(20);
    exchange.StartGather(buffer.data(), std::vector<int64_t>(2, 10));
    exchange.FinishGather();
    EXPECT_EQ(exchange.status(), absl::InternalError("my file is damaged"));
    exchange.Broadcast(buffer);  // returns at once
    EXPECT_EQ(checks, 3);
    EXPECT_EQ(dynamic_cast<MessageExchange&>(exchange).lost_rank(), 0);
  });
}

TEST(ExchangeTest, ChecksEndWithNull) {
  OnRanks(2, {.timeout = absl::Milliseconds(200)}, [](Exchange& exchange) {
    if (exchange.rank() == 1) return;
    exchange.SetWaitCheck([] { return absl::InternalError("my file is damaged"); });
    exchange.SetWaitCheck(nullptr);
    std::vector<char> buffer(20);
    exchange.StartGather(buffer.data(), std::vector<int64_t>(2, 10));
    exchange.FinishGather();
    EXPECT_EQ(exchange.status(),
              absl::UnavailableError("rank 1 was lost: it sent nothing within 200ms"));
  });
}

TEST(ExchangeTest, DifferentFunctionsAreFound) {
  OnRanks(2, {.check_order = true}, [](Exchange& exchange) {
    std::vector<char> buffer(20);
    exchange.Broadcast(buffer);
    if (exchange.rank() == 0) {
      exchange.Broadcast(buffer);
    } else {
      exchange.StartGather(buffer.data(), std::vector<int64_t>(2, 10));
      exchange.FinishGather();
    }
    const char* const calls[] = {"call 1, a broadcast of 20 bytes", "call 1, a gather of 20 bytes"};
    const int own = exchange.rank();
    EXPECT_EQ(exchange.status(),
              absl::InternalError(Concat("the ranks are at different calls of the exchange: rank ",
                                         own, " at ", calls[own], "; rank ", 1 - own, " at ",
                                         calls[1 - own])));
  });
}

TEST(ExchangeTest, DifferentSizesAreFound) {
  OnRanks(3, {.check_order = true}, [](Exchange& exchange) {
    std::vector<char> buffer(30);
    // The sum is the same.
    exchange.StartGather(buffer.data(), exchange.rank() == 1 ? std::vector<int64_t>{10, 20, 0}
                                                             : std::vector<int64_t>{20, 10, 0});
    exchange.FinishGather();
    EXPECT_EQ(exchange.status().code(), absl::StatusCode::kInternal) << exchange.status();
  });
}

// Each rank sends 10 bytes to the other one; rank 1 expects more.
TEST(ExchangeTest, DifferentSizesOfAllToAllsAreFound) {
  OnRanks(2, {.check_order = true}, [](Exchange& exchange) {
    const auto own = static_cast<size_t>(exchange.rank());
    std::vector<char> send(10), receive(20);
    std::vector<int64_t> sent(2, 10), received(2, exchange.rank() == 1 ? 15 : 10);
    sent[own] = received[own] = 0;
    exchange.StartAllToAll(send.data(), sent, receive.data(), received);
    exchange.FinishAllToAll();
    const char* const calls[] = {"call 0, an all-to-all that sends 10 and receives 10 bytes",
                                 "call 0, an all-to-all that sends 10 and receives 15 bytes"};
    EXPECT_EQ(exchange.status(),
              absl::InternalError(Concat("the ranks are at different calls of the exchange: rank ",
                                         own, " at ", calls[own], "; rank ", 1 - own, " at ",
                                         calls[1 - own])));
  });
}

// Without comparing, a wrong size is still no read or write outside of a buffer.
TEST(ExchangeTest, AWrongSizeIsALoss) {
  OnRanks(2, {.timeout = absl::Seconds(20)}, [](Exchange& exchange) {
    std::vector<char> message(exchange.rank() == 0 ? 20 : 10);
    exchange.Broadcast(message);
    EXPECT_EQ(exchange.status().code(), absl::StatusCode::kUnavailable) << exchange.status();
  });
}

}  // namespace
}  // namespace moeserve
