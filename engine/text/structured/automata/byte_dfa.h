// Deterministic automata over bytes, and the budget that bounds their construction.
#pragma once

#include <array>
#include <bitset>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moeserve::structured {

// Distances are in bytes; values from this one on mean unreachable.
inline constexpr int64_t kUnreachable = int64_t{1} << 50;
inline constexpr int64_t kNoLimit = int64_t{1} << 40;
inline constexpr int32_t kDead = -1;

using ByteSet = std::bitset<256>;

// The remaining time and memory of one compilation. One thread at a time.
class CompileBudget {
 public:
  CompileBudget(int max_states, std::chrono::milliseconds time)
      : states_left_(max_states), end_(std::chrono::steady_clock::now() + time) {}

  // InvalidArgument when the time is up. Cheap: reads the clock only every few hundred units of
  // work.
  Status Tick(int64_t work = 1);
  // Counts new states of an automaton with `num_classes` byte classes. InvalidArgument when the
  // states or the memory of their tables exceed the limits.
  Status AddStates(int64_t count, int num_classes = 1);
  int64_t states_left() const { return states_left_; }

 private:
  int64_t states_left_;
  int64_t cells_ = 0;
  int64_t work_ = 0;
  std::chrono::steady_clock::time_point end_;
};

// Immutable once finished.
struct ByteDfa {
  std::array<uint8_t, 256> class_of{};
  int num_classes = 0;
  std::vector<int32_t> next;       // [states, classes]; kDead where no match can follow
  std::vector<uint8_t> accepting;  // [states]
  std::vector<uint8_t> boundary;   // [states]; between two characters of a JSON string
  std::vector<uint8_t> has_next;   // [states]; some byte may follow
  // [states]; the fewest spellable bytes to an accepting state.
  std::vector<int64_t> distance;
  // [states]; the same, plus one end-of-sequence token if that accepting state has a next byte.
  std::vector<int64_t> end_distance;
  int64_t max_distance = 0;  // largest finite end_distance
  bool ends_itself = true;   // no accepting state has a next byte, so the end needs no mark

  static constexpr int32_t kStart = 0;

  int num_states() const { return static_cast<int>(accepting.size()); }
  int32_t Next(int32_t state, uint8_t byte) const {
    return next[static_cast<size_t>(state) * num_classes + class_of[byte]];
  }
  // Adds a state without transitions.
  int32_t AddState(bool is_accepting, bool is_boundary);
  void SetNext(int32_t state, int byte_class, int32_t target) {
    next[static_cast<size_t>(state) * num_classes + byte_class] = target;
  }
  bool Matches(std::string_view text) const;

  // Removes transitions after which nothing can match and computes the distances. `spellable`: the
  // bytes that are tokens by themselves.
  Status Finish(const ByteSet& spellable, CompileBudget* budget);
  // Whether no text matches. For finished automata.
  bool empty() const { return !has_next[kStart] && !accepting[kStart]; }
};

using DfaPtr = std::shared_ptr<const ByteDfa>;

// Accepts the JSON strings, with quotes, whose content `content` accepts. Not finished.
Result<ByteDfa> Quoted(const ByteDfa& content, CompileBudget* budget);

// Accepts the texts that both accept. Not finished.
Result<ByteDfa> Intersection(const ByteDfa& a, const ByteDfa& b, CompileBudget* budget);

// Accepts those quoted strings of `dfa` that have `min` to `max` characters. Not finished.
Result<ByteDfa> WithLength(const ByteDfa& dfa, int64_t min, int64_t max, CompileBudget* budget);

}  // namespace moeserve::structured
