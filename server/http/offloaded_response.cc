#include "server/http/offloaded_response.h"

#include <utility>

namespace moeserve::server::http {

OffloadedResponse::~OffloadedResponse() {
  if (step_ == nullptr) return;
  MutexLock lock(step_->mutex);
  step_->abandoned = true;
}

Progress OffloadedResponse::Next() {
  while (true) {
    if (step_ == nullptr) {
      if (!inner_->NextIsSlow()) return inner_->Next();
      step_ = Post();
      return step_ != nullptr ? Wait{} : inner_->Next();
    }
    std::optional<Progress> result;
    {
      MutexLock lock(step_->mutex);
      if (step_->error != nullptr) std::rethrow_exception(step_->error);
      result = std::exchange(step_->result, std::nullopt);
    }
    if (!result) return Wait{};
    step_ = nullptr;
    // The response may have asked for another call while the step ran.
    if (!std::holds_alternative<Wait>(*result)) return *std::move(result);
  }
}

std::shared_ptr<OffloadedResponse::Step> OffloadedResponse::Post() {
  auto step = std::make_shared<Step>();
  const bool posted = pool_.Post([step, inner = inner_, wake = wake_]() mutable {
    {
      MutexLock lock(step->mutex);
      if (step->abandoned) return;
    }
    std::optional<Progress> result;
    std::exception_ptr error;
    try {
      result = inner->Next();
    } catch (...) {
      error = std::current_exception();
    }
    inner = nullptr;
    {
      MutexLock lock(step->mutex);
      step->result = std::move(result);
      step->error = error;
    }
    wake();
  });
  return posted ? step : nullptr;
}

}  // namespace moeserve::server::http
