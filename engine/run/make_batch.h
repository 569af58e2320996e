// Turns the rows that the scheduler chose into the batch of a step.
#pragma once

#include <vector>

#include "engine/run/token_step.h"
#include "engine/schedule/scheduler.h"
#include "engine/step/batch.h"

namespace moeserve {

// Builds the batch for `rows` of a model. It requests logits for every row for which
// Sequence::WantsLogits() is true, and for drafted rows; and outputs of texts. Drafted rows get the
// phase kDecode. With `samples_on_device`, it requests a token drawn by the device instead, if the
// device can draw it; `textless` are the ids that are never drawn.
Batch MakeBatch(const ModelSpec& spec, const std::vector<ScheduledRows>& rows, MemoryPool& memory,
                bool samples_on_device, const TextlessIds& textless);

// Builds the batch of a step of the encoder beside a decoder, for whole sources. `pages` receives
// the pages of kEncoderTable and outlives the batch.
Batch MakeSourceBatch(const std::vector<Sequence*>& sequences, std::vector<int32_t>& pages);

}  // namespace moeserve
