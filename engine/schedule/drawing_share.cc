#include "engine/schedule/drawing_share.h"

#include <algorithm>

namespace moeserve {
namespace {

// A sequence is heavy if choosing its tokens took longer than this in its last step. Masks of usual
// schemas take some tens of microseconds, and some milliseconds when they are computed for the
// first time.
constexpr double kHeavySeconds = 0.002;
// Heavy sequences may take this part of the time of forward passes.
constexpr double kShare = 0.25;
// They may go on in a step until they have taken this long.
constexpr double kTurnSeconds = 0.002;
// They need not make up for more than this.
constexpr double kMostDebtSeconds = 0.5;

bool Heavy(const Sequence& s) { return s.decoding() && s.draw_seconds > kHeavySeconds; }

}  // namespace

void DrawingShare::Choose(const std::vector<SequencePtr>& running) {
  std::vector<Sequence*> heavy;
  for (const SequencePtr& s : running) {
    s->resting = false;
    if (Heavy(*s)) heavy.push_back(s.get());
  }
  delays_others_ = heavy.size() < running.size();
  if (heavy.empty() || !delays_others_) return;
  std::stable_sort(heavy.begin(), heavy.end(),
                   [](const Sequence* a, const Sequence* b) { return a->rested > b->rested; });
  double room = debt_ > 0.0 ? 0.0 : kTurnSeconds;
  for (Sequence* s : heavy) {
    s->resting = room <= 0.0;
    s->rested = s->resting ? s->rested + 1 : 0;
    room -= s->draw_seconds;
  }
}

void DrawingShare::Drew(Sequence& sequence, double seconds) {
  sequence.draw_seconds = seconds;
  if (seconds > kHeavySeconds && delays_others_) drawn_ += seconds;
}

void DrawingShare::EndStep(double forward_seconds) {
  debt_ = std::clamp(debt_ + drawn_ - kShare * forward_seconds, 0.0, kMostDebtSeconds);
  drawn_ = 0.0;
}

}  // namespace moeserve
