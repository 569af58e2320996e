// What is known about one request, for its log line and its span. Holds no text of a prompt or an
// answer, and no key.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "server/tracing/trace_context.h"

namespace moeserve::server {

using SteadyPoint = std::chrono::steady_clock::time_point;

// What is known when a request arrives.
struct RequestStart {
  std::string_view protocol;  // "http" or "grpc"; a literal
  std::string request_id;
  std::string method;  // of HTTP, or "SERVICE/METHOD" of gRPC
  std::string path;    // of HTTP, as sent, without the query; hostile
  std::string client;  // address and port; empty if unknown
  SteadyPoint time;    // when its first byte arrived
};

// What the code that runs the model adds. Fields that it did not get to are empty.
struct RequestFacts {
  std::string model;
  std::string operation;  // "chat" or "text_completion"
  std::string response_id;
  int max_tokens = 0;
  int choices = 0;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t output_tokens = 0;
  std::vector<std::string_view> finish_reasons;  // of the choices that ended, in any order
  std::optional<SteadyPoint> submitted;
  std::optional<double> queue_seconds;  // of the first choice that left the queue
  std::optional<SteadyPoint> first_token;
  std::optional<SteadyPoint> last_token;
};

// Thread-safe.
class RequestRecord {
 public:
  RequestRecord(RequestStart start, TraceContext trace, bool shows_trace)
      : start_(std::move(start)), trace_(std::move(trace)), shows_trace_(shows_trace) {}

  const RequestStart& start() const { return start_; }
  const TraceContext& trace() const { return trace_; }
  // Returns whether the log and the client learn the trace's ids: if the client has named a trace,
  // or spans are exported.
  bool shows_trace() const { return shows_trace_; }
  // When the request arrived, on the wall clock.
  absl::Time wall_start() const { return wall_start_; }

  // Calls change(RequestFacts&) without letting others in.
  template <typename Change>
  void Update(const Change& change) {
    const MutexLock lock(mutex_);
    change(facts_);
  }
  RequestFacts facts() const {
    const MutexLock lock(mutex_);
    return facts_;
  }

 private:
  const RequestStart start_;
  const TraceContext trace_;
  const bool shows_trace_;
  const absl::Time wall_start_ =
      absl::Now() - absl::FromChrono(std::chrono::steady_clock::now() - start_.time);
  mutable Mutex mutex_;
  RequestFacts facts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve::server
