#include "server/rpc/inference/infer_call.h"

#include <exception>
#include <optional>
#include <utility>

#include "server/base/api_error.h"
#include "server/rpc/inference/infer_messages.h"

namespace moeserve::server::rpc {

InferCall::InferCall(grpc::CallbackServerContext* context, bool raw,
                     inference::ModelInferResponse* response, ServerContext& server)
    : raw_(raw), response_(response), server_(server), call_(context, server, kModelInfer) {}

InferCall* InferCall::Start(grpc::CallbackServerContext* context,
                            const inference::ModelInferRequest& request,
                            inference::ModelInferResponse* response, ServerContext& server,
                            Dispatcher& dispatcher) {
  const bool raw = request.raw_input_contents_size() > 0;
  auto call = std::make_shared<InferCall>(context, raw, response, server);
  call->self_ = call;
  absl::Status status;
  try {
    status = call->Submit(request, dispatcher.queue());
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  if (status.ok()) {
    call->Advance();  // output may have arrived before launched_ was set
  } else {
    call->EndOnce(status);
  }
  return call.get();
}

absl::Status InferCall::Submit(const inference::ModelInferRequest& request,
                               const EventQueue& queue) {
  MOESERVE_RETURN_IF_ERROR(call_.Check());
  MOESERVE_ASSIGN_OR_RETURN(const InferRequest parsed, ParseInfer(request));
  MOESERVE_ASSIGN_OR_RETURN(
      run_, InferRun::Prepare(server_, parsed, Pieces::kNever, call_.key(), call_.record()));
  if (!run_->NeedsCompiling()) return Launch(queue);
  const bool posted = server_.work_pool().Post([self = shared_from_this(), queue] {
    absl::Status status;
    try {
      status = self->Launch(queue);
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    if (status.ok()) {
      self->Advance();
    } else {
      self->EndOnce(status);
    }
  });
  if (posted) return absl::OkStatus();
  server_.metrics().CountRejected(Rejection::kQueueFull);
  return MakeError(absl::StatusCode::kResourceExhausted, "queue_full",
                   "too many requests are waiting to be prepared");
}

absl::Status InferCall::Launch(const EventQueue& queue) {
  // Compiles without the lock, so that the call can be cancelled meanwhile.
  MOESERVE_RETURN_IF_ERROR(run_->Compile());
  std::lock_guard lock(mutex_);
  if (ended_) return absl::OkStatus();
  MOESERVE_RETURN_IF_ERROR(run_->Launch(call_.deadline(), [weak = weak_from_this(), queue] {
    Dispatcher::Post(*queue, [weak] {
      if (const auto self = weak.lock()) self->Advance();
    });
  }));
  launched_ = true;
  return absl::OkStatus();
}

void InferCall::Advance() {
  absl::Status status;
  {
    std::lock_guard lock(mutex_);
    if (ended_ || !launched_) return;
    Result<std::optional<InferAnswer>> answer = run_->Take();
    if (answer.ok() && !*answer) return;
    if (answer.ok()) {
      Fill(**answer, raw_, *response_);
    } else {
      status = answer.status();
    }
  }
  EndOnce(status);
}

void InferCall::EndOnce(const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
  }
  Finish(call_.End(status));
}

void InferCall::OnCancel() {
  {
    std::lock_guard lock(mutex_);
    if (launched_) run_->Cancel();
  }
  EndOnce(call_.CancelReason());
}

void InferCall::OnDone() {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    if (launched_) run_.reset();
  }
  self_.reset();
}

}  // namespace moeserve::server::rpc
