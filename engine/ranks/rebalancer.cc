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
  ExpertLoads loads = watch_.loads();
  {
    const MutexLock lock(mutex_);
    Settle();
    for (const auto& block : refused_) loads.erase(block);
  }
  auto plan =
      PlanRebalance(*placement, loads, options_.parameters, options_.bytes, options_.limits);
  if (!plan.has_value()) return 0;
  const MutexLock lock(mutex_);
  if (stop_ || announced_ != nullptr) return 0;
  announced_ = std::make_shared<const ExpertPlacement>(std::move(plan->placement));
  announced_bytes_ = plan->bytes;
  leader_.Announce(announced_);
  return plan->bytes;
}

void Rebalancer::Settle() {
  if (announced_ == nullptr) return;
  const auto [used, busy] = leader_.placement();
  if (used->version() >= announced_->version()) {
    moved_bytes_ += announced_bytes_;
  } else if (busy) {
    return;
  } else {
    for (const auto& [block, holders] : announced_->blocks()) {
      if (holders != used->holders(block.first, block.second)) refused_.insert(block);
    }
  }
  announced_ = nullptr;
}

int64_t Rebalancer::moved_bytes() {
  const MutexLock lock(mutex_);
  Settle();
  return moved_bytes_;
}

}  // namespace moeserve
