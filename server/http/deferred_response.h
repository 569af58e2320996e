// A response that is prepared on the work pool instead of the I/O thread.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "server/base/work_pool.h"
#include "server/http/types.h"

namespace moeserve::server::http {

class DeferredResponse final : public PendingResponse {
 public:
  // Runs `job` on the pool. The returned response waits for the job and then continues as the job's
  // result. Request::wake describes `wake`. Returns an error response (503, queue_full) if too many
  // tasks wait. If the returned response is destroyed before the job has started, the job does not
  // run.
  static Handled Start(WorkPool& pool, std::function<Handled()> job, std::function<void()> wake,
                       ClientId client);

  ~DeferredResponse() override;

  Progress Next() override;
  void CheckBacklog() override {
    if (inner_ != nullptr) inner_->CheckBacklog();
  }
  std::string_view StreamType() const override {
    return inner_ != nullptr ? inner_->StreamType() : PendingResponse::StreamType();
  }
  std::string_view KeepAliveText() const override {
    return inner_ != nullptr ? inner_->KeepAliveText() : PendingResponse::KeepAliveText();
  }
  int FinalStatus() const override { return inner_ != nullptr ? inner_->FinalStatus() : 200; }

 private:
  struct Shared {
    Mutex mutex;
    std::optional<Handled> result ABSL_GUARDED_BY(mutex);
    std::exception_ptr error ABSL_GUARDED_BY(mutex);  // which the job threw
    bool abandoned ABSL_GUARDED_BY(mutex) = false;
  };

  explicit DeferredResponse(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  const std::shared_ptr<Shared> shared_;
  std::unique_ptr<PendingResponse> inner_;
};

}  // namespace moeserve::server::http
