#include "server/rpc/calls/encode_call.h"

#include <utility>
#include <vector>

#include "server/rpc/messages/encode_messages.h"

namespace moeserve::server::rpc {

EncodeCall::EncodeCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
                       Dispatcher& dispatcher)
    : UnaryCall(context, server, kEncode), server_(server), dispatcher_(dispatcher) {}

absl::Status EncodeCall::Run(const v1::EncodeRequest& request) {
  const ApiKey* const key = call().key().get();
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server_.ModelFor(request.model(), key));
  const RequestRules rules = server_.Rules(*model, key);
  MOESERVE_ASSIGN_OR_RETURN(EncodeJob job, ParseEncode(request, rules, model->encode_model()));
  MOESERVE_ASSIGN_OR_RETURN(
      auto texts, PrepareTexts(job, model->encode_model(), rules.limits.max_prompt_bytes));
  MOESERVE_ASSIGN_OR_RETURN(
      auto run, EncodeRun::Prepare(server_.Submissions(model, call().key(), call().record()),
                                   model->encode_model(), std::move(job), std::move(texts)));
  MOESERVE_RETURN_IF_ERROR(
      run->Start(call().engine_deadline(), AdvanceOn(dispatcher_.queue(), weak_from_this())));
  {
    MutexLock lock(mutex_);
    if (!done_) run_ = std::move(run);
  }
  Advance();  // results may have arrived before run_ was set
  return absl::OkStatus();
}

void EncodeCall::Advance() {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (run_ == nullptr || done_) return;
    const Result<bool> ended = run_->Advance();
    if (ended.ok() && !*ended) return;
    status = ended.status();
    if (status.ok()) FillEncoded(*run_, response());
    run_->Cancel();
    done_ = true;
  }
  EndOnce(status);
}

void EncodeCall::Cancel() {
  MutexLock lock(mutex_);
  done_ = true;
  if (run_ != nullptr) run_->Cancel();
}

void EncodeCall::OnDone() {
  {
    MutexLock lock(mutex_);
    done_ = true;
    run_.reset();
  }
  UnaryCall::OnDone();
}

}  // namespace moeserve::server::rpc
