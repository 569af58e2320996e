// Which tokens keep an automaton going.
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

// A trie node at which an automaton reaches an accepting end.
struct DfaExit {
  int32_t node;
  int32_t chars;  // boundaries reached on the way
};

struct DfaMask {
  std::vector<uint32_t> tokens;  // [mask_words]; those that end inside the automaton
  std::vector<DfaExit> exits;
  int64_t visited = 0;  // trie nodes looked at to make it
};

// How a walk counts the characters of a string and how far from the end it may get.
struct WalkLimits {
  bool counted = false;
  int64_t count = 0;
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
  // Only tokens after which at most this many bytes complete the value.
  int64_t max_rest = kUnreachable - 1;
  bool at_root = false;  // the end of the text has to be told by a token where it could go on
};

// Sets the bits of tokens that lead from `state` to a state in which the automaton can go on, and
// appends where it ends. Clears nothing. Returns the number of trie nodes looked at.
int64_t WalkDfa(const VocabularyIndex& vocabulary, const ByteDfa& dfa, int32_t state,
                const WalkLimits& limits, std::span<uint32_t> tokens, std::vector<DfaExit>* exits);

// Results of walks without limits but one on the number of characters, by automaton and state. Any
// number of threads.
class DfaMaskCache {
 public:
  // `max_bytes`: what does not fit is computed anew each time.
  explicit DfaMaskCache(size_t max_bytes) : max_bytes_(max_bytes) {}

  // `room`: characters that may follow; the vocabulary's max_depth() or more: no limit.
  std::shared_ptr<const DfaMask> Get(const VocabularyIndex& vocabulary, const ByteDfa& dfa,
                                     int32_t dfa_id, int32_t state, bool at_root, int64_t room);

 private:
  const size_t max_bytes_;
  std::mutex mutex_;
  size_t bytes_ = 0;
  std::map<std::tuple<int32_t, int32_t, bool, int64_t>, std::shared_ptr<const DfaMask>> masks_;
};

}  // namespace moeserve::structured
