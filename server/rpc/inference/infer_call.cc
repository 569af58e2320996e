#include "server/rpc/inference/infer_call.h"

#include <optional>
#include <utility>

#include "server/rpc/inference/infer_messages.h"

namespace moeserve::server::rpc {

InferCall::InferCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
                     Dispatcher& dispatcher)
    : UnaryCall(context, server, kModelInfer), server_(server), queue_(dispatcher.queue()) {}

absl::Status InferCall::Run(const inference::ModelInferRequest& request) {
  raw_ = request.raw_input_contents_size() > 0;
  MOESERVE_ASSIGN_OR_RETURN(const InferRequest parsed, ParseInfer(request));
  MOESERVE_ASSIGN_OR_RETURN(
      run_, InferRun::Prepare(server_, parsed, Pieces::kNever, call().key(), call().record()));
  if (!run_->NeedsCompiling()) {
    MOESERVE_RETURN_IF_ERROR(Launch());
    Advance();  // output may have arrived before launched_ was set
    return absl::OkStatus();
  }
  return PrepareLater(
      server_, call().client(), [self = shared_from_this()] { return self->Launch(); },
      [self = shared_from_this()](const absl::Status& status) {
        status.ok() ? self->Advance() : self->EndOnce(status);
      });
}

absl::Status InferCall::Launch() {
  // Compiles without the lock, so that the call can be cancelled meanwhile.
  MOESERVE_RETURN_IF_ERROR(run_->Compile());
  MutexLock lock(mutex_);
  if (done_) return absl::OkStatus();
  MOESERVE_RETURN_IF_ERROR(
      run_->Launch(call().engine_deadline(), AdvanceOn(queue_, weak_from_this())));
  launched_ = true;
  return absl::OkStatus();
}

void InferCall::Advance() {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (done_ || !launched_) return;
    Result<std::optional<InferAnswer>> answer = run_->Take();
    if (answer.ok() && !*answer) return;
    done_ = true;
    if (answer.ok()) {
      Fill(**answer, raw_, response());
    } else {
      status = answer.status();
    }
  }
  EndOnce(status);
}

void InferCall::Cancel() {
  MutexLock lock(mutex_);
  done_ = true;
  if (launched_) run_->Cancel();
}

void InferCall::OnDone() {
  {
    MutexLock lock(mutex_);
    done_ = true;
    if (launched_) run_.reset();
  }
  UnaryCall::OnDone();
}

}  // namespace moeserve::server::rpc
