#include "engine/scheduler.h"

#include <algorithm>

namespace moeserve {

std::vector<ScheduledRows> Schedule(const std::vector<std::unique_ptr<Sequence>>& running,
                                    int max_step_tokens) {
  std::vector<ScheduledRows> rows;
  int left = max_step_tokens;
  for (const bool decoding : {true, false}) {
    for (const auto& s : running) {
      if ((s->computed >= s->prompt_length()) != decoding) continue;
      const int count = std::min(left, static_cast<int>(s->tokens.size()) - s->computed);
      if (count == 0) continue;
      rows.push_back({s.get(), s->computed, count});
      left -= count;
    }
  }
  return rows;
}

Batch MakeBatch(const std::vector<ScheduledRows>& rows) {
  Batch batch;
  for (const ScheduledRows& r : rows) {
    const Sequence& s = *r.sequence;
    const int index = static_cast<int>(batch.block_tables.size());
    batch.block_tables.emplace_back(s.blocks);
    const bool all_prompt_rows = s.request.sampling.prompt_logprobs.has_value();
    for (int i = r.begin; i < r.begin + r.count; ++i) {
      const bool last = i + 1 == static_cast<int>(s.tokens.size());
      if (last || (all_prompt_rows && i < s.prompt_length())) {
        batch.logit_rows.push_back(batch.num_tokens());
      }
      batch.tokens.push_back(s.tokens[i]);
      batch.positions.push_back(i);
      batch.sequence.push_back(index);
      batch.phase.push_back(i < s.prompt_length() ? Phase::kPrefill : Phase::kDecode);
    }
  }
  return batch;
}

}  // namespace moeserve
