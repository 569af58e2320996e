#include "engine/schedule/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace moeserve {
namespace {

void Insert(std::vector<SequencePtr>& list, SequencePtr sequence) {
  const auto place = std::upper_bound(
      list.begin(), list.end(), sequence,
      [](const SequencePtr& a, const SequencePtr& b) { return ServedBefore(*a, *b); });
  list.insert(place, std::move(sequence));
}

// Removes `sequence` from `list` and returns it; null if `list` does not contain it.
SequencePtr TakeOut(std::vector<SequencePtr>& list, const Sequence* sequence) {
  const auto place = std::find_if(list.begin(), list.end(),
                                  [&](const SequencePtr& s) { return s.get() == sequence; });
  if (place == list.end()) return nullptr;
  SequencePtr taken = std::move(*place);
  list.erase(place);
  return taken;
}

// Returns how many leading tokens may be taken from the prefix cache. The last known token is
// always computed, and so are the tokens whose log-probabilities are requested and not yet
// collected.
int64_t PrefixLimit(const Sequence& s) {
  if (s.whole) return 0;
  int64_t tokens = s.length() - 1;
  if (s.request.encode.has_value() && s.request.encode->output != EncodeOutput::kText) tokens = 0;
  if (s.wants_prompt_logprobs()) {
    tokens = std::min<int64_t>(tokens, std::max<int64_t>(0, std::ssize(s.prompt_logprobs) - 1));
  }
  return tokens;
}

}  // namespace

void Scheduler::Enqueue(SequencePtr&& sequence) {
  MakeRoom(*sequence);
  Insert(waiting_, std::move(sequence));
}

void Scheduler::MakeRoom(const Sequence& added) {
  most_sequences_ += 1 + added.samples.size();
  if (most_sequences_ <= std::min(waiting_.capacity(), running_.capacity())) return;
  most_sequences_ = 1 + added.samples.size();  // those that have ended are not counted any more
  for (const auto* list : {&waiting_, &running_}) {
    for (const SequencePtr& s : *list) most_sequences_ += 1 + s->samples.size();
  }
  waiting_.reserve(2 * most_sequences_);
  running_.reserve(2 * most_sequences_);
}

std::vector<Sequence*> Scheduler::Admit() {
  std::vector<Sequence*> admitted;
  admitted.reserve(waiting_.size());  // may throw, so before a sequence is taken out
  while (!waiting_.empty() && SeatsBehind(0) + waiting_.front()->seats() <= max_running_ &&
         HasRoomForBeams(*waiting_.front()) && TryAdmit(*waiting_.front())) {
    SequencePtr next = std::move(waiting_.front());
    waiting_.erase(waiting_.begin());
    if (!std::exchange(next->admitted, true)) admitted.push_back(next.get());
    Insert(running_, std::move(next));
  }
  return admitted;
}

bool Scheduler::TryAdmit(Sequence& s) {
  s.reused.reserve(s.reused.size() + 1);  // may throw, so before memory is taken
  // Leaves some pages free for the growth of running sequences, so that they are not preempted at
  // once.
  if (!memory_.Admit(s.memory, s.tokens, s.cache_key, PrefixLimit(s), !running_.empty(),
                     s.source_length())) {
    return false;
  }
  if (s.computed() > s.high_water) {
    s.reused.emplace_back(s.high_water, s.computed());
    s.high_water = s.computed();
  }
  if (!s.admitted) {
    s.cached_tokens = s.computed();
    queried_tokens_ += static_cast<uint64_t>(s.prompt_length());
    hit_tokens_ += static_cast<uint64_t>(s.cached_tokens);
  }
  return true;
}

bool Scheduler::Reserve(Sequence& s, SequenceMemory& memory, int length) {
  // A preemption may also make the next page the sequence's own, which takes no page then.
  while (!memory_.Reserve(memory, length)) {
    Sequence* last = running_.back().get();
    Preempt(last);
    if (last == &s) return false;
  }
  return true;
}

int Scheduler::ReserveDraft(Sequence& s, int drafted) {
  const int room = memory_.ReserveUnshared(s.memory, s.length() + drafted) - s.length();
  return std::clamp(room, 0, drafted);
}

void Scheduler::PlanDecoding(int max_rows, std::vector<ScheduledRows>& rows) {
  const bool beams = std::any_of(running_.begin(), running_.end(),
                                 [](const SequencePtr& s) { return s->beams != nullptr; });
  // Iterates by index, because Reserve() may preempt sequences at the end of running_.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& s = *running_[i];
    if (s.whole || s.needs_source()) continue;
    if (!s.decoding()) {
      Reserve(s, s.computed() + 1);
      continue;
    }
    if (s.resting) continue;
    // A row is left for every later sequence: max_rows is at least the number of sequences.
    const int behind = beams ? SeatsBehind(i + 1) : static_cast<int>(running_.size() - 1 - i);
    const int most = max_rows - behind;
    if (s.forked()) {
      max_rows -= PlanBeams(s, most, rows);
      continue;
    }
    const int known = std::min(s.remaining(), most);
    if (!Reserve(s, s.computed() + known)) continue;
    int drafted = 0;
    if (known == s.remaining()) {
      drafted = ReserveDraft(s, std::min(static_cast<int>(s.draft.size()), most - known));
    }
    rows.push_back({&s, s.computed(), known + drafted, drafted});
    max_rows -= known + drafted;
  }
}

std::vector<Sequence*> Scheduler::PlanSources(int max_rows) const {
  std::vector<Sequence*> planned;
  for (const SequencePtr& s : running_) {
    if (!s->needs_source()) continue;
    if (!planned.empty() && s->source_length() > max_rows) break;
    planned.push_back(s.get());
    max_rows -= s->source_length();
  }
  return planned;
}

