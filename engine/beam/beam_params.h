// What a request asks of beam search.
#pragma once

#include <cstdint>

namespace moeserve {

inline constexpr int kDefaultBeams = 4;
inline constexpr int kMaxBeams = 64;
inline constexpr int kMaxLengthPenalty = 10;  // of its absolute value

// When a search ends although beams run on, once num_beams hypotheses are finished.
enum class EarlyStopping : uint8_t {
  kFalse,  // when the best running beam, ended now, would not be among them
  kTrue,   // at once
  kNever,  // when the best running beam could not get among them at any length that is left
};

struct BeamParams {
  int num_beams = kDefaultBeams;  // 1 to kMaxBeams: how many beams run on after each step
  // -kMaxLengthPenalty to kMaxLengthPenalty. The score of a hypothesis is the sum of its
  // log-probabilities, divided by this power of its length: above 0 favours long ones.
  double length_penalty = 1.0;
  EarlyStopping early_stopping = EarlyStopping::kFalse;

  friend bool operator==(const BeamParams&, const BeamParams&) = default;
};

}  // namespace moeserve
