// A thread for tasks that the engine thread must not run itself, because they take locks and call
// gRPC.
#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace moeserve::server::rpc {

// Runs tasks one at a time, in the order in which they were posted.
class Dispatcher {
 public:
  // The queue of tasks. Thread-safe. May outlive the dispatcher; tasks posted afterwards are
  // dropped.
  class Queue;
  static void Post(Queue& queue, std::function<void()> task);

  Dispatcher();
  ~Dispatcher();  // runs the waiting tasks, then joins the thread

  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  const std::shared_ptr<Queue>& queue() const { return queue_; }

 private:
  const std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace moeserve::server::rpc
