#include "server/http/generation_session.h"

#include <utility>

#include "server/base/status_conversion.h"
#include "server/http/error_response.h"

namespace moeserve::server {

using Json = nlohmann::ordered_json;

GenerationSession::GenerationSession(std::shared_ptr<EngineApi> engine,
                                     const GenerationParams& params,
                                     std::vector<PreparedPrompt> prompts,
                                     std::unique_ptr<AnswerWriter> writer)
    : engine_(std::move(engine)),
      samples_(params.n),
      stream_(params.stream),
      include_usage_(params.include_usage),
      continuous_usage_(params.continuous_usage),
      control_(params.routing.control),
      prompts_(std::move(prompts)),
      writer_(std::move(writer)),
      counts_(prompts_.size() * static_cast<size_t>(params.n)) {}

Result<std::unique_ptr<http::PendingResponse>> GenerationSession::Start(
    std::shared_ptr<EngineApi> engine, const GenerationParams& params,
    std::vector<PreparedPrompt> prompts, std::unique_ptr<AnswerWriter> writer,
    const std::string& id, absl::Time deadline, GenerationOptions options) {
  std::vector<Request> requests = MakeEngineRequests(params, prompts, id, deadline);
  options.samples = params.n;
  std::unique_ptr<GenerationSession> session(
      new GenerationSession(engine, params, std::move(prompts), std::move(writer)));
  MOESERVE_ASSIGN_OR_RETURN(
      session->generation_,
      Generation::Start(std::move(engine), std::move(requests), std::move(options)));
  return std::unique_ptr<http::PendingResponse>(std::move(session));
}

http::Progress GenerationSession::Next() {
  std::string data;
  for (ChoiceEvent& event : generation_->Take()) {
    if (!event.error.ok()) return Fail(event.error);
    if (absl::Status status = Apply(event.choice, std::move(event.delta)); !status.ok()) {
      return Fail(status);
    }
    if (stream_) AppendChunks(event.choice, data);
  }
  const bool finished = generation_->finished();
  if (!stream_) {
    if (!finished) return http::Wait{};
    return UnaryAnswer();
  }
  if (finished) {
    if (include_usage_) {
      Json chunk = writer_->EmptyChunk();
      chunk["usage"] = SumUsage();
      data += SseEvent(chunk);
    }
    data += kSseDone;
  }
  if (data.empty()) return http::Wait{};
  streaming_ = true;
  return http::StreamPart{std::move(data), finished};
}

absl::Status GenerationSession::Apply(int index, OutputDelta delta) {
  counts_[index] = delta.usage;
  return writer_->Add(index, prompts_[index / samples_], std::move(delta));
}

void GenerationSession::AppendChunks(int index, std::string& out) {
  for (Json& chunk : writer_->TakeChunks(index)) {
    if (control_ != nullptr && !std::exchange(echoed_, true)) {
      chunk["routing_control"] = RoutingControlJson(control_->change());
    }
    if (include_usage_) chunk["usage"] = continuous_usage_ ? SumUsage() : Json(nullptr);
    out += SseEvent(chunk);
  }
}

http::Progress GenerationSession::Fail(const absl::Status& status) {
  generation_->Cancel();
  const HttpError error = ToHttpError(status);
  final_status_ = error.status;
  // Once the head is out a status can no longer be sent: an event says it, and no [DONE] follows.
  if (streaming_) return http::StreamPart{"data: " + ErrorJson(error) + "\n\n", true};
  return http::ErrorResponse(error);
}

http::Response GenerationSession::UnaryAnswer() {
  Json answer = writer_->TakeAnswer();
  if (control_ != nullptr) answer["routing_control"] = RoutingControlJson(control_->change());
  answer["usage"] = SumUsage();
  http::Response response;
  response.body = DumpJson(answer);
  return response;
}

Json GenerationSession::SumUsage() const {
  moeserve::Usage sums;
  for (const PreparedPrompt& p : prompts_) sums.prompt_tokens += static_cast<int>(p.ids.size());
  for (size_t i = 0; i < counts_.size(); ++i) {
    sums.completion_tokens += counts_[i].completion_tokens;
    sums.routed_tokens += counts_[i].routed_tokens;
    sums.expert_routes += counts_[i].expert_routes;
    sums.activated_parameters += counts_[i].activated_parameters;
    // Each prompt once, whatever the number of its samples.
    if (i % static_cast<size_t>(samples_) == 0) sums.cached_tokens += counts_[i].cached_tokens;
  }
  return UsageJson(sums);
}

}  // namespace moeserve::server
