// Keeps sequences whose tokens take long to choose from slowing all others.
#pragma once

#include <vector>

#include "engine/sequence/sequence.h"

namespace moeserve {

// The engine thread chooses tokens one after the other, so a structured output whose masks take
// milliseconds would stretch the steps of all sequences. Such heavy sequences share a part of the
// time: while others run, they rest in most steps, and take turns in the rest. Outputs do not
// depend on it. Engine thread only.
class DrawingShare {
 public:
  // Sets Sequence::resting of all running sequences for the next step. At least one sequence does
  // not rest, and none does if all are heavy.
  void Choose(const std::vector<SequencePtr>& running);

  // Notes that choosing the tokens of a sequence took a time in this step.
  void Drew(Sequence& sequence, double seconds);

  // Ends a step whose forward pass took this time.
  void EndStep(double forward_seconds);

 private:
  bool delays_others_ = false;  // whether others than heavy sequences are in this step
  double drawn_ = 0.0;          // seconds of heavy sequences in this step
  double debt_ = 0.0;           // seconds that heavy sequences have used beyond their share
};

}  // namespace moeserve
