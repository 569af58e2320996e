// Decides which sequences run, which of their tokens a step computes, and which of them have
// memory.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/memory/memory_pool.h"
#include "engine/schedule/step_time.h"
#include "engine/sequence/sequence.h"

namespace moeserve {

// The rows of one sequence in a step.
struct ScheduledRows {
  Sequence* sequence = nullptr;
  int begin = 0;    // index of the first token to compute
  int count = 0;    // number of tokens to compute, drafted ones included
  int drafted = 0;  // the last of these tokens, which are the first of Sequence::draft
};

// A sequence waits, runs, possibly waits again after a preemption, and ends. Waiting and running
// sequences are kept in the serving order, which ServedBefore() defines. Engine thread only.
//
// - Admission takes waiting sequences from the front, without overtaking, while fewer than
//   max_running sequences run and pages for all known tokens of the next sequence are free.
// - A step computes the last token of every decoding sequence that does not rest (DrawingShare) and
//   the tokens drafted for it, and prompt rows within a budget. Drafted tokens take pages, but
//   preempt no sequence. Half of the budget goes to the prompt of the sequence served first, the
//   rest to the prompts with the fewest tokens left. So short prompts do not wait for long ones,
//   and long prompts always advance.
// - Sequences of which one step computes all tokens (Sequence::whole) have steps of their own,
// which
//   alternate with those of the others.
// - A request with beam search takes as many places among the running sequences as it has beams,
//   and is admitted if all of them have pages. A step computes the last tokens of all its beams, or
//   none of them.
// - If a sequence needs a page and none is free, the sequence served last is preempted; later its
//   known tokens are computed again. The sequence served first is never preempted, and since every
//   request fits into the cache alone, it always ends.
class Scheduler {
 public:
  // `memory` outlives the scheduler. At most `max_running` sequences run.
  Scheduler(MemoryPool& memory, int max_running) : memory_(memory), max_running_(max_running) {}

  // Adds a sequence to those that wait. If that throws std::bad_alloc, the caller still has the
  // sequence. Moving sequences between the lists never throws.
  void Enqueue(SequencePtr&& sequence);
  // Admits sequences from the front of the waiting list. Returns those that are admitted for the
  // first time (not after a preemption) and counts their prefix cache hits.
  std::vector<Sequence*> Admit();

  // Returns the rows of the next step, at most `max_rows`, but for a single sequence that is
  // computed whole. If there are decoding rows, prompt rows stay within `budget`. May preempt
  // sequences.
  std::vector<ScheduledRows> Plan(int max_rows, const PromptBudget& budget);

  // Returns the running sequences whose sources a step of the encoder computes next: as many as fit
  // into `max_rows`, in the order of serving, but at least one if there is one.
  std::vector<Sequence*> PlanSources(int max_rows) const;

  // Takes free pages for up to `drafted` tokens behind the last token of a running sequence.
  // Returns for how many there is room: none while other sequences share the page of its next
  // token.
  int ReserveDraft(Sequence& sequence, int drafted);

  // Marks the tokens of `rows`, without rejected ones, as computed and publishes full pages. Call
  // after the step that computed `rows`.
  void Complete(const ScheduledRows& rows);

  // Adds a sample of `parent`, whose prompt has just been computed; the sample shares the parent's
  // pages. If max_running sequences run already, the sample holds no pages and waits to be
  // admitted again, like a preempted sequence. If that throws std::bad_alloc, the caller still has
  // the sample.
  void Fork(Sequence& parent, SequencePtr&& sample);

  // Gives the memory of `leader`, which has computed what its beams share, to the beams.
  void ForkBeams(Sequence& leader);

  // Removes a running or waiting sequence and releases its pages. If further samples wait for the
  // prompt to be computed, the first of them takes over the pages and the progress instead.
  SequencePtr Remove(Sequence* sequence);

  const std::vector<SequencePtr>& running() const { return running_; }
  bool Runs(const Sequence* sequence) const;
  const std::vector<SequencePtr>& waiting() const { return waiting_; }
  uint64_t preemptions() const { return preemptions_; }
  uint64_t queried_tokens() const { return queried_tokens_; }
  uint64_t hit_tokens() const { return hit_tokens_; }

 private:
  // Makes room in both lists for all sequences, the samples that wait in others and those of
  // `added` included.
  void MakeRoom(const Sequence& added);
  bool TryAdmit(Sequence& sequence);
  // Gives a sequence memory for the tokens up to `length`, if necessary that of sequences that are
  // served later. Returns false if the sequence itself was preempted.
  bool Reserve(Sequence& sequence, int length) {
    return Reserve(sequence, sequence.memory, length);
  }
  // As above, for the memory of one of the sequence's beams.
  bool Reserve(Sequence& sequence, SequenceMemory& memory, int length);
  // Returns the rows of sequences that are computed whole: as many as fit into `max_rows`, in the
  // order of serving, but at least one.
  std::vector<ScheduledRows> PlanWhole(int max_rows) const;
  // Appends the rows of the decoding sequences, at most `max_rows`. Makes sure that the next token
  // of each prompt has memory.
  void PlanDecoding(int max_rows, std::vector<ScheduledRows>& rows);
  void Preempt(Sequence* sequence);
  // The following four are in scheduler_beams.cc.
  // Whether a waiting sequence has no beams, or there are pages for the next token of each: without
  // them, it would be preempted as soon as its beams go on. The first to run needs no check.
  bool HasRoomForBeams(const Sequence& sequence) const;
  // Returns how many places the running sequences from this index on take.
  int SeatsBehind(size_t index) const;
  // Appends the rows of a sequence that consists of beams, at most `max_rows`, which is at least
  // their number. Returns how many rows these are: 0 if the sequence was preempted.
  int PlanBeams(Sequence& leader, int max_rows, std::vector<ScheduledRows>& rows);
  // Releases the memory of a sequence or of its beams.
  void ReleaseMemory(Sequence& sequence);

  MemoryPool& memory_;
  const int max_running_;
  std::vector<SequencePtr> waiting_;  // waiting_ and running_ are in the order of ServedBefore()
  std::vector<SequencePtr> running_;
  size_t most_sequences_ = 0;  // at least the number of sequences, with their samples
  bool whole_next_ = true;     // whether the next step computes whole sequences, if there are both
  uint64_t preemptions_ = 0;
  uint64_t queried_tokens_ = 0;
  uint64_t hit_tokens_ = 0;
};

// Returns the work of a step in which every sequence that can decode and does not rest does so,
// without prompt rows.
StepWork DecodingWork(const std::vector<SequencePtr>& running);
StepWork WorkOf(const std::vector<ScheduledRows>& rows);

}  // namespace moeserve
