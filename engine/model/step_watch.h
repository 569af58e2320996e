// A guard of a step: what has to happen while it runs and when it ends.
#pragma once

#include <exception>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "engine/step/step_listener.h"
#include "kernels/exchange/exchange.h"

namespace moeserve {

// Lives as long as a step. Tells the step's listener if an exception ends the step. While it lives,
// a rank that waits for others calls `check`. `listener` and `exchange` may be null; `status` gets
// what the listener returns.
class StepWatch {
 public:
  StepWatch(StepListener* listener, Exchange* exchange, absl::Status& status,
            std::function<absl::Status()> check)
      : listener_(listener), exchange_(exchange), status_(status) {
    if (exchange_ != nullptr) exchange_->SetWaitCheck(std::move(check));
  }
  ~StepWatch() {
    if (exchange_ != nullptr) exchange_->SetWaitCheck(nullptr);
    if (listener_ != nullptr && std::uncaught_exceptions() > before_) {
      status_ = listener_->StepFailed();
    }
  }
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

 private:
  StepListener* const listener_;
  Exchange* const exchange_;
  absl::Status& status_;
  const int before_ = std::uncaught_exceptions();
};

}  // namespace moeserve
