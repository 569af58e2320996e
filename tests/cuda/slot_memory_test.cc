// Slots for experts: their memory, and what products find there.
#include "kernels/cuda/slots/slot_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "kernels/cuda/slots/expert_slots.h"
#include "tests/cuda/bank_formats.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

using cuda::BankMemory;
using cuda::CudaLinearBank;
using cuda::SlotMemory;

TEST(SlotMemoryTest, PlacesDoNotOverlapAndHolesJoin) {
  constexpr int64_t kBytes = 64 * SlotMemory::kAlignment;
  SlotMemory memory(kBytes + 17);
  std::map<int64_t, int64_t> taken;  // offset to bytes
  Random random(5);
  for (int turn = 0; turn < 2000; ++turn) {
    if (random.Below(2) == 0 && !taken.empty()) {
      auto at = taken.begin();
      std::advance(at, random.Below(static_cast<int>(taken.size())));
      memory.Give(at->first, at->second);
      taken.erase(at);
      continue;
    }
    const int64_t bytes = 1 + random.Below(9 * static_cast<int>(SlotMemory::kAlignment));
    const std::optional<int64_t> place = memory.Take(bytes);
    // Whether there is a hole.
    int64_t end = 0;
    bool fits = false;
    for (const auto& [offset, size] : taken) {
      fits = fits || offset - end >= SlotMemory::RoundUp(bytes);
      end = offset + SlotMemory::RoundUp(size);
    }
    fits = fits || kBytes - end >= SlotMemory::RoundUp(bytes);
    ASSERT_EQ(place.has_value(), fits) << "turn " << turn;
    if (!place.has_value()) continue;
    ASSERT_EQ(*place % SlotMemory::kAlignment, 0);
    const auto next = taken.lower_bound(*place);
    ASSERT_TRUE(next == taken.end() || next->first >= *place + bytes);
    if (next != taken.begin()) {
      const auto before = std::prev(next);
      ASSERT_LE(before->first + before->second, *place);
    }
    ASSERT_LE(*place + bytes, kBytes);
    taken[*place] = bytes;
  }
  for (const auto& [offset, bytes] : taken) memory.Give(offset, bytes);
  EXPECT_EQ(memory.holes(), 1);
  EXPECT_EQ(memory.Take(kBytes), 0);
  EXPECT_FALSE(memory.Take(1).has_value());
}

// A plan with all arrays.
struct WholePlan {
  DevicePlan plan;
  cuda::DeviceMemory weights, row_offsets, assignments;

  WholePlan(int experts, const std::vector<std::vector<int>>& routes) : plan(experts, routes, 0) {
    const std::vector<float> ones(plan.row.size(), 1.0f);
    std::vector<int32_t> offsets = {0}, of_rows;
    for (size_t r = 0; r < routes.size(); ++r) {
      for (size_t a = 0; a < plan.row.size(); ++a) {
        if (plan.row[a] == static_cast<int32_t>(r)) of_rows.push_back(static_cast<int32_t>(a));
      }
      offsets.push_back(static_cast<int32_t>(of_rows.size()));
    }
    weights = Upload(ones.data(), ones.size() * sizeof(float));
    row_offsets = Upload(offsets.data(), offsets.size() * sizeof(int32_t));
    assignments = Upload(of_rows.data(), of_rows.size() * sizeof(int32_t));
    plan.plan.weight_of_assignment = weights.as<float>();
    plan.plan.row_offsets = row_offsets.as<int32_t>();
    plan.plan.assignments_of_row = assignments.as<int32_t>();
  }
};

cuda::CudaExpertSlots HostSlots() {
  return {nullptr,
          [](LinearBankShape shape) {
            return CudaLinearBank::Create(std::move(shape), BankMemory::kHost);
          },
          [](int64_t) {}};
}

