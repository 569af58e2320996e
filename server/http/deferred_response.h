// An answer whose request must first be worked on away from the io thread.
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
  // Runs `job` on the pool and continues as what it returns; `wake` as Request::wake. Where too
  // much waits already, an error (503, queue_full). If the answer is abandoned before its turn
  // comes, the job is not run.
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
