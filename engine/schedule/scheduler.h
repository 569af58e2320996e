// Decides which sequences run, which tokens of them in a step, and who holds which cache block.
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

// Sequences wait, run, wait again when the cache is full, and end; all in the order of
// ServedBefore. Engine thread only.
//
// - Waiting ones are admitted from the front while there is a place and memory for all their known
//   tokens; nobody overtakes.
// - A step runs every decoding sequence, one row each, then prompts within a budget: half of it for
//   the sequence served first, the rest for the one with the fewest tokens left, so that short
//   prompts need not wait for long ones and long ones always move.
// - A sequence that grows and finds no free block takes the memory of the one served last, which
//   starts again later from its own tokens. The one served first is never interrupted, and since
//   every request fits alone it always ends.
class Scheduler {
 public:
  // `cache` and `routes` outlive the scheduler. At most `max_running` sequences run.
  Scheduler(KvCacheStorage& cache, RouteLog& routes, bool prefix_cache, int max_running);

  void Enqueue(SequencePtr sequence);
  // Admits what can be; returns the newly admitted (each once, however often it is preempted) and
  // counts what the prefix cache gave.
  std::vector<Sequence*> Admit();

  // The rows of the next step: at most `max_rows`, of which prompt rows beside decoding ones within
  // `budget`. May preempt.
  std::vector<ScheduledRows> Plan(int max_rows, const PromptBudget& budget);

  // `rows` were run: their tokens count as computed, full blocks become findable.
  void Complete(const ScheduledRows& rows);

  // A further sample of `parent`, whose prompt has just been run; it shares the parent's blocks.
  // Waits like a preempted sequence where there is no place.
  void Fork(Sequence& parent, SequencePtr sample);

  // Takes a sequence out, running or waiting, and frees its blocks. Samples that wait for its
  // prompt go on in its place.
  SequencePtr Remove(Sequence* sequence);

  const std::vector<SequencePtr>& running() const { return running_; }
  const std::vector<SequencePtr>& waiting() const { return waiting_; }
  const BlockManager& blocks() const { return blocks_; }
  uint64_t preemptions() const { return preemptions_; }
  uint64_t queried_tokens() const { return queried_tokens_; }
  uint64_t hit_tokens() const { return hit_tokens_; }

 private:
  bool TryAdmit(Sequence& sequence);
  // Blocks for the tokens up to `length`, the last of them for this sequence alone. False: the
  // sequence itself had to give way.
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

// The decoding part of a step in which every sequence that can decode does.
StepWork DecodingWork(const std::vector<SequencePtr>& running);
StepWork WorkOf(const std::vector<ScheduledRows>& rows);

// The batch of those rows. Logits are asked for where Sequence::WantsLogits says so; with
// `samples_on_device`, tokens instead where the device can draw them.
Batch MakeBatch(const std::vector<ScheduledRows>& rows, bool samples_on_device);

}  // namespace moeserve
