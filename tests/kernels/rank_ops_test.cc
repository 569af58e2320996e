// The operations of ranks on every device: plans are divided as PlanPartsMemory divides them, and
// rows, columns and checksums are those of all ranks.
#include "kernels/rank_ops.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>

#include "kernels/exchange/loopback_transport.h"
#include "kernels/exchange/message_exchange.h"
#include "tests/support/backends.h"
#include "tests/support/device_rows.h"
#include "tests/support/plans.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

// Copies 4-byte elements from device memory.
template <typename T>
std::vector<T> Words(Backend& backend, const T* from, int64_t count) {
  if (count == 0) return {};
  std::vector<float> bits(static_cast<size_t>(count));
  const RowsView row{const_cast<std::remove_const_t<T>*>(from), DType::kF32, 1, count, count};
  backend.CopyToHost(row, bits);
  std::vector<T> words(bits.size());
  std::memcpy(words.data(), bits.data(), bits.size() * sizeof(float));
  return words;
}

template <typename T>
std::vector<T> HostWords(const T* from, int64_t count) {
  return {from, from + count};
}

// Compares a part in device memory with the same part in host memory.
void ExpectSamePart(Backend& backend, const RoutingPlan& found, const RoutingPlan& expected) {
  const int64_t count = expected.num_assignments;
  ASSERT_EQ(found.num_assignments, count);
  ASSERT_EQ(found.num_experts, expected.num_experts);
  ASSERT_EQ(found.rows, expected.rows);
  EXPECT_EQ(found.capacity, expected.capacity);
  const auto same = [&]<typename T>(const T* f, const T* e, int64_t n, const char* name) {
    EXPECT_EQ(Words(backend, f, n), HostWords(e, n)) << name;
  };
  same(found.expert_offsets, expected.expert_offsets, expected.num_experts + 1, "expert_offsets");
  same(found.expert_of_assignment, expected.expert_of_assignment, count, "expert_of_assignment");
  same(found.row_of_assignment, expected.row_of_assignment, count, "row_of_assignment");
  same(found.weight_of_assignment, expected.weight_of_assignment, count, "weight_of_assignment");
  same(found.row_offsets, expected.row_offsets, expected.rows + 1, "row_offsets");
  same(found.assignments_of_row, expected.assignments_of_row, count, "assignments_of_row");
}

class RankOpsTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  using Backends = std::vector<std::unique_ptr<Backend>>;

  std::unique_ptr<Backend> NewBackend() const {
    return std::move(CreateBackend(GetParam())).value();
  }

  // Runs `run` on so many ranks, each with a backend and a thread.
  void OnRanks(int ranks, const std::function<void(Backend&, Exchange&)>& run) const {
    std::vector<std::unique_ptr<Transport>> transports = LoopbackTransports(ranks);
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        MessageExchange exchange(std::move(transports[static_cast<size_t>(r)]),
                                 {.check_order = true});
        const std::unique_ptr<Backend> backend = NewBackend();
        run(*backend, exchange);
        EXPECT_TRUE(exchange.status().ok()) << exchange.status();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

// Equal shares of the rows; several ranks may have none.
std::vector<int64_t> RowBegins(int64_t rows, int ranks) {
  std::vector<int64_t> begins;
  for (int r = 0; r <= ranks; ++r) begins.push_back(rows * r / ranks);
  return begins;
}

struct DivideCase {
  int rows, experts, selected, ranks, without;  // `without`: the last experts have no owner
};
constexpr DivideCase kDivideCases[] = {
    {1, 4, 2, 2, 0},    {50, 8, 3, 1, 0}, {50, 8, 3, 2, 0},  {50, 8, 3, 4, 2},  {7, 3, 3, 8, 0},
    {300, 64, 8, 4, 0}, {40, 6, 6, 3, 3}, {256, 8, 2, 2, 0}, {513, 5, 2, 3, 1}, {700, 16, 1, 4, 0}};

TEST_P(RankOpsTest, PlansAreDividedAsOnTheHost) {
  const std::unique_ptr<Backend> backend = NewBackend();
  RankOps& ranks = *backend->rank_ops();
  Random random(5);
  // The memory of a slot serves plans of all sizes, one after another.
  for (int round = 0; round < 2; ++round) {
    for (const DivideCase& c : kDivideCases) {
      SCOPED_TRACE(::testing::Message()
                   << c.rows << " rows, " << c.experts << " experts, " << c.ranks << " ranks");
      std::vector<std::vector<int>> routes(static_cast<size_t>(c.rows));
      for (std::vector<int>& of_row : routes) {
        // A row may have no expert.
        for (int e = 0; e < c.experts && std::ssize(of_row) < c.selected; ++e) {
          if (random.Below(c.experts) < c.selected) of_row.push_back(e);
        }
      }
      const Grouped grouped = MakePlan(*backend, c.experts, routes);
      const RoutingPlan host = backend->HostPlan(0);
      const std::span<const int32_t> offsets = ranks.ExpertOffsets(grouped.plan);
      ASSERT_EQ(std::vector(offsets.begin(), offsets.end()),
                HostWords(host.expert_offsets, c.experts + 1));
      std::vector<int> owner(static_cast<size_t>(c.experts), kNoOwner);
      for (int e = 0; e < c.experts - c.without; ++e) owner[e] = random.Below(c.ranks);
      if (c.without > 0) owner.front() = kNoOwner;
      PlanPartsMemory memory;
      const std::vector<int64_t> row_begin = RowBegins(c.rows, c.ranks);
      for (int i = 0; i < 2 * c.ranks; ++i) {
        const int rank = i / 2;
        PlanOwners owners{
            .of_expert = owner, .ranks = c.ranks, .rank = rank, .places = c.experts - c.without};
        if (i % 2 == 1) owners.row_begin = row_begin;
        const PlanParts expected = memory.Divide(host, owners);
        if (rank % 2 == 0) owners.expert_offsets = offsets;
        const PlanParts found = ranks.Divide(grouped.plan, owners, rank % 2);
        EXPECT_EQ(found.rows_of_rank, expected.rows_of_rank);
        EXPECT_EQ(found.rows_for_rank, expected.rows_for_rank);
        if (i % 2 == 1) {
          EXPECT_EQ(Words(*backend, found.by_adder, expected.local.num_assignments),
                    HostWords(expected.by_adder, expected.local.num_assignments));
        }
        EXPECT_EQ(found.first, expected.first);
        EXPECT_GE(found.local.MostOfRow(), expected.local.MostOfRow());
        EXPECT_EQ(found.joint.MostOfRow(), found.local.MostOfRow());
        ExpectSamePart(*backend, found.local, expected.local);
        ExpectSamePart(*backend, found.joint, expected.joint);
      }
    }
  }
}

TEST_P(RankOpsTest, RowsOfAllRanksAreGathered) {
  constexpr int kCols = 37, kStride = 48;
  const std::vector<std::vector<int64_t>> parts = {{3, 0, 5}, {0, 0, 0}, {1, 2, 0}, {600, 20, 300}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    OnRanks(3, [&](Backend& backend, Exchange& exchange) {
      for (const std::vector<int64_t>& rows : parts) {
        // Two rows at the end are not exchanged.
        const int64_t all = rows[0] + rows[1] + rows[2] + 2;
        std::vector<float> values(static_cast<size_t>(all * kCols));
        for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251);
        const DeviceRows x = MakeRows(backend, all, kCols, kStride, dtype, nullptr);
        int64_t first = 0;
        for (int r = 0; r < exchange.rank(); ++r) first += rows[static_cast<size_t>(r)];
        const int64_t own = rows[static_cast<size_t>(exchange.rank())];
        if (own > 0) {
          backend.CopyFromHost({values.begin() + first * kCols, values.end()},
                               x.view.Rows(first, own));
        }
        backend.rank_ops()->StartGather(x.view, rows, exchange);
        backend.rank_ops()->FinishGather(exchange);
        const std::vector<float> found = HostRows(backend, x.view);
        for (size_t i = 0; i < found.size(); ++i) {
          if (static_cast<int64_t>(i) < (all - 2) * kCols) {
            ASSERT_EQ(found[i], values[i]) << "element " << i;
          } else {
            ASSERT_TRUE(std::isnan(found[i])) << "element " << i;
          }
        }
      }
    });
  }
}

