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

// Distances are counted in bytes; anything from here on means that there is no way.
inline constexpr int64_t kUnreachable = int64_t{1} << 50;
inline constexpr int64_t kNoLimit = int64_t{1} << 40;
inline constexpr int32_t kDead = -1;

using ByteSet = std::bitset<256>;

// What one compilation may still use. Not for use by two threads at the same time.
class CompileBudget {
 public:
  CompileBudget(int max_states, std::chrono::milliseconds time)
      : states_left_(max_states), end_(std::chrono::steady_clock::now() + time) {}

  // InvalidArgument when the time is up. Cheap: looks at the clock every few hundred calls.
  Status Tick(int64_t work = 1);
  // InvalidArgument when more states have been made than allowed, or tables of more memory.
  // `num_classes`: of the automaton that gets the states.
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
  // [states]; spellable bytes to an accepting state.
  std::vector<int64_t> distance;
  // [states]; the same plus one where that state has a next byte, for the end-of-sequence token.
  std::vector<int64_t> end_distance;
  int64_t max_distance = 0;  // largest finite end_distance
  bool ends_itself = true;   // no accepting state has a next byte

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

  // Cuts transitions after which nothing can match and computes the distances. `spellable`: the
  // bytes that are tokens of their own.
  Status Finish(const ByteSet& spellable, CompileBudget* budget);
  // No text matches (of a finished automaton).
  bool empty() const { return !has_next[kStart] && !accepting[kStart]; }
};

using DfaPtr = std::shared_ptr<const ByteDfa>;

// The language of JSON strings, quotes included, whose content `content` matches. Not finished.
Result<ByteDfa> Quoted(const ByteDfa& content, CompileBudget* budget);

// Texts that both match. Not finished.
Result<ByteDfa> Intersection(const ByteDfa& a, const ByteDfa& b, CompileBudget* budget);

// Of the quoted strings `dfa`, those of `min` to `max` characters. Not finished.
Result<ByteDfa> WithLength(const ByteDfa& dfa, int64_t min, int64_t max, CompileBudget* budget);

}  // namespace moeserve::structured
