// Reports how far a long piece of work is: a bar on a terminal, else lines of text.
#pragma once

#include <cstddef>
#include <cstdio>
#include <functional>
#include <string>

namespace moeserve::server {

// Where progress is reported. kTerminal: on standard error, as a bar if that is a terminal, else as
// lines. kLog: as lines in the server's log. kNone: nowhere.
enum class ProgressOutput { kTerminal, kLog, kNone };

struct ProgressUnit {
  const char* name;  // after an amount, such as "tokens"; ignored if `bytes`
  bool bytes;        // amounts are shown as KiB, MiB, ...
  bool rate;         // whether amounts per second are shown
};
inline constexpr ProgressUnit kByteUnit = {"", true, true};
inline constexpr ProgressUnit kTokenUnit = {"tokens", false, true};
inline constexpr ProgressUnit kMeasurementUnit = {"measurements", false, false};
inline constexpr ProgressUnit kRequestUnit = {"requests", false, true};
inline constexpr ProgressUnit kSecondUnit = {"seconds", false, false};

// How far a piece of work is. `done` and `total` are amounts of the unit.
struct ProgressState {
  std::string what;  // such as "loading"
  ProgressUnit unit = kByteUnit;
  double done = 0.0;
  double total = 0.0;
  double seconds = 0.0;  // since the work began
};

// Returns a duration such as "12 s", "3 min 20 s" or "2 h 5 min".
std::string DurationText(double seconds);
// Returns amounts, rate and time left, such as "1.0 GiB of 4.0 GiB, 341.3 MiB/s, 9 s left".
std::string ProgressText(const ProgressState& state);
// Returns a line of fewer than `columns` columns with a bar and as much of ProgressText() as has
// room. With `colours`, it has escape sequences, which take no columns.
std::string ProgressBar(const ProgressState& state, size_t columns, bool colours);

// Reports on one piece of work. A bar is redrawn at most ten times a second, and lines are written
// every five seconds. Nothing is reported about work that takes less than half a second (lines: a
// second). Must be used by one thread.
class Progress {
 public:
  // Replaced in tests.
  struct Environment {
    std::FILE* file = stderr;
    std::function<double()> now;  // seconds; empty: a steady clock
  };

  // `total` is the amount of work; with 0 or less, nothing is reported.
  Progress(std::string what, ProgressUnit unit, double total, ProgressOutput output);
  Progress(std::string what, ProgressUnit unit, double total, ProgressOutput output,
           Environment environment);
  // Removes the bar.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Tells how much of the work is done. Values beyond the total count as the total.
  void Set(double done);
  void Add(double amount) { Set(state_.done + amount); }
  // The work is done: removes the bar, or, if lines were written, writes how long it took.
  void Finish();

 private:
  enum class Style { kBar, kLines, kLog, kNone };

  void Write(const std::string& line);
  void RemoveBar();

  ProgressState state_;
  const Environment environment_;
  const Style style_;
  const bool colours_;
  const double begin_;
  double next_;         // time of the next report
  bool shown_ = false;  // whether a bar is shown, or a line was written
};

}  // namespace moeserve::server