std::vector<ScheduledRows> Scheduler::PlanWhole(int max_rows) const {
  std::vector<ScheduledRows> rows;
  for (const SequencePtr& s : running_) {
    if (!s->whole) continue;
    if (!rows.empty() && s->remaining() > max_rows) break;
    rows.push_back({.sequence = s.get(), .begin = s->computed(), .count = s->remaining()});
    max_rows -= s->remaining();
  }
  return rows;
}

std::vector<ScheduledRows> Scheduler::Plan(int max_rows, const PromptBudget& budget) {
  std::vector<ScheduledRows> rows;
  const auto whole = std::ranges::count_if(running_, [](const auto& s) { return s->whole; });
  if (whole > 0 && (whole_next_ || whole == std::ssize(running_))) {
    whole_next_ = false;
    return PlanWhole(max_rows);
  }
  whole_next_ = true;
  PlanDecoding(max_rows, rows);
  const bool alone = rows.empty();
  int left = max_rows;
  for (const ScheduledRows& r : rows) left -= r.count;
  double cost_left = budget.total;

  std::vector<ScheduledRows> prompts;
  for (const SequencePtr& s : running_) {
    if (!s->decoding() && !s->whole && !s->needs_source()) {
      prompts.push_back({.sequence = s.get(), .begin = s->computed()});
    }
  }
  if (prompts.empty()) return rows;
  const auto give = [&](ScheduledRows& r, int most, double cost) {
    const int begin = r.begin + r.count;
    if (!alone) most = std::min(most, budget.RowsFor(cost, begin));
    most = std::min(most, r.sequence->remaining() - r.count);
    const int count = memory_.ReserveUnshared(r.sequence->memory, begin + most) - begin;
    r.count += count;
    left -= count;
    cost_left -= budget.Cost(begin, count);
  };
  give(prompts.front(), (left + 1) / 2, 0.5 * cost_left);
  std::vector<ScheduledRows*> by_length;
  for (ScheduledRows& r : prompts) by_length.push_back(&r);
  std::stable_sort(by_length.begin(), by_length.end(),
                   [](const ScheduledRows* a, const ScheduledRows* b) {
                     return a->sequence->remaining() < b->sequence->remaining();
                   });
  for (ScheduledRows* r : by_length) give(*r, left, cost_left);
  for (const ScheduledRows& r : prompts) {
    if (r.count > 0) rows.push_back(r);
  }
  return rows;
}

void Scheduler::Complete(const ScheduledRows& rows) {
  Sequence& s = *rows.sequence;
  memory_.Advance(s.memory, rows.count, s.tokens, s.cache_key);
  s.high_water = std::max(s.high_water, s.computed());
}

void Scheduler::Fork(Sequence& parent, SequencePtr&& sample) {
  sample->admitted = true;
  sample->source_encoded = parent.source_encoded;
  sample->cached_tokens = parent.cached_tokens;
  sample->prompt_logprobs = parent.prompt_logprobs;
  if (SeatsBehind(0) >= max_running_) {
    Insert(waiting_, std::move(sample));
    return;
  }
  sample->reused = {{0, parent.computed()}};
  sample->memory = memory_.Fork(parent.memory);
  sample->source_ready = parent.source_ready;
  sample->high_water = parent.computed();
  Insert(running_, std::move(sample));
}

void Scheduler::Preempt(Sequence* sequence) {
  ++preemptions_;
  SequencePtr s = TakeOut(running_, sequence);
  ReleaseMemory(*s);
  Insert(waiting_, std::move(s));
}

SequencePtr Scheduler::Remove(Sequence* sequence) {
  SequencePtr s = TakeOut(running_, sequence);
  const bool ran = s != nullptr;
  if (!ran) s = TakeOut(waiting_, sequence);
  MOESERVE_CHECK(s != nullptr, "a sequence that ends was running or waiting");
  if (!s->samples.empty()) {
    SequencePtr heir = std::move(s->samples.front());
    s->samples.erase(s->samples.begin());
    heir->samples = std::move(s->samples);
    s->samples.clear();
    heir->admitted = s->admitted;
    heir->cached_tokens = s->cached_tokens;
    heir->prompt_logprobs = std::move(s->prompt_logprobs);
    std::swap(heir->memory, s->memory);
    heir->source_ready = s->source_ready;
    heir->source_encoded = s->source_encoded;
    heir->high_water = s->high_water;
    heir->reused = std::move(s->reused);
    Insert(ran ? running_ : waiting_, std::move(heir));
  }
  ReleaseMemory(*s);
  return s;
}

bool Scheduler::Runs(const Sequence* sequence) const {
  return std::any_of(running_.begin(), running_.end(),
                     [&](const SequencePtr& s) { return s.get() == sequence; });
}

StepWork DecodingWork(const std::vector<SequencePtr>& running) {
  StepWork work;
  for (const SequencePtr& s : running) {
    if (!s->decoding() || s->resting) continue;
    const auto rows = s->forked() ? std::ssize(s->beams->beams) : 1;
    work.decode_rows += static_cast<int>(rows);
    work.decode_context += rows * s->length();
  }
  return work;
}

StepWork WorkOf(const std::vector<ScheduledRows>& rows) {
  StepWork work;
  for (const ScheduledRows& r : rows) {
    const int64_t count = r.count;
    const int64_t context = count * r.begin + count * (count + 1) / 2;
    const bool decoding = r.sequence->decoding();
    (decoding ? work.decode_rows : work.prompt_rows) += r.count;
    (decoding ? work.decode_context : work.prompt_context) += context;
  }
  return work;
}

}  // namespace moeserve
