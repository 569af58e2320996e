// A response whose slow steps run on a work pool instead of the I/O thread, which all connections
// share.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "server/base/work_pool.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// Continues as `inner`. Calls inner->Next() on `pool` where inner->NextIsSlow(), else directly, and
// also directly if too many tasks wait in the pool. If this object is destroyed while a step runs,
// `inner` is destroyed after the step.
class OffloadedResponse final : public PendingResponse {
 public:
  // `pool` must outlive the result. Request::wake describes `wake`.
  OffloadedResponse(std::shared_ptr<PendingResponse> inner, WorkPool& pool,
                    std::function<void()> wake)
      : inner_(std::move(inner)), pool_(pool), wake_(std::move(wake)) {}
  ~OffloadedResponse() override;

  Progress Next() override;
  // While a step runs, the next step notices the backlog.
  void CheckBacklog() override {
    if (step_ == nullptr) inner_->CheckBacklog();
  }
  std::string_view StreamType() const override { return inner_->StreamType(); }
  std::string_view KeepAliveText() const override { return inner_->KeepAliveText(); }
  int FinalStatus() const override { return inner_->FinalStatus(); }

 private:
  // A call of inner_->Next() on the pool.
  struct Step {
    Mutex mutex;
    std::optional<Progress> result ABSL_GUARDED_BY(mutex);
    std::exception_ptr error ABSL_GUARDED_BY(mutex);  // what the call threw
    bool abandoned ABSL_GUARDED_BY(mutex) = false;
  };

  // Posts a step to the pool. Returns null if too many tasks wait.
  std::shared_ptr<Step> Post();

  const std::shared_ptr<PendingResponse> inner_;
  WorkPool& pool_;
  const std::function<void()> wake_;
  std::shared_ptr<Step> step_;  // null: no step runs on the pool
};

}  // namespace moeserve::server::http
