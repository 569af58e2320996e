#include "server/tracing/span_exporter.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <optional>
#include <random>
#include <stop_token>
#include <system_error>
#include <thread>

#include "base/error_text.h"
#include "base/mutex.h"
#include "server/logging/logging.h"
#include "server/tracing/collector_client.h"

namespace moeserve::server {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kReportInterval{60};
constexpr std::chrono::seconds kMaxEndWait{2};
constexpr milliseconds kMaxRetryAfter{60'000};

bool CanRetry(int status) {
  return status == 0 || status == 429 || status == 502 || status == 503 || status == 504;
}

// Returns a duration between half of `delay` and all of it, so that servers that failed together
// do not try again together.
milliseconds Jittered(milliseconds delay) {
  thread_local std::minstd_rand generator(std::random_device{}());
  return milliseconds(std::uniform_int_distribution<milliseconds::rep>(
      delay.count() / 2, std::max<milliseconds::rep>(delay.count(), 1))(generator));
}

}  // namespace

struct SpanExporter::State {
  State(SpanExporterOptions exporter_options, SpanResource span_resource)
      : options(std::move(exporter_options)), resource(std::move(span_resource)) {}

  const SpanExporterOptions options;
  const SpanResource resource;
  std::stop_source stop;  // ends the request to the collector
  std::atomic<uint64_t> exported = 0;
  std::atomic<uint64_t> dropped = 0;
  Mutex mutex;
  std::condition_variable changed;
  std::deque<Span> queue ABSL_GUARDED_BY(mutex);
  size_t sending ABSL_GUARDED_BY(mutex) = 0;         // spans of the batch that the thread has taken
  int flushing ABSL_GUARDED_BY(mutex) = 0;           // calls of Flush() that wait
  bool ended ABSL_GUARDED_BY(mutex) = false;         // the exporter is being destroyed
  bool thread_ended ABSL_GUARDED_BY(mutex) = false;  // or was never started

  void Run();
  void Send(const std::vector<Span>& batch);
  void Report(const std::string& reason);
  // Waits; returns false if the exporter was destroyed meanwhile.
  bool Pause(milliseconds delay);

  // Used by the thread alone.
  std::optional<std::chrono::steady_clock::time_point> last_report;
};

bool SpanExporter::State::Pause(milliseconds delay) {
  MutexLock lock(mutex);
  return !changed.wait_for(lock, delay,
                           [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return ended; });
}

void SpanExporter::State::Report(const std::string& reason) {
  const auto now = std::chrono::steady_clock::now();
  if (last_report && now - *last_report < kReportInterval) return;
  last_report = now;
  LogWarning("tracing", Concat("spans cannot be exported to ", options.endpoint.host, ':',
                               options.endpoint.port, ": ", Printable(reason, 200), "; ",
                               dropped.load(), " dropped since the start"));
}

void SpanExporter::State::Send(const std::vector<Span>& batch) {
  const std::string body = ExportRequestJson(resource, batch);
  milliseconds delay = options.retry_delay;
  std::string reason;
  for (int i = 1; i <= options.max_tries; ++i) {
    const CollectorAnswer answer =
        PostToCollector(options.endpoint, options.headers, body, options.timeout, stop.get_token());
    if (answer.status >= 200 && answer.status < 300) {
      const uint64_t rejected = std::min<uint64_t>(answer.rejected_spans, batch.size());
      exported += batch.size() - rejected;
      dropped += rejected;
      if (rejected > 0) Report(Concat("it rejected ", rejected, " of ", batch.size(), " spans"));
      return;
    }
    // The log may not exist any more if the resolver has blocked for long.
    if (stop.stop_requested()) break;
    reason = answer.status == 0 ? answer.error : Concat("it answered ", answer.status);
    if (!CanRetry(answer.status) || i == options.max_tries) break;
    const milliseconds pause =
        answer.retry_after ? std::min(*answer.retry_after, kMaxRetryAfter) : Jittered(delay);
    if (!Pause(pause)) break;
    delay = std::min(2 * delay, options.max_retry_delay);
  }
  dropped += batch.size();
  if (!stop.stop_requested()) Report(reason);
}

void SpanExporter::State::Run() {
  MutexLock lock(mutex);
  while (true) {
    changed.wait(lock,
                 [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return ended || !queue.empty(); });
    changed.wait_for(lock, options.delay, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      return ended || flushing > 0 || queue.size() >= options.max_batch;
    });
    if (ended) break;
    const auto end =
        queue.begin() + static_cast<std::ptrdiff_t>(std::min(queue.size(), options.max_batch));
    const std::vector<Span> batch(std::make_move_iterator(queue.begin()),
                                  std::make_move_iterator(end));
    queue.erase(queue.begin(), end);
    sending = batch.size();
    lock.unlock();
    Send(batch);
    lock.lock();
    sending = 0;
    changed.notify_all();
  }
  dropped += queue.size();
  queue.clear();
  thread_ended = true;
  changed.notify_all();
}

SpanExporter::SpanExporter(SpanExporterOptions options, SpanResource resource)
    : state_(std::make_shared<State>(std::move(options), std::move(resource))) {
  try {
    thread_ = std::thread([state = state_] { state->Run(); });
  } catch (const std::system_error&) {
    // Every span is dropped.
    state_->thread_ended = true;
  }
}

SpanExporter::~SpanExporter() {
  state_->stop.request_stop();
  MutexLock lock(state_->mutex);
  state_->ended = true;
  state_->changed.notify_all();
  const bool thread_ended = state_->changed.wait_for(
      lock, kMaxEndWait,
      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) { return state_->thread_ended; });
  lock.unlock();
  if (!thread_.joinable()) return;
  if (thread_ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void SpanExporter::Add(std::vector<Span> spans) {
  {
    const MutexLock lock(state_->mutex);
    if (state_->thread_ended || state_->queue.size() + spans.size() > state_->options.max_queued) {
      state_->dropped += spans.size();
      return;
    }
    std::move(spans.begin(), spans.end(), std::back_inserter(state_->queue));
  }
  state_->changed.notify_all();
}

bool SpanExporter::Flush(std::chrono::milliseconds timeout) {
  MutexLock lock(state_->mutex);
  ++state_->flushing;
  state_->changed.notify_all();
  const bool done = state_->changed.wait_for(lock, timeout,
                                             [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) {
                                               return state_->queue.empty() && state_->sending == 0;
                                             });
  --state_->flushing;
  return done;
}

uint64_t SpanExporter::exported() const { return state_->exported; }
uint64_t SpanExporter::dropped() const { return state_->dropped; }

}  // namespace moeserve::server
