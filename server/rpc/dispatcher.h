// A thread that does what the engine thread must not: it may take locks and call into gRPC.
#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace moeserve::server::rpc {

// Tasks run one at a time in the order they were posted.
class Dispatcher {
 public:
  // Where to post; thread-safe. May outlive the dispatcher: what is posted then is dropped.
  class Queue;
  static void Post(Queue& queue, std::function<void()> task);

  Dispatcher();
  ~Dispatcher();  // runs what was posted, then joins

  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  const std::shared_ptr<Queue>& queue() const { return queue_; }

 private:
  const std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace moeserve::server::rpc
