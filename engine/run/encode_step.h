// Turns the outputs of a step's rows into the result of a request that generates nothing.
#pragma once

#include <span>

#include "engine/run/token_step.h"
#include "engine/sequence/sequence.h"
#include "engine/spec/spec.h"

namespace moeserve {

// Appends a step's outputs to Sequence::encoded: `logits` of the rows for which
// Sequence::WantsLogits() is true, and outputs of texts, [n, TextOutputs(spec)].
void CollectEncoded(Sequence& sequence, const RowLogits& logits, std::span<const float> texts,
                    const ModelSpec& spec);

}  // namespace moeserve
