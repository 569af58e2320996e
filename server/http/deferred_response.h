// An answer that is prepared on the work pool instead of the io thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "server/base/work_pool.h"
#include "server/http/types.h"

namespace moeserve::server::http {

class DeferredResponse final : public PendingResponse {
 public:
  // Runs `job` on the pool; the answer then continues as the job's result. `wake` as Request::wake.
  // Returns an error answer (503, queue_full) if too many tasks wait. The job is not run if the
  // answer is destroyed before its turn.
  static Handled Start(WorkPool& pool, std::function<Handled()> job, std::function<void()> wake);

  ~DeferredResponse() override;

  Progress Next() override;
  void CheckBacklog() override {
    if (inner_ != nullptr) inner_->CheckBacklog();
  }
  int FinalStatus() const override { return inner_ != nullptr ? inner_->FinalStatus() : 200; }

 private:
  struct Shared {
    std::mutex mutex;
    std::optional<Handled> result;
    bool abandoned = false;
  };

  explicit DeferredResponse(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  const std::shared_ptr<Shared> shared_;
  std::unique_ptr<PendingResponse> inner_;
};

}  // namespace moeserve::server::http