TEST_P(RankOpsTest, ResultsGoToTheRanksThatAddThem) {
  constexpr int kCols = 37, kExperts = 9;
  for (const int rows : {1, 2, 40, 400}) {
    std::vector<std::vector<int>> routes(static_cast<size_t>(rows));
    Random random(rows);
    for (std::vector<int>& of_row : routes) {
      for (int e = 0; e < kExperts; ++e) {
        if (random.Below(3) == 0) of_row.push_back(e);
      }
    }
    for (const auto& [dtype, stride] :
         {std::pair(DType::kF32, 48), std::pair(DType::kBF16, 48), std::pair(DType::kBF16, 37)}) {
      OnRanks(3, [&, dtype = dtype, stride = stride](Backend& backend, Exchange& exchange) {
        const int rank = exchange.rank();
        const std::vector<int> owner = {0, 2, 2, 1, 0, 1, 1, 2, kNoOwner};
        const std::vector<int64_t> row_begin = RowBegins(rows, 3);
        const PlanOwners owners{.of_expert = owner,
                                .ranks = 3,
                                .rank = rank,
                                .places = kExperts - 1,
                                .row_begin = row_begin};
        const Grouped grouped = MakePlan(backend, kExperts, routes);
        PlanPartsMemory memory;
        const PlanParts expected = memory.Divide(backend.HostPlan(0), owners);
        const PlanParts parts = backend.rank_ops()->Divide(grouped.plan, owners, 0);
        const auto value = [](int expert, int64_t row, int column) {
          return static_cast<float>((expert * 31 + row * 7 + column) % 251);
        };
        std::vector<float> values;
        for (int a = 0; a < expected.local.num_assignments; ++a) {
          for (int c = 0; c < kCols; ++c) {
            values.push_back(value(expected.local.expert_of_assignment[a],
                                   expected.local.row_of_assignment[a], c));
          }
        }
        const int64_t count = expected.local.num_assignments;
        const DeviceRows own = MakeRows(backend, count, kCols, stride, dtype, nullptr);
        if (count > 0) backend.CopyFromHost(values, own.view);
        const int64_t stays = parts.rows_for_rank[static_cast<size_t>(rank)];
        const DeviceRows packed = MakeRows(backend, count - stays, kCols, stride, dtype, nullptr);
        const DeviceRows results =
            MakeRows(backend, expected.joint.num_assignments, kCols, stride, dtype, nullptr);
        for (int round = 0; round < 2; ++round) {
          backend.rank_ops()->StartScatter(own.view, parts, packed.view, results.view, exchange);
          backend.rank_ops()->FinishScatter(exchange);
        }
        const std::vector<float> found = HostRows(backend, results.view);
        int64_t exchanged = 0;
        for (const int64_t of_rank : parts.rows_of_rank) exchanged += of_rank;
        for (int64_t i = 0; i < std::ssize(found); ++i) {
          const int64_t a = i / kCols;
          const float f = found[static_cast<size_t>(i)];
          if (a < exchanged) {
            const int64_t row =
                expected.joint.row_of_assignment[a] + row_begin[static_cast<size_t>(rank)];
            ASSERT_EQ(
                f, value(expected.joint.expert_of_assignment[a], row, static_cast<int>(i % kCols)));
          } else {
            ASSERT_TRUE(std::isnan(f)) << "a result of an expert without an owner";
          }
        }
      });
    }
  }
}

TEST_P(RankOpsTest, TheLeaderGetsTheColumnsOfAll) {
  constexpr int kRows = 5, kWidth = 7;
  for (const int columns : {20, 21, 15, 6}) {
    OnRanks(3, [&](Backend& backend, Exchange& exchange) {
      std::vector<float> own(kRows * kWidth);
      const auto value = [](int row, int column) { return static_cast<float>(100 * row + column); };
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kWidth; ++c) {
          own[static_cast<size_t>(r * kWidth + c)] = value(r, exchange.rank() * kWidth + c);
        }
      }
      const DeviceRows part = MakeRows(backend, own, kWidth);
      const DeviceRows output =
          MakeRows(backend, kRows, columns, columns + 3, DType::kF32, nullptr);
      backend.rank_ops()->GatherColumns(part.view, output.view, exchange);
      const DeviceRows none = MakeRows(backend, 0, kWidth, kWidth, DType::kF32, nullptr);
      backend.rank_ops()->GatherColumns(none.view, output.view.Rows(0, 0), exchange);
      RowsView wide = output.view;
      wide.cols = columns + 3;
      const std::vector<float> found = HostRows(backend, wide);
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < columns + 3; ++c) {
          const float f = found[static_cast<size_t>(r * (columns + 3) + c)];
          if (exchange.rank() == 0 && c < columns) {
            ASSERT_EQ(f, value(r, c));
          } else {
            ASSERT_TRUE(std::isnan(f));
          }
        }
      }
    });
  }
}

TEST_P(RankOpsTest, ChecksumsDependOnAllBits) {
  const std::unique_ptr<Backend> backend = NewBackend();
  RankOps& ranks = *backend->rank_ops();
  Random random(9);
  for (const int rows : {1, 3, 400}) {
    constexpr int kCols = 33;
    std::vector<float> values = random.Normals(int64_t{rows} * kCols);
    const auto checksum = [&] { return ranks.Checksum(MakeRows(*backend, values, kCols).view); };
    const uint64_t sum = checksum();
    EXPECT_EQ(checksum(), sum);
    for (int i = 0; i < 20; ++i) {
      const auto at = static_cast<size_t>(random.Below(static_cast<int>(values.size())));
      const float old = values[at];
      values[at] = F32FromBits(BitsFromF32(old) ^ 1u << random.Below(32));
      EXPECT_NE(checksum(), sum) << "element " << at;
      values[at] = old;
    }
    std::swap(values.front(), values.back());
    EXPECT_NE(checksum(), sum);
  }
}

