// Log-probabilities of all tokens.
#pragma once

#include <span>

namespace moeserve {

// Sets `out` [V] to the log-probabilities of the softmax of `logits` [V], which are finite or
// -infinity, at least one of them finite. With m the largest logit, and s the double-precision sum
// of the single-precision exponentials of the logits minus m (SamplingExp), in an order that
// depends on V alone, an element is its logit minus (m + log s), computed in double precision and
// rounded once. So the bits depend only on the logits.
void LogSoftmax(std::span<const float> logits, std::span<float> out);

}  // namespace moeserve
