#include "engine/ranks/rebalancer.h"

#include <pthread.h>

#include <memory>
#include <utility>

namespace moeserve {

Rebalancer::Rebalancer(Leader& leader, const LoadWatch& watch, RebalanceOptions options)
    : leader_(leader), watch_(watch), options_(std::move(options)) {
  if (options_.interval == absl::ZeroDuration()) return;
  thread_ = std::jthread([this](const std::stop_token& stop) { Run(stop); });
}

Rebalancer::~Rebalancer() { Stop(); }

void Rebalancer::Stop() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  thread_.request_stop();
  stopped_.notify_all();
}

void Rebalancer::Run(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "rebalancer");
  while (!stop.stop_requested()) {
    {
      MutexLock lock(mutex_);
      stopped_.wait_for(lock, stop, absl::ToChronoNanoseconds(options_.interval),
                        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; });
    }
    RunRound();
  }
}

int64_t Rebalancer::RunRound() {
  const auto [placement, busy] = leader_.placement();
  if (placement == nullptr || busy) return 0;
  auto plan = PlanRebalance(*placement, watch_.loads(), options_.parameters, options_.bytes,
                            options_.limits);
  if (!plan.has_value()) return 0;
  const MutexLock lock(mutex_);
  if (stop_) return 0;
  leader_.Announce(std::make_shared<const ExpertPlacement>(std::move(plan->placement)));
  moved_bytes_ += plan->bytes;
  return plan->bytes;
}

int64_t Rebalancer::moved_bytes() const {
  const MutexLock lock(mutex_);
  return moved_bytes_;
}

}  // namespace moeserve
