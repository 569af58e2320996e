// Masks of the tokens that an automaton accepts from a state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <tuple>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/vocabulary_index.h"

namespace moeserve::structured {

// A trie node whose bytes lead an automaton to an accepting state.
struct DfaExit {
  int32_t node;
  int32_t chars;  // characters completed on the way
};

struct DfaMask {
  std::vector<uint32_t> tokens;  // [mask_words]; tokens after which the automaton can continue
  std::vector<DfaExit> exits;
  int64_t visited = 0;  // trie nodes visited to compute it
};

// Limits of a walk on the characters of a string and on the bytes that complete the value.
struct WalkLimits {
  bool counted = false;
  int64_t count = 0;
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
  // Only tokens after which at most this many bytes complete the value.
  int64_t max_rest = kUnreachable - 1;
  bool at_root = false;  // the value is the whole text: ending it may take an end-of-sequence token
};

// Sets the bits of the tokens that lead from `state` to a state in which the automaton can
// continue, and appends the nodes at which it accepts to `exits`. Clears no bits. Returns the
// number of trie nodes visited.
int64_t WalkDfa(const VocabularyIndex& vocabulary, const ByteDfa& dfa, int32_t state,
                const WalkLimits& limits, std::span<uint32_t> tokens, std::vector<DfaExit>* exits);

// Cached results of walks whose only limit is the number of characters, by automaton and state. For
// any number of threads.
class DfaMaskCache {
 public:
  // Results beyond `max_bytes` are not cached.
  explicit DfaMaskCache(size_t max_bytes) : max_bytes_(max_bytes) {}

  // `room`: characters that may follow. Values from the vocabulary's max_depth() on are no limit.
  std::shared_ptr<const DfaMask> Get(const VocabularyIndex& vocabulary, const ByteDfa& dfa,
                                     int32_t dfa_id, int32_t state, bool at_root, int64_t room);

 private:
  const size_t max_bytes_;
  std::mutex mutex_;
  size_t bytes_ = 0;
  std::map<std::tuple<int32_t, int32_t, bool, int64_t>, std::shared_ptr<const DfaMask>> masks_;
};

}  // namespace moeserve::structured
