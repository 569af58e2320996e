// Decides which tokens run in a step: pure decisions over the sequences' counts.
#pragma once

#include <memory>
#include <vector>

#include "engine/batch.h"
#include "engine/sequence.h"

namespace moeserve {

// Rows of one sequence in a step.
struct ScheduledRows {
  Sequence* sequence = nullptr;
  int begin = 0;  // first token of the sequence to run
  int count = 0;
};

// Sequences that decode come first, one row each; prompts fill the rest of `max_step_tokens` in
// order of arrival, in parts if need be, so a long prompt never stops running answers.
std::vector<ScheduledRows> Schedule(const std::vector<std::unique_ptr<Sequence>>& running,
                                    int max_step_tokens);

// The batch of those rows. Logits are asked for where a token is drawn (the last known token of a
// sequence) and for every prompt row where prompt log-probabilities are wanted.
Batch MakeBatch(const std::vector<ScheduledRows>& rows);

}  // namespace moeserve
