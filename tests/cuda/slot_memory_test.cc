// The memory of slots, and slots that cannot start.
#include "kernels/cuda/slots/slot_memory.h"

#include <gtest/gtest.h>

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
