#include "server/logging/log_queue.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace moeserve::server {

struct LogQueue::State {
  State(int descriptor, size_t limit) : fd(descriptor), max_bytes(limit) {}

  const int fd;
  const size_t max_bytes;
  std::atomic<uint64_t> dropped = 0;
  Mutex mutex;
  std::condition_variable changed;
  std::deque<std::string> lines ABSL_GUARDED_BY(mutex);
  size_t bytes ABSL_GUARDED_BY(mutex) = 0;  // of `lines` and of the line that is being written
  bool ended ABSL_GUARDED_BY(mutex) = false;
  bool has_thread ABSL_GUARDED_BY(mutex) = false;

  void Run();
  bool Write(const std::string& line) const;
};

// Returns false if the line could not be written completely.
bool LogQueue::State::Write(const std::string& line) const {
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = write(fd, line.data() + done, line.size() - done);
    if (n >= 0) {
      done += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      // Another process that shares the open file made it non-blocking.
      pollfd writable{fd, POLLOUT, 0};
      poll(&writable, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

void LogQueue::State::Run() {
  MutexLock lock(mutex);
  while (true) {
    changed.wait(lock,
                 [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return ended || !lines.empty(); });
    if (lines.empty()) return;
    const std::string line = std::move(lines.front());
    lines.pop_front();
    lock.unlock();
    if (!Write(line)) ++dropped;
    lock.lock();
    bytes -= line.size();
    if (bytes == 0) changed.notify_all();
  }
}

LogQueue::LogQueue(int fd, size_t max_bytes) : state_(std::make_shared<State>(fd, max_bytes)) {
  try {
    std::thread([state = state_] { state->Run(); }).detach();
    state_->has_thread = true;
  } catch (const std::system_error&) {
    // Every line is dropped.
  }
}

LogQueue::~LogQueue() {
  {
    const MutexLock lock(state_->mutex);
    state_->ended = true;
  }
  state_->changed.notify_all();
}

bool LogQueue::Append(std::string line) {
  {
    const MutexLock lock(state_->mutex);
    if (!state_->has_thread || state_->bytes + line.size() > state_->max_bytes) {
      ++state_->dropped;
      return false;
    }
    state_->bytes += line.size();
    state_->lines.push_back(std::move(line));
  }
  state_->changed.notify_all();
  return true;
}

bool LogQueue::Flush(std::chrono::steady_clock::duration timeout) {
  MutexLock lock(state_->mutex);
  return state_->changed.wait_for(
      lock, timeout,
      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) { return state_->bytes == 0; });
}

uint64_t LogQueue::dropped() const { return state_->dropped; }

}  // namespace moeserve::server
