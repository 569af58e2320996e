#include "server/rpc/dispatcher.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/mutex.h"

namespace moeserve::server::rpc {

class Dispatcher::Queue {
 public:
  void Post(std::function<void()> task) {
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
      tasks_.push_back(std::move(task));
      if (tasks_.size() > 1) return;
    }
    changed_.notify_one();
  }

  void Stop() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
  }

  void Run() {
    MutexLock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !tasks_.empty();
      });
      if (tasks_.empty()) return;
      std::deque<std::function<void()>> batch = std::exchange(tasks_, {});
      lock.unlock();
      for (auto& task : batch) task();
      batch.clear();
      lock.lock();
    }
  }

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

void Dispatcher::Post(Queue& queue, std::function<void()> task) { queue.Post(std::move(task)); }

void Dispatcher::PostOrStop(Queue& queue, const std::function<void()>& task) noexcept {
  constexpr int kTries = 1000;
  for (int i = 0; i < kTries; ++i) {
    try {
      queue.Post(task);
      return;
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  MOESERVE_CHECK(false, "no memory to advance a call");
}

Dispatcher::Dispatcher()
    : queue_(std::make_shared<Queue>()), thread_([queue = queue_] { queue->Run(); }) {}

Dispatcher::~Dispatcher() {
  queue_->Stop();
  thread_.join();
}

}  // namespace moeserve::server::rpc
