#include "server/bench/load_test/driver.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <utility>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// The time to wait for the results of requests that were cut off. Results that arrive later are
// lost.
constexpr double kCollectSeconds = 5.0;
constexpr double kLongestWait = 1.0;
constexpr double kLongestWaitForStop = 0.2;

class Driver {
 public:
  // A warm-up run numbers its requests -1, -2 and so on.
  Driver(const LoadOptions& options, bool warm_up, const Workload& workload, LoadTarget& target,
         LoadProgress progress, std::function<bool()> stop)
      : options_(options),
        warm_up_(warm_up),
        workload_(workload),
        target_(target),
        progress_(std::move(progress)),
        stop_(std::move(stop)) {}

  LoadRun Run() {
    run_.begin = target_.Now();
    run_.last_start = run_.begin;
    stop_at_ = options_.seconds > 0.0 ? run_.begin + options_.seconds : kNever;
    const int64_t strays_before = target_.StrayAnswers();
    if (options_.clients > 0) {
      for (int i = 0; i < options_.clients; ++i) due_.push(run_.begin);
    } else {
      arrivals_.emplace(options_.rate, options_.seed);
      due_.push(run_.begin + arrivals_->Next());
    }
    Loop();
    run_.end = target_.Now();
    run_.answered_twice += target_.StrayAnswers() - strays_before;
    for (const LoadSample& sample : run_.samples) {
      if (sample.results == 0) {
        ++run_.unanswered;
        continue;
      }
      if (sample.result.cut_off) {
        ++run_.cut_off;
      } else if (!sample.result.answered) {
        ++run_.unanswered;
      }
      if (sample.result.duplicate || sample.results > 1) ++run_.answered_twice;
    }
    return std::move(run_);
  }

 private:
  void Loop() {
    double give_up_at = kNever;
    bool cut_off = false;
    while (true) {
      double now = target_.Now();
      run_.interrupted = run_.interrupted || (stop_ && stop_());
      while (!Stopped(now) && !due_.empty() && due_.top() <= now) {
        StartOne(now);
        now = target_.Now();
      }
      if (Stopped(now)) {
        if (outstanding_ == 0) return;
        if (give_up_at == kNever) give_up_at = now + options_.drain_seconds;
        if (run_.interrupted && !cut_off) give_up_at = now;
        if (now >= give_up_at) {
          if (cut_off) return;
          cut_off = true;
          target_.CancelAll();
          give_up_at = now + kCollectSeconds;
        }
      }
      double until = give_up_at;
      if (give_up_at == kNever) until = std::min(stop_at_, due_.empty() ? kNever : due_.top());
      const double longest = stop_ ? kLongestWaitForStop : kLongestWait;
      for (RequestResult& result : target_.Wait(std::min(until, now + longest))) {
        Finish(std::move(result));
      }
      if (progress_) {
        progress_(target_.Now() - run_.begin,
                  static_cast<int64_t>(run_.samples.size()) - outstanding_);
      }
    }
  }

  bool Stopped(double now) const {
    if (run_.interrupted) return true;
    if (options_.requests > 0 && static_cast<int64_t>(run_.samples.size()) >= options_.requests) {
      return true;
    }
    // In an open loop, a request that was due before stop_at_ is sent even if the sender is late.
    return arrivals_ ? due_.top() >= stop_at_ : now >= stop_at_;
  }

  void StartOne(double now) {
    const double due = due_.top();
    due_.pop();
    if (arrivals_) {
      due_.push(run_.begin + arrivals_->Next());
      run_.start_lags.push_back(now - due);
    }
    const int64_t number = static_cast<int64_t>(run_.samples.size());
    const LoadRequest request = workload_.Make(warm_up_ ? -1 - number : number);
    LoadSample sample;
    sample.long_prompt = request.long_prompt;
    sample.shared_prefix = request.shared_prefix;
    sample.sent_prompt_tokens = static_cast<int64_t>(request.prompt.size());
    sample.asked_output_tokens = request.output_tokens;
    run_.samples.push_back(std::move(sample));
    run_.last_start = now;
    ++outstanding_;
    target_.Start(request, arrivals_ ? due : target_.Now());
  }

  void Finish(RequestResult result) {
    if ((result.index < 0) != warm_up_) return;  // result of an earlier warm-up
    const int64_t number = warm_up_ ? -1 - result.index : result.index;
    if (number >= static_cast<int64_t>(run_.samples.size())) {
      ++run_.answered_twice;
      return;
    }
    LoadSample& sample = run_.samples[static_cast<size_t>(number)];
    if (++sample.results > 1) return;
    --outstanding_;
    if (!arrivals_) {
      const double pause = result.error.empty() ? 0.0 : options_.error_pause;
      due_.push(target_.Now() + pause);
    }
    sample.result = std::move(result);
  }

  const LoadOptions& options_;
  const bool warm_up_;
  const Workload& workload_;
  LoadTarget& target_;
  const LoadProgress progress_;
  const std::function<bool()> stop_;
  LoadRun run_;
  double stop_at_ = kNever;
  int64_t outstanding_ = 0;
  std::optional<PoissonArrivals> arrivals_;  // set in an open loop only
  // Closed loop: the times at which idle clients send their next requests. Open loop: the time of
  // the next arrival only.
  std::priority_queue<double, std::vector<double>, std::greater<>> due_;
};

}  // namespace

absl::Status CheckLoadOptions(const LoadOptions& options) {
  if ((options.clients > 0) == (options.rate > 0.0) || options.clients < 0 ||
      !std::isfinite(options.rate)) {
    return absl::InvalidArgumentError(
        "expected either a number of clients (closed loop) or a rate of requests per second (open "
        "loop)");
  }
  if (options.requests <= 0 && !(options.seconds > 0.0)) {
    return absl::InvalidArgumentError("expected an end: a number of requests or of seconds");
  }
  return absl::OkStatus();
}

LoadRun RunLoad(const LoadOptions& options, const Workload& workload, LoadTarget& target,
                const LoadProgress& progress, const std::function<bool()>& stop) {
  return Driver(options, /*warm_up=*/false, workload, target, progress, stop).Run();
}

absl::Status WarmUp(int64_t requests, int clients, const Workload& workload, LoadTarget& target) {
  if (requests <= 0) return absl::OkStatus();
  LoadOptions options;
  options.clients = static_cast<int>(std::min<int64_t>(std::max(clients, 1), requests));
  options.requests = requests;
  const LoadRun run = Driver(options, /*warm_up=*/true, workload, target, {}, {}).Run();
  for (const LoadSample& sample : run.samples) {
    if (sample.results > 0 && sample.result.error.empty()) return absl::OkStatus();
  }
  const LoadSample& first = run.samples.front();
  return absl::UnavailableError(
      Concat("no request of the warm-up succeeded; the first one: ",
             first.results > 0 ? Printable(first.result.error) : std::string("no answer")));
}

}  // namespace moeserve::server
