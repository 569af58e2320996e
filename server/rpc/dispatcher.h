// A thread for tasks that the engine thread must not run itself, because they take locks and call
// gRPC.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>

namespace moeserve::server::rpc {

// Runs tasks one at a time, in the order in which they were posted.
class Dispatcher {
 public:
  // The queue of tasks. Thread-safe. May outlive the dispatcher; tasks posted afterwards are
  // dropped.
  class Queue;
  static void Post(Queue& queue, std::function<void()> task);
  // Post(), for a task without which a call would never end: never throws. If there is no memory,
  // tries again; after a second without memory the process ends.
  static void PostOrStop(Queue& queue, const std::function<void()>& task) noexcept;

  Dispatcher();
  ~Dispatcher();  // runs the waiting tasks, then joins the thread

  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  const std::shared_ptr<Queue>& queue() const { return queue_; }

 private:
  const std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

// Returns a function that posts a call of `call`'s Advance(), which does nothing if `call` does not
// exist any more.
template <typename T>
std::function<void()> AdvanceOn(std::shared_ptr<Dispatcher::Queue> queue, std::weak_ptr<T> call) {
  std::function<void()> advance = [call = std::move(call)] {
    if (const auto self = call.lock()) self->Advance();
  };
  return [queue = std::move(queue), advance = std::move(advance)] {
    Dispatcher::PostOrStop(*queue, advance);
  };
}

}  // namespace moeserve::server::rpc
