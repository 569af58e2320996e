#include "server/rpc/score_call.h"

#include <exception>
#include <utility>
#include <vector>

#include "server/rpc/messages.h"

namespace moeserve::server::rpc {

ScoreCall::ScoreCall(grpc::CallbackServerContext* context, v1::ScoreResponse* response,
                     ServerContext& server)
    : response_(response), server_(server), call_(context, server, kScore) {}

ScoreCall* ScoreCall::Start(grpc::CallbackServerContext* context, const v1::ScoreRequest& request,
                            v1::ScoreResponse* response, ServerContext& server,
                            Dispatcher& dispatcher) {
  auto call = std::make_shared<ScoreCall>(context, response, server);
  call->self_ = call;
  absl::Status status;
  try {
    status = call->Submit(request, dispatcher);
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  if (status.ok()) {
    call->Advance();
  } else {
    call->EndOnce(status);
  }
  return call.get();
}

absl::Status ScoreCall::Submit(const v1::ScoreRequest& request, Dispatcher& dispatcher) {
  MOESERVE_RETURN_IF_ERROR(call_.Check());
  const ApiKey* const key = call_.key().get();
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server_.ModelFor(request.model(), key));
  const EngineApi& engine = model->engine();
  const RequestRules rules = server_.Rules(*model, key);
  MOESERVE_ASSIGN_OR_RETURN(CompletionParams params, ParseScore(request, rules));
  MOESERVE_ASSIGN_OR_RETURN(auto prompts,
                            PreparePrompts(params, engine.tokenizer(), engine.max_model_len()));
  response_->set_model(params.model);
  submission_ = std::make_unique<Submission>(
      server_.Submissions(model, call_.key(), call_.record()), std::move(params), "score-");
  MOESERVE_RETURN_IF_ERROR(submission_->SetPrompts(std::move(prompts)));
  auto generation =
      submission_->Start(call_.deadline(), [weak = weak_from_this(), queue = dispatcher.queue()] {
        Dispatcher::Post(*queue, [weak] {
          if (const auto self = weak.lock()) self->Advance();
        });
      });
  if (!generation.ok()) return generation.status();
  std::lock_guard lock(mutex_);
  generation_ = *std::move(generation);
  return absl::OkStatus();
}

absl::Status ScoreCall::Take(const OutputDelta& delta) {
  const std::vector<TokenId>& ids = submission_->prompts().front().ids;
  const Tokenizer* const tokenizer = submission_->engine()->tokenizer();
  double sum = response_->sum_logprob();
  for (size_t i = 0; i < delta.prompt_logprobs.size() && i < ids.size(); ++i) {
    v1::TokenLogprob& token = *response_->add_tokens();
    if (!delta.prompt_logprobs[i]) {
      FillUnscored(ids[i], tokenizer, token);
      continue;
    }
    MOESERVE_RETURN_IF_ERROR(Fill(*delta.prompt_logprobs[i], tokenizer, token));
    sum += delta.prompt_logprobs[i]->logprob;
    response_->set_scored_tokens(response_->scored_tokens() + 1);
  }
  response_->set_sum_logprob(sum);
  return absl::OkStatus();
}

void ScoreCall::Advance() {
  absl::Status status;
  {
    std::lock_guard lock(mutex_);
    if (ended_ || generation_ == nullptr) return;
    for (const ChoiceEvent& event : generation_->Take()) {
      status = event.error.ok() ? Take(event.delta) : event.error;
      if (!status.ok()) break;
    }
    if (status.ok() && !generation_->finished()) return;
    generation_->Cancel();
  }
  EndOnce(status);
}

void ScoreCall::EndOnce(const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
  }
  Finish(call_.End(status));
}

void ScoreCall::OnCancel() {
  {
    std::lock_guard lock(mutex_);
    if (generation_ != nullptr) generation_->Cancel();
  }
  EndOnce(call_.CancelReason());
}

void ScoreCall::OnDone() {
  {
    std::lock_guard lock(mutex_);
    generation_.reset();
  }
  self_.reset();
}

}  // namespace moeserve::server::rpc
