#include "server/completion_session.h"

#include <utility>

#include "server/convert.h"
#include "server/http/error_response.h"

namespace moeserve::server {

using Json = nlohmann::ordered_json;

CompletionSession::CompletionSession(std::shared_ptr<EngineApi> engine, CompletionParams params,
                                     std::vector<PreparedPrompt> prompts, AnswerIdentity identity)
    : engine_(std::move(engine)),
      params_(std::move(params)),
      prompts_(std::move(prompts)),
      identity_(std::move(identity)) {
  const int count = static_cast<int>(prompts_.size()) * params_.n;
  choices_.reserve(count);
  for (int i = 0; i < count; ++i) {
    choices_.emplace_back(LogprobArrays(engine_->tokenizer(), params_.return_tokens_as_token_ids));
    choices_.back().part.index = i;
  }
}

Result<std::unique_ptr<http::PendingResponse>> CompletionSession::Start(
    std::shared_ptr<EngineApi> engine, CompletionParams params, std::vector<PreparedPrompt> prompts,
    AnswerIdentity identity, absl::Time deadline, GenerationOptions options) {
  std::vector<Request> requests = MakeEngineRequests(params, prompts, identity.id, deadline);
  options.samples = params.n;
  std::unique_ptr<CompletionSession> session(
      new CompletionSession(engine, std::move(params), std::move(prompts), std::move(identity)));
  MOESERVE_ASSIGN_OR_RETURN(
      session->generation_,
      Generation::Start(std::move(engine), std::move(requests), std::move(options)));
  return std::unique_ptr<http::PendingResponse>(std::move(session));
}

http::Progress CompletionSession::Next() {
  std::string data;
  for (ChoiceEvent& event : generation_->Take()) {
    if (!event.error.ok()) return Fail(event.error);
    if (absl::Status status = Apply(event.choice, std::move(event.delta)); !status.ok()) {
      return Fail(status);
    }
    if (params_.stream) AppendChunk(event.choice, data);
  }
  const bool finished = generation_->finished();
  if (!params_.stream) {
    if (!finished) return http::Wait{};
    return UnaryAnswer();
  }
  if (finished) {
    if (params_.include_usage) {
      Json chunk = CompletionJson(identity_, Json::array());
      chunk["usage"] = UsageJson(PromptTokens(), CompletionTokens(), CachedTokens());
      data += SseEvent(chunk);
    }
    data += kSseDone;
  }
  if (data.empty()) return http::Wait{};
  streaming_ = true;
  return http::StreamPart{std::move(data), finished};
}

absl::Status CompletionSession::Apply(int index, OutputDelta delta) {
  Choice& choice = choices_[index];
  if (!choice.started) {
    choice.started = true;
    MOESERVE_RETURN_IF_ERROR(AddPrompt(choice, prompts_[index / params_.n], delta));
  }
  choice.part.text += delta.text;
  if (params_.return_token_ids) {
    auto& ids = choice.part.token_ids;
    if (!ids) ids.emplace();
    ids->insert(ids->end(), delta.tokens.begin(), delta.tokens.end());
  }
  if (params_.logprobs) {
    for (const TokenLogprob& logprob : delta.logprobs) {
      MOESERVE_RETURN_IF_ERROR(choice.logprobs.Add(logprob));
    }
  }
  choice.completion_tokens = delta.usage.completion_tokens;
  choice.cached_tokens = delta.usage.cached_tokens;
  if (delta.finished) {
    choice.part.finish_reason = delta.finish_reason;
    choice.part.stop_string = std::move(delta.stop_string);
    choice.part.stop_token = delta.stop_token;
  }
  return absl::OkStatus();
}

absl::Status CompletionSession::AddPrompt(Choice& choice, const PreparedPrompt& prompt,
                                          const OutputDelta& delta) {
  if (params_.return_token_ids) choice.part.prompt_token_ids = prompt.ids;
  if (!params_.echo) return absl::OkStatus();
  choice.part.text = prompt.echo_text;
  if (!params_.logprobs) return absl::OkStatus();
  if (delta.prompt_logprobs.size() != prompt.ids.size()) {
    return absl::InternalError("the engine gave no log-probabilities of the prompt");
  }
  for (size_t i = 0; i < prompt.ids.size(); ++i) {
    const std::optional<TokenLogprob>& logprob = delta.prompt_logprobs[i];
    if (logprob) {
      MOESERVE_RETURN_IF_ERROR(choice.logprobs.Add(*logprob));
    } else {
      choice.logprobs.AddUnscored(prompt.ids[i]);
    }
  }
  return absl::OkStatus();
}

void CompletionSession::AppendChunk(int index, std::string& out) {
  Choice& choice = choices_[index];
  ChoicePart& part = choice.part;
  const bool has_logprobs = params_.logprobs && !choice.logprobs.empty();
  const bool has_ids = part.prompt_token_ids || (part.token_ids && !part.token_ids->empty());
  if (part.text.empty() && !has_logprobs && !has_ids && !part.finish_reason) return;
  if (has_logprobs) part.logprobs = choice.logprobs.Take();
  Json chunk = CompletionJson(identity_, Json::array({ChoiceJson(part)}));
  if (params_.include_usage) {
    chunk["usage"] = params_.continuous_usage
                         ? UsageJson(PromptTokens(), CompletionTokens(), CachedTokens())
                         : Json(nullptr);
  }
  out += SseEvent(chunk);
  part = ChoicePart();
  part.index = index;
}

http::Progress CompletionSession::Fail(const absl::Status& status) {
  generation_->Cancel();
  const HttpError error = ToHttpError(status);
  final_status_ = error.status;
  // Once the head is out a status can no longer be sent: an event says it, and no [DONE] follows.
  if (streaming_) return http::StreamPart{"data: " + ErrorJson(error) + "\n\n", true};
  return http::ErrorResponse(error);
}

http::Response CompletionSession::UnaryAnswer() {
  Json list = Json::array();
  for (Choice& choice : choices_) {
    if (params_.logprobs) choice.part.logprobs = choice.logprobs.Take();
    list.push_back(ChoiceJson(choice.part));
  }
  Json answer = CompletionJson(identity_, std::move(list));
  answer["usage"] = UsageJson(PromptTokens(), CompletionTokens(), CachedTokens());
  http::Response response;
  response.body = DumpJson(answer);
  return response;
}

int64_t CompletionSession::PromptTokens() const {
  int64_t sum = 0;
  for (const PreparedPrompt& prompt : prompts_) sum += static_cast<int64_t>(prompt.ids.size());
  return sum;
}

int64_t CompletionSession::CachedTokens() const {
  // Each prompt once, whatever the number of its samples.
  int64_t sum = 0;
  for (size_t i = 0; i < choices_.size(); i += static_cast<size_t>(params_.n)) {
    sum += choices_[i].cached_tokens;
  }
  return sum;
}

int64_t CompletionSession::CompletionTokens() const {
  int64_t sum = 0;
  for (const Choice& choice : choices_) sum += choice.completion_tokens;
  return sum;
}

}  // namespace moeserve::server
