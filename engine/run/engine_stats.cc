#include <algorithm>

#include "engine/engine.h"

namespace moeserve {

void EngineStats::AddCounters(const EngineStats& other) {
  running += other.running;
  waiting += other.waiting;
  preemptions += other.preemptions;
  prefix_queried_tokens += other.prefix_queried_tokens;
  prefix_hit_tokens += other.prefix_hit_tokens;
  drafted_tokens += other.drafted_tokens;
  accepted_tokens += other.accepted_tokens;
  beam_rows += other.beam_rows;
  step_seconds += other.step_seconds;
  forward_seconds += other.forward_seconds;
  prompt_tokens += other.prompt_tokens;
  generation_tokens += other.generation_tokens;
  finished_stop += other.finished_stop;
  finished_length += other.finished_length;
  finished_abort += other.finished_abort;
  finished_error += other.finished_error;
  rejected_queue_full += other.rejected_queue_full;
  rejected_queue_timeout += other.rejected_queue_timeout;
  steps += other.steps;
  tiers.hit_bytes += other.tiers.hit_bytes;
  tiers.read_bytes += other.tiers.read_bytes;
  tiers.waves += other.tiers.waves;
  tiers.stall_seconds += other.tiers.stall_seconds;
  last_step = std::max(last_step, other.last_step);
  histograms.Add(other.histograms);
}

}  // namespace moeserve
