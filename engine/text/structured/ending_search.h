// Searches for a way to complete a text with few tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "engine/text/structured/compiled.h"

namespace moeserve::structured {

// A beam search over tokens: of the states that some number of tokens can reach, it follows those
// that the fewest bytes complete. Free text may be cut off, so it needs no ending. Deterministic,
// and its work is limited: it can miss an ending. One thread at a time.
class EndingSearch {
 public:
  // Both must outlive the object. `pool` holds the frames below those that are given to Find(); at
  // the end of a search it is as before.
  EndingSearch(const Compiled* compiled, StackPool* pool) : compiled_(*compiled), pool_(*pool) {}

  // Returns tokens after which one of `tops` can be completed such that it takes at most `most`
  // tokens altogether. The tokens after the returned ones, if any, have one byte each.
  std::optional<std::vector<TokenId>> Find(const std::vector<Frame>& tops, int64_t most);

  // Whether no token, or at most `most` tokens of one byte each, must follow one of `tops`.
  bool EndsWithin(const std::vector<Frame>& tops, int64_t most) const;

 private:
  struct Item {
    Frame frame;
    int64_t distance = 0;
    int32_t parent = -1;  // index into items_
    TokenId token = 0;
  };

  const Matcher& matcher() const { return compiled_.matcher(); }
  const VocabularyIndex& vocabulary() const { return compiled_.vocabulary(); }
  bool Overworked() const;
  bool Search(const std::vector<Frame>& tops, int64_t most, size_t width);
  void Add(const Frame& frame, TokenId token);
  void AddAt(const std::vector<Frame>& frames, int32_t node);
  // Add the states that one token can reach from `top`.
  void Follow(const Frame& top);
  void FollowScalar(const Frame& top);
  void FollowKey(const Frame& top, int32_t keys);
  void FollowSpecial(const Frame& top);
  // Adds the states that tokens below trie node `from` reach; `tops` are the frames after its path.
  void Walk(const std::vector<Frame>& tops, int32_t from);
  // As above, with the byte of `node` still to be read.
  void WalkInto(const std::vector<Frame>& tops, int32_t node);
  // Returns a hash in which states are equal that are completed by the same tokens.
  uint64_t Hash(const Frame& top) const;

  const Compiled& compiled_;
  StackPool& pool_;
  std::vector<Item> items_;
  std::vector<int32_t> next_;  // the items of the next level
  absl::flat_hash_set<uint64_t> known_;
  int64_t work_end_ = 0;
  int32_t parent_ = -1;  // the item that is followed
  int64_t left_ = 0;     // number of tokens that may follow an item of the next level
  int32_t found_ = -1;
};

}  // namespace moeserve::structured