// One block is used again and again, so that some of the chosen experts are there when more are
// chosen than fit.
TEST(ExpertSlotsTest, EachCallFindsItsExperts) {
  constexpr int kExperts = 7;
  cuda::CudaExpertSlots slots = HostSlots();
  LinearBankShape shape = BankFormats()[1].shape;
  shape.in_features = {64};
  shape.out_features = {64, 128, 0, 192, 64, 128, 40};
  std::vector<std::unique_ptr<LinearBank>> banks;
  for (int i = 0; i < 2; ++i) {
    banks.push_back(std::move(slots.NewBank(shape)).value());
    for (int e = 0; e < kExperts; ++e) {
      LoadHalf(static_cast<CudaLinearBank&>(*banks.back()), e, LinearBank::Half::kMain);
    }
  }
  LinearBank* const block[] = {banks[0].get(), banks[1].get()};
  slots.AddBlock(block);
  ASSERT_TRUE(slots.Start(slots.bytes() / 2).ok());
  Random random(9);
  uint64_t turns_with_waves = 0;
  for (int turn = 0; turn < 150; ++turn) {
    const int rarity = 1 + random.Below(5);
    std::vector<std::vector<int>> routes(3);
    for (std::vector<int>& row : routes) {
      for (int e = 0; e < kExperts; ++e) {
        if (random.Below(rarity) == 0) row.push_back(e);
      }
    }
    const WholePlan whole(kExperts, routes);
    const DevicePlan& plan = whole.plan;
    int64_t next = 0;
    int calls = 0;
    slots.Run(0, plan.plan, plan.plan, [&](const RoutingPlan& part, int64_t first) {
      ++calls;
      ASSERT_EQ(first, next);
      std::vector<int32_t> offsets(kExperts + 1);
      ASSERT_EQ(cudaMemcpy(offsets.data(), part.expert_offsets, offsets.size() * sizeof(int32_t),
                           cudaMemcpyDeviceToHost),
                cudaSuccess);
      next += offsets.back();
      for (int e = 0; e < kExperts; ++e) {
        if (offsets[static_cast<size_t>(e)] == offsets[static_cast<size_t>(e) + 1]) continue;
        for (const auto& linear : banks) {
          const auto& bank = static_cast<const CudaLinearBank&>(*linear);
          const std::span<const char> expected = bank.host_image(e);
          std::vector<char> found(expected.size());
          ASSERT_EQ(cudaMemcpy(found.data(), bank.weights() + bank.entry(e).weights, found.size(),
                               cudaMemcpyDeviceToHost),
                    cudaSuccess);
          ASSERT_EQ(std::memcmp(found.data(), expected.data(), found.size()), 0)
              << "turn " << turn << ", expert " << e;
        }
      }
    });
    if (::testing::Test::HasFatalFailure()) return;
    EXPECT_EQ(next, plan.assignments());
    EXPECT_GE(calls, 1);
    turns_with_waves += calls > 1;
  }
  EXPECT_GT(turns_with_waves, 20u);
  EXPECT_GT(slots.counts().hit_bytes, 0u);
  EXPECT_GT(slots.counts().copied_bytes, slots.counts().hit_bytes / 4);
}

TEST(ExpertSlotsTest, RefusesMemoryThatIsTooSmallOrNotThere) {
  int64_t used = 0;
  cuda::CudaExpertSlots slots(
      nullptr,
      [](LinearBankShape shape) {
        return CudaLinearBank::Create(std::move(shape), BankMemory::kHost);
      },
      [&used](int64_t bytes) { used += bytes; });
  LinearBankShape shape = BankFormats()[1].shape;
  shape.in_features = {64};
  shape.out_features = {64, 128, 0};
  std::vector<std::unique_ptr<LinearBank>> banks;
  for (int i = 0; i < 2; ++i) banks.push_back(std::move(slots.NewBank(shape)).value());
  LinearBank* const block[] = {banks[0].get(), banks[1].get()};
  EXPECT_EQ(slots.AddBlock(block), 0);
  constexpr int64_t kLargest = 2 * 128 * 64 * 2;
  EXPECT_EQ(slots.bytes(), kLargest * 3 / 2);
  const absl::Status small = slots.Start(kLargest - 1);
  EXPECT_EQ(small.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(small.message(),
            "device memory for experts: expected at least 32768 bytes, those of the largest "
            "expert, found 32767");
  EXPECT_EQ(used, 0);
  ASSERT_TRUE(slots.Start(kLargest).ok());
  EXPECT_TRUE(slots.in_force());
  EXPECT_EQ(used, kLargest);
}

}  // namespace
}  // namespace moeserve::testing
