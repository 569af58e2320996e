// How the scheduler treats requests with beam search: their beams are planned, preempted and
// removed together.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/schedule/scheduler.h"

namespace moeserve {

int Scheduler::SeatsBehind(size_t index) const {
  int seats = 0;
  for (size_t i = index; i < running_.size(); ++i) seats += running_[i]->seats();
  return seats;
}

bool Scheduler::HasRoomForBeams(const Sequence& s) const {
  if (s.beams == nullptr || running_.empty()) return true;
  // The beams are one token ahead of what was computed when they were preempted.
  const int64_t tokens = std::max(s.length(), s.high_water) + 1;
  const int64_t shared = s.length() / kPageTokens;
  for (int t = 0; t < memory_.num_tables(); ++t) {
    const int64_t own = std::min(PagesFor(tokens) - shared, memory_.MostPages(t, tokens));
    if (memory_.pages(t).available() < memory_.MostPages(t, s.length()) + s.seats() * own) {
      return false;
    }
  }
  return true;
}

int Scheduler::PlanBeams(Sequence& leader, int max_rows, std::vector<ScheduledRows>& rows) {
  const std::vector<Beam>& beams = leader.beams->beams;
  int all = 0;
  for (const Beam& beam : beams) all += beam.sequence->remaining();
  // The last tokens of the beams are computed in one step. After a preemption, the tokens before
  // them may take several steps.
  const bool whole = all <= max_rows;
  std::vector<ScheduledRows> planned;
  int used = 0;
  for (const Beam& beam : beams) {
    Sequence& s = *beam.sequence;
    const int count = whole ? s.remaining() : std::min(s.remaining() - 1, max_rows - used);
    if (count == 0) continue;
    if (!Reserve(leader, s.memory, s.computed() + count)) return 0;
    planned.push_back({.sequence = &s, .begin = s.computed(), .count = count});
    used += count;
  }
  rows.insert(rows.end(), planned.begin(), planned.end());
  return used;
}

void Scheduler::ForkBeams(Sequence& leader) {
  BeamGroup& group = *leader.beams;
  MOESERVE_CHECK(!group.forked && !group.beams.empty(), "a group forks after its shared tokens");
  group.forked = true;
  for (size_t i = group.beams.size(); i-- > 0;) {
    Sequence& beam = *group.beams[i].sequence;
    beam.memory = i > 0 ? memory_.Fork(leader.memory) : std::exchange(leader.memory, {});
    beam.high_water = leader.high_water;
  }
}

void Scheduler::ReleaseMemory(Sequence& s) {
  memory_.Release(s.memory);
  s.source_ready = false;
  if (s.beams == nullptr) return;
  BeamGroup& group = *s.beams;
  for (auto* beams : {&group.beams, &group.next}) {
    for (const Beam& beam : *beams) {
      if (beam.sequence != nullptr) memory_.Release(beam.sequence->memory);
    }
  }
  if (!std::exchange(group.forked, false) || !group.next.empty()) return;
  const Sequence& first = *group.beams.front().sequence;
  s.tokens.assign(first.tokens.begin(), first.tokens.begin() + group.SharedTokens());
  s.high_water = std::max(s.high_water, first.high_water);
}

}  // namespace moeserve
