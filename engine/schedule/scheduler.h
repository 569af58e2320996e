// Decides which sequences run, which of their tokens a step runs, and which blocks they hold.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/model/batch.h"
#include "engine/routes/route_log.h"
#include "engine/schedule/block_manager.h"
#include "engine/schedule/sequence.h"
#include "engine/schedule/step_time.h"

namespace moeserve {

// Rows of one sequence in a step.
struct ScheduledRows {
  Sequence* sequence = nullptr;
  int begin = 0;  // first token of the sequence to run
  int count = 0;
};

// Sequences wait, run, wait again after a preemption, and end, in the order of ServedBefore().
// Engine thread only.
//
// - Admission takes waiting sequences from the front, without overtaking, while a place and blocks
//   for all their known tokens are free.
// - A step runs every decoding sequence, one row each, then prompts within a budget: half of it for
//   the sequence served first, the rest for the one with the fewest tokens left. So short prompts
//   do not wait for long ones, and long ones always advance.
// - A sequence that needs a block when none is free preempts the one served last, which later runs
//   its known tokens again. The one served first is never preempted, and since every request fits
//   alone it always ends.
class Scheduler {
 public:
  // `cache` and `routes` outlive the scheduler. At most `max_running` sequences run.
  Scheduler(KvCacheStorage& cache, RouteLog& routes, bool prefix_cache, int max_running);

  void Enqueue(SequencePtr sequence);
  // Admits sequences from the front. Returns those admitted for the first time (not after a
  // preemption) and counts their prefix cache hits.
  std::vector<Sequence*> Admit();

  // Returns the rows of the next step, at most `max_rows`; prompt rows beside decoding rows stay
  // within `budget`. May preempt.
  std::vector<ScheduledRows> Plan(int max_rows, const PromptBudget& budget);

  // Call after `rows` were run: marks their tokens as computed and publishes full blocks.
  void Complete(const ScheduledRows& rows);

  // Adds a sample of `parent`, whose prompt has just been run; it shares the parent's blocks. Waits
  // like a preempted sequence if there is no place.
  void Fork(Sequence& parent, SequencePtr sample);

  // Removes a running or waiting sequence and releases its blocks. Samples that wait for its prompt
  // take its place.
  SequencePtr Remove(Sequence* sequence);

  const std::vector<SequencePtr>& running() const { return running_; }
  const std::vector<SequencePtr>& waiting() const { return waiting_; }
  const BlockManager& blocks() const { return blocks_; }
  uint64_t preemptions() const { return preemptions_; }
  uint64_t queried_tokens() const { return queried_tokens_; }
  uint64_t hit_tokens() const { return hit_tokens_; }

 private:
  bool TryAdmit(Sequence& sequence);
  // Takes blocks for the tokens up to `length`, the last one unshared. Returns false if the
  // sequence itself was preempted.
  bool Reserve(Sequence& sequence, int length);
  int32_t TakeBlock();
  void FreeBlocks(Sequence& sequence);
  void Preempt(Sequence* sequence);

  KvCacheStorage& cache_;
  RouteLog& routes_;
  const int max_running_;
  BlockManager blocks_;
  std::vector<SequencePtr> waiting_;  // both in the order of ServedBefore
  std::vector<SequencePtr> running_;
  uint64_t preemptions_ = 0;
  uint64_t queried_tokens_ = 0;
  uint64_t hit_tokens_ = 0;
};

// Work of a step in which every sequence that can decode does so, prompts left out.
StepWork DecodingWork(const std::vector<SequencePtr>& running);
StepWork WorkOf(const std::vector<ScheduledRows>& rows);

// Builds the batch of those rows. It asks for logits where Sequence::WantsLogits() is true, or,
// with `samples_on_device`, for drawn tokens where the device can draw them.
Batch MakeBatch(const std::vector<ScheduledRows>& rows, bool samples_on_device);

}  // namespace moeserve
