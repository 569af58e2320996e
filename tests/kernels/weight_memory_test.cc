// Memory for weights: every part is zeroed, aligned and of its own, and lives as long as its owner.

#include "kernels/cpu/weights/weight_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

namespace moeserve::cpu {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

struct Filled {
  WeightMemory::Part part;
  size_t bytes;
  int value;
};

// Takes a part, checks that it is zeroed, and fills it.
Filled Take(WeightMemory& memory, size_t bytes, int value) {
  Filled f{std::move(memory.Allocate(bytes)).value(), bytes, value};
  EXPECT_EQ(reinterpret_cast<uintptr_t>(f.part.data) % 64, 0u);
  for (size_t i = 0; i < bytes; ++i) {
    if (f.part.data[i] != 0) {
      ADD_FAILURE() << "byte " << i << " of " << bytes << " is not zero";
      break;
    }
  }
  if (bytes > 0) std::memset(f.part.data, value, bytes);
  return f;
}

void ExpectFilled(const Filled& f) {
  const std::vector<char> expected(f.bytes, static_cast<char>(f.value));
  EXPECT_TRUE(f.bytes == 0 || std::memcmp(f.part.data, expected.data(), f.bytes) == 0)
      << f.bytes << " bytes";
}

TEST(WeightMemoryTest, PartsAreZeroedAlignedAndSeparate) {
  auto memory = std::make_unique<WeightMemory>();
  std::vector<Filled> parts;
  int value = 1;
  for (size_t bytes : {size_t{1}, size_t{64}, size_t{65}, size_t{0}, 3 * kMiB + 1, size_t{100'000},
                       9 * kMiB, 8 * kMiB, 8 * kMiB, 7 * kMiB, size_t{5}, 8 * kMiB, 8 * kMiB}) {
    parts.push_back(Take(*memory, bytes, value++));
  }
  memory.reset();
  for (const Filled& f : parts) ExpectFilled(f);
}

TEST(WeightMemoryTest, SmallPartsShareBuffers) {
  WeightMemory memory;
  std::set<const HostBuffer*> buffers;
  std::vector<Filled> parts;
  for (int i = 0; i < 200; ++i) {
    parts.push_back(Take(memory, kMiB / 2, 1 + i % 100));
    buffers.insert(parts.back().part.owner.get());
  }
  // 100 MiB: buffers that grow to 32 MiB, the first ones smaller.
  EXPECT_LE(buffers.size(), 12u);
  for (const HostBuffer* b : buffers) EXPECT_LE(b->bytes(), 32 * kMiB);
  // The first part does not take a large buffer.
  EXPECT_EQ(parts.front().part.owner->bytes(), kMiB / 2);
  for (const Filled& f : parts) ExpectFilled(f);
}

TEST(WeightMemoryTest, LargePartsHaveTheirOwnBuffer) {
  WeightMemory memory;
  const Filled small = Take(memory, kMiB, 1), large = Take(memory, 9 * kMiB, 2),
               next = Take(memory, kMiB, 3);
  EXPECT_EQ(large.part.owner->bytes(), 9 * kMiB);
  EXPECT_NE(large.part.owner, next.part.owner);
  ExpectFilled(small);
  ExpectFilled(large);
  ExpectFilled(next);
}

TEST(WeightMemoryTest, TooMuchIsAnError) {
  WeightMemory memory;
  const auto part = memory.Allocate(size_t{1} << 62);
  EXPECT_EQ(part.status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace moeserve::cpu
