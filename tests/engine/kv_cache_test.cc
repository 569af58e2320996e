// Compares cache blocks under random use with a simple model of their required state.

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "engine/memory/paged_pool.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

std::vector<TokenId> CacheTokens(int kind, int blocks) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < blocks * kPageTokens; ++i) {
    // Sequences of kind k share their first k blocks and differ afterwards.
    tokens.push_back(i / kPageTokens < kind ? i : 1000 * kind + i);
  }
  return tokens;
}

// Holders allocate, find, publish, share and free blocks at random. The counts must add up, a found
// block must have the requested tokens, and no block in use may be handed out again.
TEST(PagedPoolTest, HoldsUnderRandomUse) {
  constexpr int kBlocks = 40;
  struct Holder {
    std::vector<int32_t> blocks;
    std::vector<TokenId> tokens;
    std::string salt;
    int published = 0;
  };
  PagedPool manager(kBlocks, true);
  Random random(5);
  std::vector<Holder> holders;
  // The salt, and all tokens up to the block's end, that were last stored in each block.
  std::map<int32_t, std::pair<std::string, std::vector<TokenId>>> content;
  int64_t found = 0, evictions = 0;
  for (int step = 0; step < 20000; ++step) {
    const int action = random.Below(4);
    if (action == 0 && holders.size() < 12) {
      Holder h;
      h.tokens = CacheTokens(random.Below(6), 6);
      h.salt = random.Below(4) == 0 ? "salt" : "";
      h.blocks = manager.TakePrefix(h.tokens, h.salt, 6);
      for (size_t i = 0; i < h.blocks.size(); ++i) {
        const auto& [salt, tokens] = content.at(h.blocks[i]);
        ASSERT_EQ(salt, h.salt);
        ASSERT_TRUE(std::equal(tokens.begin(), tokens.end(), h.tokens.begin()));
        ASSERT_EQ(tokens.size(), (i + 1) * kPageTokens);
      }
      found += static_cast<int64_t>(h.blocks.size());
      h.published = static_cast<int>(h.blocks.size());
      holders.push_back(std::move(h));
    } else if (action == 1 && !holders.empty()) {
      Holder& h = holders[random.Below(static_cast<int>(holders.size()))];
      if (h.blocks.size() < 6 && manager.available() > 0) {
        const int64_t evictable = manager.evictable();
        const int32_t block = manager.Take();
        evictions += manager.evictable() < evictable;
        for (const Holder& other : holders) {
          ASSERT_EQ(std::count(other.blocks.begin(), other.blocks.end(), block), 0);
        }
        content.erase(block);
        h.blocks.push_back(block);
      }
    } else if (action == 2 && !holders.empty()) {
      Holder& h = holders[random.Below(static_cast<int>(holders.size()))];
      if (h.published < static_cast<int>(h.blocks.size())) {
        const int i = h.published++;
        manager.Publish(h.blocks[i], i == 0 ? -1 : h.blocks[i - 1], h.salt,
                        std::span<const TokenId>(h.tokens).subspan(
                            static_cast<size_t>(i) * kPageTokens, kPageTokens));
        content[h.blocks[i]] = {h.salt,
                                {h.tokens.begin(), h.tokens.begin() + (i + 1) * kPageTokens}};
      }
    } else if (!holders.empty()) {
      const int at = random.Below(static_cast<int>(holders.size()));
      while (!holders[at].blocks.empty()) {
        manager.Release(holders[at].blocks.back());
        holders[at].blocks.pop_back();
      }
      holders.erase(holders.begin() + at);
    }
    std::set<int32_t> held;
    for (const Holder& h : holders) held.insert(h.blocks.begin(), h.blocks.end());
    ASSERT_EQ(manager.used(), static_cast<int64_t>(held.size()));
    ASSERT_EQ(manager.used() + manager.available(), kBlocks);
  }
  EXPECT_GT(found, 1000);
  EXPECT_GT(evictions, 100);
}

TEST(PagedPoolTest, EndsAreForgottenBeforeBeginnings) {
  PagedPool manager(4, true);
  const std::vector<TokenId> tokens = CacheTokens(0, 4);
  std::vector<int32_t> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(manager.Take());
    manager.Publish(blocks[i], i == 0 ? -1 : blocks[i - 1], "",
                    std::span<const TokenId>(tokens).subspan(static_cast<size_t>(i) * kPageTokens,
                                                             kPageTokens));
  }
  for (int i = 3; i >= 0; --i) manager.Release(blocks[i]);
  EXPECT_EQ(manager.Take(), blocks[3]);
  EXPECT_EQ(manager.TakePrefix(tokens, "", 4),
            (std::vector<int32_t>{blocks[0], blocks[1], blocks[2]}));
}

TEST(PagedPoolTest, NothingIsFoundWithoutPrefixCache) {
  PagedPool manager(2, false);
  const std::vector<TokenId> tokens = CacheTokens(0, 1);
  const int32_t block = manager.Take();
  manager.Publish(block, -1, "", tokens);
  EXPECT_TRUE(manager.TakePrefix(tokens, "", 1).empty());
  manager.Release(block);
  EXPECT_EQ(manager.evictable(), 0);
}

}  // namespace
}  // namespace moeserve::testing