// An exchange that moves nothing, but says that it reads device memory.
class DeviceExchange final : public Exchange {
 public:
  int rank() const override { return 1; }
  int ranks() const override { return 2; }
  void StartGather(void*, std::span<const int64_t>) override { ADD_FAILURE() << "host memory"; }
  void FinishGather() override { ADD_FAILURE() << "host memory"; }
  bool reads_device_memory() const override { return true; }
  void StartDeviceGather(void* buffer, std::span<const int64_t> bytes, void* stream) override {
    started_.emplace_back(buffer, std::vector(bytes.begin(), bytes.end()), stream != nullptr);
  }
  void FinishDeviceGather() override { ++finished_; }
  void StartDeviceAllToAll(const void* send, std::span<const int64_t> send_bytes, void* receive,
                           std::span<const int64_t> receive_bytes, void* stream) override {
    sent_ = {send, std::vector(send_bytes.begin(), send_bytes.end())};
    started_.emplace_back(receive, std::vector(receive_bytes.begin(), receive_bytes.end()),
                          stream != nullptr);
  }
  void FinishDeviceAllToAll() override { ++finished_; }
  void Broadcast(std::span<char>) override {}
  void BroadcastWhenever(std::span<char>) override {}
  void GatherAtLeader(std::span<const char>, std::span<char>) override {}
  void Lose(int, std::string_view) override {}
  absl::Status status() const override { return absl::OkStatus(); }
  ExchangeCounts counts() const override { return {}; }

  std::vector<std::tuple<void*, std::vector<int64_t>, bool>> started_;
  std::pair<const void*, std::vector<int64_t>> sent_;
  int finished_ = 0;
};

TEST_P(RankOpsTest, AnExchangeMayReadDeviceMemory) {
  if (GetParam().device == "cpu") GTEST_SKIP() << "the memory of the device is that of the host";
  const std::unique_ptr<Backend> backend = NewBackend();
  const DeviceRows x = MakeRows(*backend, 5, 8, 16, DType::kBF16, nullptr);
  DeviceExchange exchange;
  const std::vector<int64_t> rows = {2, 3};
  for (int i = 1; i <= 2; ++i) {
    backend->rank_ops()->StartGather(x.view, rows, exchange);
    EXPECT_EQ(exchange.finished_, i - 1);
    backend->rank_ops()->FinishGather(exchange);
    EXPECT_EQ(exchange.finished_, i);
    const auto& [buffer, bytes, stream] = exchange.started_.back();
    EXPECT_EQ(buffer, x.view.data);
    EXPECT_EQ(bytes, (std::vector<int64_t>{2 * 32, 3 * 32}));
    EXPECT_TRUE(stream);
  }
  // Rank 1 owns the second expert and adds the results of rows 2 and 3.
  const Grouped grouped = MakePlan(*backend, 2, {{0, 1}, {1}, {0, 1}, {0}});
  const std::vector<int> owner = {0, 1};
  const std::vector<int64_t> row_begin = {0, 2, 4};
  const PlanParts parts = backend->rank_ops()->Divide(
      grouped.plan,
      {.of_expert = owner, .ranks = 2, .rank = 1, .places = 2, .row_begin = row_begin}, 0);
  const DeviceRows packed = MakeRows(*backend, 2, 8, 16, DType::kBF16, nullptr);
  const DeviceRows results = MakeRows(*backend, 3, 8, 16, DType::kBF16, nullptr);
  backend->rank_ops()->StartScatter(x.view.Rows(0, 3), parts, packed.view, results.view, exchange);
  backend->rank_ops()->FinishScatter(exchange);
  EXPECT_EQ(exchange.finished_, 3);
  EXPECT_EQ(exchange.sent_.first, packed.view.data);
  EXPECT_EQ(exchange.sent_.second, (std::vector<int64_t>{2 * 32, 0}));
  EXPECT_EQ(std::get<0>(exchange.started_.back()), results.view.data);
  EXPECT_EQ(std::get<1>(exchange.started_.back()), (std::vector<int64_t>{2 * 32, 32}));
}

// One CPU backend, because its instruction set does not matter.
std::vector<BackendOptions> RankBackends() {
  std::vector<BackendOptions> backends = AvailableBackends(1);
  while (backends.size() > 1 && backends[1].device == "cpu") backends.erase(backends.begin());
  return backends;
}

INSTANTIATE_TEST_SUITE_P(Backends, RankOpsTest, ::testing::ValuesIn(RankBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
