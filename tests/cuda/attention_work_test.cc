// The work list and the splits of attention, and the blocks of the KV cache.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/cache/kv_cache.h"
#include "tests/cuda/device_array.h"

namespace moeserve::cuda {
namespace {

void CheckWork(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

TEST(CudaAttentionWorkTest, WorkListFallsBackWhereRoomEnds) {
  const std::vector<int32_t> position = {0, 255, 256, 1000, 5, 600, 900};
  const std::vector<int32_t> sequence = {0, 0, 0, 0, -1, 0, 0};
  DeviceArray<int32_t> d_position(position), d_sequence(sequence);
  const int tokens = 7, slots = 7;
  DeviceArray<uint8_t> memory(
      std::vector<uint8_t>(static_cast<size_t>(AttentionWorkBytes(tokens, slots, 20)), 0xff));
  const AttentionWork work = LayOutAttentionWork(memory.data(), tokens, slots);
  LaunchAttentionWork({tokens, d_position.data(), d_sequence.data(), nullptr, 0, 1001}, tokens, {},
                      256, work, nullptr);
  CheckWork(cudaDeviceSynchronize());
  std::vector<int32_t> count(1), token(slots + tokens), split(slots + tokens), slot(tokens);
  CheckWork(cudaMemcpy(count.data(), work.item_count, 4, cudaMemcpyDeviceToHost));
  ASSERT_EQ(count[0], 11);
  CheckWork(cudaMemcpy(token.data(), work.item_token, count[0] * 4, cudaMemcpyDeviceToHost));
  CheckWork(cudaMemcpy(split.data(), work.item_split, count[0] * 4, cudaMemcpyDeviceToHost));
  CheckWork(cudaMemcpy(slot.data(), work.slot_of_token, tokens * 4, cudaMemcpyDeviceToHost));
  token.resize(count[0]);
  split.resize(count[0]);
  // Contexts of 256 + 1 and 1000 + 1 positions get slots 0-1 and 2-5. For 601 and 901 no slots are
  // left.
  EXPECT_EQ(token, (std::vector<int32_t>{0, 1, 2, 2, 3, 3, 3, 3, 4, 5, 6}));
  EXPECT_EQ(split, (std::vector<int32_t>{-1, -1, 0, 1, 0, 1, 2, 3, -1, -1, -1}));
  EXPECT_EQ(slot, (std::vector<int32_t>{-1, -1, 0, 2, -1, -1, -1}));
}

TEST(CudaAttentionWorkTest, SplitsOfWindows) {
  EXPECT_EQ(MaxSplits(1, {}, 256), 1);
  EXPECT_EQ(MaxSplits(256, {}, 256), 1);
  EXPECT_EQ(MaxSplits(257, {}, 256), 2);
  for (int window : {1, 2, 16, 255, 256, 257, 258, 512, 513, 514, 700}) {
    int most = 0;
    for (int position = 0; position < 1500; ++position) {
      const int first = std::max(0, position - window + 1);
      most = std::max(most, position / 256 - first / 256 + 1);
    }
    EXPECT_EQ(MaxSplits(1500, {true, window}, 256), most) << window;
  }
}

// Without causality, the splits are those of what a row sees in a page table of any length.
TEST(CudaAttentionWorkTest, WorkListReadsLengths) {
  // Rows of padding have no sequence; sequence 1 has the second row of page tables.
  const std::vector<int32_t> position = {0, 300, 5, 9000};
  const std::vector<int32_t> sequence = {0, 1, -1, 1};
  const int stride = 7;
  std::vector<int32_t> tables(2 * stride, -1);
  tables[stride - 1] = 257;
  tables[2 * stride - 1] = 1024;
  DeviceArray<int32_t> d_position(position), d_sequence(sequence), d_tables(tables);
  const int tokens = 4, slots = 20;
  for (const int window : {0, 213}) {
    // No window belongs to a row behind the end of its table.
    const int used = window == 0 ? tokens : tokens - 1;
    DeviceArray<uint8_t> memory(
        std::vector<uint8_t>(static_cast<size_t>(AttentionWorkBytes(tokens, slots, 20)), 0xff));
    const AttentionWork work = LayOutAttentionWork(memory.data(), tokens, slots);
    StepView step{used, d_position.data(), d_sequence.data(), d_tables.data(), stride, 1024};
    step.lengths = d_tables.data() + stride - 1;
    LaunchAttentionWork(step, used, {false, window}, 256, work, nullptr);
    CheckWork(cudaDeviceSynchronize());
    std::vector<int32_t> count(1);
    CheckWork(cudaMemcpy(count.data(), work.item_count, 4, cudaMemcpyDeviceToHost));
    std::vector<int32_t> token(count[0]), split(count[0]);
    CheckWork(cudaMemcpy(token.data(), work.item_token, count[0] * 4, cudaMemcpyDeviceToHost));
    CheckWork(cudaMemcpy(split.data(), work.item_split, count[0] * 4, cudaMemcpyDeviceToHost));
    if (window == 0) {
      EXPECT_EQ(token, (std::vector<int32_t>{0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3}));
      EXPECT_EQ(split, (std::vector<int32_t>{0, 1, 0, 1, 2, 3, -1, 0, 1, 2, 3}));
    } else {
      // Positions 0 to 212, and 88 to 512.
      EXPECT_EQ(token, (std::vector<int32_t>{0, 1, 1, 1, 2}));
      EXPECT_EQ(split, (std::vector<int32_t>{-1, 0, 1, 2, -1}));
    }
  }
}

TEST(CudaAttentionWorkTest, SplitsOfWindowsOnBothSides) {
  EXPECT_EQ(MaxSplits(257, {false, 0}, 256), 2);
  EXPECT_EQ(MaxSplits(1500, {false, 1 << 30}, 256), 6);
  for (int window : {1, 2, 16, 128, 129, 130, 255, 256, 257, 258, 512, 700}) {
    int most = 0;
    for (int position = 0; position < 1500; ++position) {
      const int first = std::max(0, position - window + 1);
      const int last = std::min(1499, position + window - 1);
      most = std::max(most, last / 256 - first / 256 + 1);
    }
    EXPECT_EQ(MaxSplits(1500, {false, window}, 256), most) << window;
  }
}

TEST(CudaAttentionWorkTest, BlocksAreCopiedInEveryLayer) {
  const std::vector<KvLayerShape> shapes = {{2, 24}, {1, 4}, {3, 16}};
  for (const KvCacheType type : {KvCacheType::kF32, KvCacheType::kBF16, KvCacheType::kInt8}) {
    auto cache = CudaKvCache::Allocate(shapes, type, {5});
    ASSERT_TRUE(cache.ok()) << cache.status();
    const int scales = type == KvCacheType::kInt8 ? 2 * 6 * 16 * 4 : 0;
    EXPECT_EQ(CudaKvCache::BytesPerBlock(shapes, type),
              2 * 16 * (2 * 32 + 16 + 3 * 16) * ElementBytes(type) + scales);
    std::vector<std::vector<uint8_t>> before;
    const auto read = [&] {
      std::vector<std::vector<uint8_t>> all;
      CheckWork(cudaDeviceSynchronize());
      for (int l = 0; l < 3; ++l) {
        const KvLayerView view = cache->layer(l);
        for (const void* p : {view.keys, view.values}) {
          all.emplace_back(view.block_stride * 5 * ElementBytes(type));
          CheckWork(cudaMemcpy(all.back().data(), p, all.back().size(), cudaMemcpyDeviceToHost));
        }
      }
      return all;
    };
    for (const auto& bytes : read()) {
      ASSERT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0; }));
    }
    for (int l = 0; l < 3; ++l) {
      const KvLayerView view = cache->layer(l);
      for (void* p : {view.keys, view.values}) {
        std::vector<uint8_t> bytes(view.block_stride * 5 * ElementBytes(type));
        for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7 + i / 256);
        CheckWork(cudaMemcpy(p, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
      }
    }
    auto expected = read();
    cache->CopyPage(0, 3, 1, nullptr);
    for (auto& bytes : expected) {
      const size_t block = bytes.size() / 5;
      std::copy(bytes.begin() + 3 * block, bytes.begin() + 4 * block, bytes.begin() + block);
    }
    ASSERT_EQ(read(), expected);
  }
}

TEST(CudaAttentionWorkTest, SlotsTakeBoundedMemory) {
  EXPECT_EQ(AttentionSlots(1), 8192);
  EXPECT_EQ(AttentionSlots(32 * 132), 8192);
  EXPECT_EQ(AttentionSlots(64 * 132), (192 << 20) / (64 * 132 * 4));
  EXPECT_EQ(AttentionSlots(128 * 514), (192 << 20) / (128 * 514 * 4));
  EXPECT_EQ(AttentionSlots(1 << 20), 512);
}

}  // namespace
}  // namespace moeserve::cuda
