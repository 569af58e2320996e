// Writes lines to a file descriptor on a thread of its own, so that nobody who logs waits for the
// reader of a pipe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace moeserve::server {

// Thread-safe. A line that does not fit the queue, or that cannot be written, is dropped and
// counted.
class LogQueue {
 public:
  // `fd` stays open and is not owned. `max_bytes` limits the lines that wait to be written.
  LogQueue(int fd, size_t max_bytes);
  // Does not wait: the thread may be blocked in a write that never ends. It keeps what it needs and
  // writes the lines that are left, if the process lives that long.
  ~LogQueue();
  LogQueue(const LogQueue&) = delete;
  LogQueue& operator=(const LogQueue&) = delete;

  // Returns whether the line, which includes its end of line, was queued.
  bool Append(std::string line);

  // Waits until every line has been written or dropped; false if `timeout` passed before.
  bool Flush(std::chrono::steady_clock::duration timeout);

  // Returns the number of lines dropped since the start.
  uint64_t dropped() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace moeserve::server
