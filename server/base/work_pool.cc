#include "server/base/work_pool.h"

#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace moeserve::server {
namespace {

constexpr int kNice = 10;
constexpr double kHalfLifeSeconds = 10.0;
// A client that has used more than this recently leaves one thread to others.
constexpr double kHeavySeconds = 0.5;
constexpr double kForgottenSeconds = 0.001;
constexpr size_t kMaxIdleClients = 1024;

}  // namespace

WorkPool::WorkPool(int threads, size_t max_waiting)
    : max_waiting_(max_waiting), threads_for_heavy_(std::max(1, threads - 1)) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

WorkPool::~WorkPool() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool WorkPool::Post(std::function<void()> task, ClientId client) {
  {
    MutexLock lock(mutex_);
    if (waiting_ >= max_waiting_) return false;
    Client& queue = clients_[client];
    const size_t share = client == 0 ? max_waiting_ : std::max<size_t>(1, max_waiting_ / 4 * 3);
    if (queue.tasks.size() >= share) return false;
    queue.tasks.push_back(std::move(task));
    ++waiting_;
  }
  changed_.notify_one();
  return true;
}

void WorkPool::WaitUntilIdle(std::chrono::steady_clock::time_point deadline) {
  MutexLock lock(mutex_);
  idle_.wait_until(lock, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return running_ == 0 && waiting_ == 0;
  });
}

double WorkPool::Used(const Client& client, Clock::time_point now) {
  const double age = std::chrono::duration<double>(now - client.since).count();
  return client.used_seconds * std::exp2(-age / kHalfLifeSeconds);
}

bool WorkPool::IsHeavy(ClientId id, const Client& client, Clock::time_point now) {
  return id != 0 && Used(client, now) > kHeavySeconds;
}

std::unordered_map<ClientId, WorkPool::Client>::iterator WorkPool::Next(Clock::time_point now) {
  auto best = clients_.end();
  double best_used = 0.0;
  for (auto it = clients_.begin(); it != clients_.end(); ++it) {
    const Client& client = it->second;
    if (client.tasks.empty()) continue;
    // Once the pool is to end, every thread runs what is left.
    if (!stopping_ && running_heavy_ >= threads_for_heavy_ && IsHeavy(it->first, client, now)) {
      continue;
    }
    const double used = Used(client, now);
    if (best == clients_.end() || client.running < best->second.running ||
        (client.running == best->second.running && used < best_used)) {
      best = it;
      best_used = used;
    }
  }
  return best;
}

void WorkPool::Forget(Clock::time_point now) {
  const bool many = clients_.size() > kMaxIdleClients;
  std::erase_if(clients_, [&](const auto& entry) {
    const Client& client = entry.second;
    return client.tasks.empty() && client.running == 0 &&
           (many || Used(client, now) < kForgottenSeconds);
  });
}

void WorkPool::Run() {
  pthread_setname_np(pthread_self(), "work pool");  // for ps, top and debuggers
  // The tasks of one client must not take the processor from the requests that run: the engine's
  // threads and those that do input and output come first. On Linux, this concerns the calling
  // thread only.
  setpriority(PRIO_PROCESS, 0, std::min(getpriority(PRIO_PROCESS, 0) + kNice, 19));
  MutexLock lock(mutex_);
  while (true) {
    auto next = clients_.end();
    changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      next = Next(Clock::now());
      return next != clients_.end() || (stopping_ && waiting_ == 0);
    });
    if (next == clients_.end()) return;
    const Clock::time_point start = Clock::now();
    const ClientId id = next->first;
    const bool heavy = IsHeavy(id, next->second, start);
    {
      const std::function<void()> task = std::move(next->second.tasks.front());
      next->second.tasks.pop_front();
      --waiting_;
      ++next->second.running;
      ++running_;
      if (heavy) ++running_heavy_;
      lock.unlock();
      task();
    }
    lock.lock();
    const Clock::time_point now = Clock::now();
    Client& client = clients_.at(id);  // has a running task, so it is not forgotten
    --client.running;
    client.used_seconds = Used(client, now) + std::chrono::duration<double>(now - start).count();
    client.since = now;
    Forget(now);
    --running_;
    if (heavy) --running_heavy_;
    // A task of a client that uses much time may run now.
    if (waiting_ > 0) changed_.notify_all();
    if (running_ == 0 && waiting_ == 0) idle_.notify_all();
  }
}

}  // namespace moeserve::server
