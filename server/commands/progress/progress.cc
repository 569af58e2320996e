#include "server/commands/progress/progress.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <utility>

#include "base/error_text.h"
#include "server/base/text_values.h"
#include "server/commands/progress/terminal.h"
#include "server/logging/logging.h"

namespace moeserve::server {
namespace {

constexpr double kBarDelay = 0.5;
constexpr double kBarInterval = 0.1;
constexpr double kLineDelay = 1.0;
constexpr double kLineInterval = 5.0;

constexpr double kRounding = 1e-6;  // of sums of times

constexpr size_t kMostBarCells = 30;
constexpr size_t kFewestBarCells = 5;

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string Amount(const ProgressUnit& unit, double value) {
  const auto whole = static_cast<int64_t>(std::llround(value));
  return unit.bytes ? ShowBytes(whole) : std::to_string(whole);
}

double Share(const ProgressState& state) {
  return state.total > 0.0 ? std::clamp(state.done / state.total, 0.0, 1.0) : 0.0;
}

}  // namespace

std::string DurationText(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(std::clamp(seconds - kRounding, 0.0, 1e9)));
  if (whole < 60) return Concat(whole, " s");
  if (whole < 3600) return Concat(whole / 60, " min ", whole % 60, " s");
  return Concat(whole / 3600, " h ", whole % 3600 / 60, " min");
}

std::string ProgressText(const ProgressState& state) {
  const double share = Share(state);
  const double done = share * state.total;
  std::string text = Concat(Amount(state.unit, done), " of ", Amount(state.unit, state.total));
  if (!state.unit.bytes) text += Concat(' ', state.unit.name);
  if (done <= 0.0) return text;
  if (state.unit.rate && state.seconds > 0.0) {
    text += Concat(", ", Amount(state.unit, done / state.seconds),
                   state.unit.bytes ? "" : Concat(' ', state.unit.name), "/s");
  }
  return text + Concat(", ", DurationText(state.seconds * (1.0 - share) / share), " left");
}

std::string ProgressBar(const ProgressState& state, size_t columns, bool colours) {
  const double share = Share(state);
  std::string percent = std::to_string(static_cast<int>(share * 100.0));
  percent.insert(0, 3 - std::min<size_t>(percent.size(), 3), ' ');
  const std::string head = Concat(state.what, ' ', percent, " %");
  const std::string text = ProgressText(state);
  // The last column stays free: some terminals begin a new line there.
  const size_t room = columns > 0 ? columns - 1 : 0;
  if (head.size() > room) return head.substr(0, room);
  size_t left = room - head.size();
  const bool has_text = left >= text.size() + 2;
  if (has_text) left -= text.size() + 2;
  std::string line = head;
  if (left >= kFewestBarCells + 3) {
    const size_t cells = std::min(left - 3, kMostBarCells);
    const auto full = static_cast<size_t>(share * static_cast<double>(cells));
    line += Concat(" [", colours ? "\x1b[36m" : "", std::string(full, '#'),
                   colours ? "\x1b[0m" : "", std::string(cells - full, '-'), ']');
  }
  if (has_text) line += Concat("  ", text);
  return line;
}

Progress::Progress(std::string what, ProgressUnit unit, double total, ProgressOutput output)
    : Progress(std::move(what), unit, total, output, Environment()) {}

Progress::Progress(std::string what, ProgressUnit unit, double total, ProgressOutput output,
                   Environment environment)
    : state_{.what = std::move(what), .unit = unit, .total = total},
      environment_{environment.file, environment.now ? std::move(environment.now) : SteadySeconds},
      style_(output == ProgressOutput::kNone || total <= 0.0 ? Style::kNone
             : output == ProgressOutput::kLog                ? Style::kLog
             : CanRewriteLines(environment_.file)            ? Style::kBar
                                                             : Style::kLines),
      colours_(CanShowColours(environment_.file)),
      begin_(environment_.now()),
      next_(begin_ + (style_ == Style::kBar ? kBarDelay : kLineDelay)) {}

Progress::~Progress() { RemoveBar(); }

void Progress::Set(double done) {
  state_.done = std::min(done, state_.total);
  if (style_ == Style::kNone) return;
  const double now = environment_.now();
  if (now < next_) return;
  next_ = now + (style_ == Style::kBar ? kBarInterval : kLineInterval);
  state_.seconds = now - begin_;
  if (style_ != Style::kBar) {
    Write(ProgressText(state_));
    return;
  }
  // The width is asked for each time, because the user can change it.
  const size_t columns = TerminalColumns(environment_.file).value_or(0);
  std::fprintf(environment_.file, "\r%s\x1b[K", ProgressBar(state_, columns, colours_).c_str());
  std::fflush(environment_.file);
  shown_ = true;
}

void Progress::Finish() {
  RemoveBar();
  if (!shown_) return;
  shown_ = false;
  Write(Concat(Amount(state_.unit, state_.total),
               state_.unit.bytes ? "" : Concat(' ', state_.unit.name), " in ",
               DurationText(environment_.now() - begin_)));
}

void Progress::Write(const std::string& line) {
  if (style_ == Style::kLog) {
    LogInfo("load", Concat(state_.what, ": ", line));
  } else {
    std::fprintf(environment_.file, "%s: %s\n", state_.what.c_str(), line.c_str());
    std::fflush(environment_.file);
  }
  shown_ = true;
}

void Progress::RemoveBar() {
  if (style_ != Style::kBar || !shown_) return;
  std::fputs("\r\x1b[K", environment_.file);
  std::fflush(environment_.file);
  shown_ = false;
}

}  // namespace moeserve::server
