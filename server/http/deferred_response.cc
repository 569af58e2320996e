#include "server/http/deferred_response.h"

#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "server/base/api_error.h"
#include "server/http/error_response.h"

namespace moeserve::server::http {

Handled DeferredResponse::Start(WorkPool& pool, std::function<Handled()> job,
                                std::function<void()> wake, ClientId client) {
  auto shared = std::make_shared<Shared>();
  const bool posted = pool.Post(
      [shared, job = std::move(job), wake = std::move(wake)] {
        {
          MutexLock lock(shared->mutex);
          if (shared->abandoned) return;
        }
        std::optional<Handled> result;
        std::exception_ptr error;
        try {
          result = job();
        } catch (...) {
          error = std::current_exception();
        }
        {
          MutexLock lock(shared->mutex);
          if (shared->abandoned) return;
          shared->result = std::move(result);
          shared->error = error;
        }
        wake();
      },
      client);
  if (!posted) {
    return ErrorResponse(MakeError(absl::StatusCode::kResourceExhausted, "queue_full",
                                   "too many requests are waiting to be prepared"));
  }
  return std::unique_ptr<PendingResponse>(new DeferredResponse(std::move(shared)));
}

DeferredResponse::~DeferredResponse() {
  MutexLock lock(shared_->mutex);
  shared_->abandoned = true;
}

Progress DeferredResponse::Next() {
  if (inner_ == nullptr) {
    std::optional<Handled> result;
    try {
      MutexLock lock(shared_->mutex);
      if (shared_->error != nullptr) std::rethrow_exception(shared_->error);
      result = std::exchange(shared_->result, std::nullopt);
    } catch (const std::exception& error) {
      return ErrorResponse(absl::InternalError(error.what()));
    }
    if (!result) return Wait{};
    if (Response* response = std::get_if<Response>(&*result)) return std::move(*response);
    inner_ = std::get<std::unique_ptr<PendingResponse>>(std::move(*result));
  }
  return inner_->Next();
}

}  // namespace moeserve::server::http
