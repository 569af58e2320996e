#include "server/rpc/score_call.h"

#include <exception>
#include <utility>

#include "base/message.h"
#include "server/base/request_id.h"
#include "server/rpc/messages.h"

namespace moeserve::server::rpc {

ScoreCall::ScoreCall(grpc::CallbackServerContext* context, v1::ScoreResponse* response,
                     ServerContext& server)
    : response_(response), server_(server), call_(context, server, "Score") {}

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
  MOESERVE_ASSIGN_OR_RETURN(engine_, server_.ServingEngine());
  MOESERVE_ASSIGN_OR_RETURN(GenerateParams params, ParseScore(request, server_.Rules()));
  const CompletionParams& completion = params.completion;
  MOESERVE_ASSIGN_OR_RETURN(
      const std::vector<PreparedPrompt> prompts,
      PreparePrompts(completion, engine_->tokenizer(), engine_->max_model_len()));
  ids_ = prompts.front().ids;
  response_->set_model(completion.model);
  std::vector<Request> requests =
      MakeEngineRequests(completion, prompts, Concat("score-", NewRequestId()), call_.deadline());
  requests.front().sampling.prompt_logprobs = params.prompt_logprobs;
  GenerationOptions options;
  options.metrics = server_.shared_metrics();
  options.wake = [weak = weak_from_this(), queue = dispatcher.queue()] {
    Dispatcher::Post(*queue, [weak] {
      if (const auto self = weak.lock()) self->Advance();
    });
  };
  auto generation = Generation::Start(engine_, std::move(requests), std::move(options));
  if (!generation.ok()) return generation.status();
  std::lock_guard lock(mutex_);
  generation_ = *std::move(generation);
  return absl::OkStatus();
}

absl::Status ScoreCall::Take(const OutputDelta& delta) {
  double sum = response_->sum_logprob();
  for (size_t i = 0; i < delta.prompt_logprobs.size() && i < ids_.size(); ++i) {
    v1::TokenLogprob& token = *response_->add_tokens();
    if (!delta.prompt_logprobs[i]) {
      FillUnscored(ids_[i], engine_->tokenizer(), token);
      continue;
    }
    MOESERVE_RETURN_IF_ERROR(Fill(*delta.prompt_logprobs[i], engine_->tokenizer(), token));
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
