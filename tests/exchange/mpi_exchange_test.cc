// The exchange by MPI. Every rank runs this program; rank 0 prints the results.
//
//   mpirun -n 2 mpi_exchange_test SHARED_OBJECT [--large] [GoogleTest's options]
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

#include "kernels/exchange/message_exchange.h"
#include "kernels/exchange/mpi_transport.h"
#include "tests/exchange/exchange_cases.h"

namespace moeserve {
namespace {

Exchange* g_exchange = nullptr;

class MpiExchangeTest : public ::testing::Test {
 public:
  explicit MpiExchangeTest(std::function<void(Exchange&)> run) : run_(std::move(run)) {}
  void TestBody() override { run_(*g_exchange); }

 private:
  const std::function<void(Exchange&)> run_;
};

int Run(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "expected the path of the shared object\n");
    return 2;
  }
  Result<std::unique_ptr<Transport>> transport = OpenMpiTransport(argv[1]);
  if (!transport.ok()) {
    std::fprintf(stderr, "%s\n", transport.status().ToString().c_str());
    return 1;
  }
  // Large parts take long where ranks share their cores with other work.
  MessageExchange exchange(std::move(*transport),
                           {.timeout = absl::Minutes(5), .check_order = true});
  g_exchange = &exchange;
  if (exchange.ranks() < 2) {
    std::fprintf(stderr, "expected at least 2 ranks, found %d\n", exchange.ranks());
    return 1;
  }
  std::vector<ExchangeCase> cases = ExchangeCases();
  if (argc > 2 && std::string_view(argv[2]) == "--large") {
    cases.push_back({"GatherLargeParts", GatherLargeParts});
    cases.push_back({"ExchangeLargeParts", ExchangeLargeParts});
  }
  for (const ExchangeCase& test : cases) {
    ::testing::RegisterTest(
        "MpiExchange", test.name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
        [&test]() -> ::testing::Test* { return new MpiExchangeTest(test.run); });
  }
  if (exchange.rank() != 0) {
    ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
  }
  const int result = RUN_ALL_TESTS();
  if (result != 0) std::fprintf(stderr, "rank %d failed\n", exchange.rank());
  return result;
}

}  // namespace
}  // namespace moeserve

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return moeserve::Run(argc, argv);
}
