#include "server/rpc/calls/score_call.h"

#include <utility>
#include <vector>

#include "server/base/api_error.h"
#include "server/rpc/messages/messages.h"

namespace moeserve::server::rpc {

ScoreCall::ScoreCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
                     Dispatcher& dispatcher)
    : UnaryCall(context, server, kScore), server_(server), dispatcher_(dispatcher) {}

absl::Status ScoreCall::Run(const v1::ScoreRequest& request) {
  const ApiKey* const key = call().key().get();
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server_.ModelFor(request.model(), key));
  const Engine& engine = model->engine();
  if (engine.spec().encoder != nullptr) {
    return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_task",
                     "Score: expected a model without an encoder, whose texts stand alone; use "
                     "Generate with prompt_logprobs and a decoder_prompt",
                     "model");
  }
  const RequestRules rules = server_.Rules(*model, key);
  MOESERVE_ASSIGN_OR_RETURN(CompletionParams params, ParseScore(request, rules));
  MOESERVE_ASSIGN_OR_RETURN(auto prompts, PreparePrompts(params, PromptRulesOf(engine)));
  response().set_model(params.model);
  submission_ = std::make_unique<Submission>(
      server_.Submissions(model, call().key(), call().record()), std::move(params), "score-");
  MOESERVE_RETURN_IF_ERROR(submission_->SetPrompts(std::move(prompts)));
  MOESERVE_ASSIGN_OR_RETURN(auto generation,
                            submission_->Start(call().engine_deadline(),
                                               AdvanceOn(dispatcher_.queue(), weak_from_this())));
  {
    MutexLock lock(mutex_);
    if (!done_) generation_ = std::move(generation);
  }
  Advance();  // output may have arrived before generation_ was set
  return absl::OkStatus();
}

absl::Status ScoreCall::Take(const OutputDelta& delta) {
  const std::vector<TokenId>& ids = submission_->prompts().front().ids;
  const Tokenizer* const tokenizer = submission_->engine()->tokenizer();
  double sum = response().sum_logprob();
  for (size_t i = 0; i < delta.prompt_logprobs.size() && i < ids.size(); ++i) {
    v1::TokenLogprob& token = *response().add_tokens();
    if (!delta.prompt_logprobs[i]) {
      FillUnscored(ids[i], tokenizer, token);
      continue;
    }
    MOESERVE_RETURN_IF_ERROR(Fill(*delta.prompt_logprobs[i], tokenizer, token));
    sum += delta.prompt_logprobs[i]->logprob;
    response().set_scored_tokens(response().scored_tokens() + 1);
  }
  response().set_sum_logprob(sum);
  return absl::OkStatus();
}

void ScoreCall::Advance() {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (generation_ == nullptr) return;
    for (const ChoiceEvent& event : generation_->Take()) {
      status = event.error.ok() ? Take(event.delta) : event.error;
      if (!status.ok()) break;
    }
    if (status.ok() && !generation_->finished()) return;
    generation_->Cancel();
  }
  EndOnce(status);
}

void ScoreCall::Cancel() {
  MutexLock lock(mutex_);
  done_ = true;
  if (generation_ != nullptr) generation_->Cancel();
}

void ScoreCall::OnDone() {
  {
    MutexLock lock(mutex_);
    done_ = true;
    generation_.reset();
  }
  UnaryCall::OnDone();
}

}  // namespace moeserve::server::rpc
