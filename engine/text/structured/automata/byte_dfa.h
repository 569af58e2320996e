// Deterministic automata (DFAs) over bytes, and the budget that limits their construction.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moeserve::structured {

// Distances are in bytes; values from kUnreachable on mean unreachable.
inline constexpr int64_t kUnreachable = int64_t{1} << 50;
inline constexpr int64_t kNoLimit = int64_t{1} << 40;
inline constexpr int32_t kDead = -1;

using ByteSet = std::bitset<256>;

// The time and memory left for one compilation. One thread at a time.
class CompileBudget {
 public:
  CompileBudget(int max_states, std::chrono::milliseconds time)
      : states_left_(max_states), end_(std::chrono::steady_clock::now() + time) {}

  // Counts `work` and returns InvalidArgument when the time is up, and in every later call. Cheap:
  // it reads the clock only once per 4096 units of work.
  Status Tick(int64_t work = 1);
  // Counts new states of an automaton with `num_classes` byte classes. Returns InvalidArgument if
  // the states or the memory of their tables exceed the limits.
  Status AddStates(int64_t count, int num_classes = 1);
  int64_t states_left() const { return states_left_; }
  // Returns a budget for a part of the compilation: the same time, and at most `max_states` states.
  CompileBudget Part(int64_t max_states) const {
    CompileBudget part = *this;
    part.states_left_ = std::min(states_left_, max_states);
    return part;
  }

 private:
  int64_t states_left_;
  int64_t cells_ = 0;
  int64_t work_ = 0;
  std::chrono::steady_clock::time_point end_;
};

// A deterministic automaton over bytes. Immutable after Finish().
struct ByteDfa {
  std::array<uint8_t, 256> class_of{};
  int num_classes = 0;
  std::vector<int32_t> next;       // [states][classes] next state; kDead if no match can follow
  std::vector<uint8_t> accepting;  // [states] 1: the text so far matches
  // [states] 1: the state is between two characters of a JSON string
  std::vector<uint8_t> boundary;
  std::vector<uint8_t> has_next;  // [states] 1: some byte may follow
  // [states] smallest number of bytes to an accepting state, using only bytes that are tokens by
  // themselves.
  std::vector<int64_t> distance;
  // [states] smallest cost to an accepting state: its distance, plus 1 for an end-of-sequence token
  // if a byte may follow that accepting state.
  std::vector<int64_t> end_distance;
  int64_t max_distance = 0;  // largest finite end_distance
  // True if no byte may follow any accepting state, so that no text needs an end-of-sequence token.
  bool ends_itself = true;

  static constexpr int32_t kStart = 0;

  int num_states() const { return static_cast<int>(accepting.size()); }
  int32_t Next(int32_t state, uint8_t byte) const {
    return next[static_cast<size_t>(state) * num_classes + class_of[byte]];
  }
  // Adds a state without transitions and returns its index.
  int32_t AddState(bool is_accepting, bool is_boundary);
  void SetNext(int32_t state, int byte_class, int32_t target) {
    next[static_cast<size_t>(state) * num_classes + byte_class] = target;
  }
  bool Matches(std::string_view text) const;

  // Removes transitions after which nothing can match and computes the distances. `spellable` is
  // the set of bytes that are tokens by themselves. In other comments, a finished automaton is one
  // on which Finish() was called.
  Status Finish(const ByteSet& spellable, CompileBudget* budget);
  // Returns whether the automaton matches no text. Finish() must have been called.
  bool empty() const { return !has_next[kStart] && !accepting[kStart]; }
};

using DfaPtr = std::shared_ptr<const ByteDfa>;

// Returns an automaton that accepts a JSON string, with its quotes, if `content` accepts the bytes
// between the quotes. Finish() is still to be called on it.
Result<ByteDfa> Quoted(const ByteDfa& content, CompileBudget* budget);

// Returns an automaton that accepts the texts that both `a` and `b` accept. Finish() is still to be
// called on it.
Result<ByteDfa> Intersection(const ByteDfa& a, const ByteDfa& b, CompileBudget* budget);

// Returns an automaton that accepts the texts that `a` accepts and `b` does not accept. Finish() is
// still to be called on it.
Result<ByteDfa> Difference(const ByteDfa& a, const ByteDfa& b, CompileBudget* budget);

// An automaton that tells apart the texts that it accepts.
struct LabeledDfa {
  ByteDfa dfa;
  std::vector<uint32_t> labels;  // [states] bit i: the text so far is accepted by automaton i
};

// Returns an automaton that accepts what `all` accepts, with labels that tell which of `parts`, at
// most 32, also accept it. Finish() is still to be called on it.
Result<LabeledDfa> Labeled(const ByteDfa& all, const std::vector<ByteDfa>& parts,
                           CompileBudget* budget);

// Returns an automaton that accepts those quoted strings of `dfa` that have `min` to `max`
// characters. Finish() is still to be called on it.
Result<ByteDfa> WithLength(const ByteDfa& dfa, int64_t min, int64_t max, CompileBudget* budget);

}  // namespace moeserve::structured
