#include "server/http/routes/generation_session.h"

#include <utility>

#include "server/base/status_conversion.h"
#include "server/http/error_response.h"
#include "server/http/offloaded_response.h"

namespace moeserve::server {

namespace {

// Writing so many values takes some tens of milliseconds.
constexpr size_t kManyValues = 16 << 10;

// Returns an estimate of the memory that a piece of output takes in a unary answer: as JSON values
// and as text. What the piece says about the prompt is charged when the request is admitted.
size_t AnswerBytes(const OutputDelta& delta) {
  constexpr size_t kToken = 64;
  constexpr size_t kAlternative = 512;
  constexpr size_t kRoute = 60;
  size_t bytes = 4 * delta.text.size() + kToken * delta.tokens.size();
  for (const TokenLogprob& logprob : delta.logprobs) {
    bytes += kAlternative * (1 + logprob.top.size());
  }
  if (delta.routing && delta.routing->first_position > 0) {
    bytes += kRoute * delta.routing->experts.size();
  }
  return bytes;
}

}  // namespace

GenerationSession::GenerationSession(std::shared_ptr<const Submission> submission,
                                     std::unique_ptr<AnswerWriter> writer,
                                     std::function<void()> wake)
    : submission_(std::move(submission)),
      writer_(std::move(writer)),
      wake_(std::move(wake)),
      counts_(submission_->num_choices()),
      answer_(submission_->memory()) {}

Result<std::unique_ptr<http::PendingResponse>> GenerationSession::Start(
    std::shared_ptr<const Submission> submission, std::unique_ptr<AnswerWriter> writer,
    absl::Time deadline, WorkPool& pool, std::function<void()> wake) {
  std::shared_ptr<GenerationSession> session(
      new GenerationSession(std::move(submission), std::move(writer), wake));
  MOESERVE_ASSIGN_OR_RETURN(session->generation_, session->submission_->Start(deadline, wake));
  return std::make_unique<http::OffloadedResponse>(std::move(session), pool, std::move(wake));
}

bool GenerationSession::NextIsSlow() const {
  return writes_end_ || generation_->waiting_values() > kManyValues;
}

bool GenerationSession::EndIsLarge() const {
  return values_ > kManyValues &&
         (!submission_->params().stream || writer_->keeps_streamed_output());
}

http::Progress GenerationSession::Next() {
  const GenerationParams& params = submission_->params();
  std::string data;
  for (ChoiceEvent& event : generation_->Take()) {
    if (!event.error.ok()) return Fail(event.error, std::move(data));
    values_ += CountValues(event);
    if (absl::Status status = Apply(event.choice, std::move(event.delta)); !status.ok()) {
      return Fail(status, std::move(data));
    }
    if (params.stream) writer_->AppendEvents(event.choice, SumUsage(), data);
  }
  const bool finished = generation_->finished();
  if (finished && EndIsLarge() && !std::exchange(writes_end_, true)) {
    // The end is written by the next call, which NextIsSlow() announces.
    if (!data.empty()) {
      streaming_ = true;
      return http::StreamPart{std::move(data), false};
    }
    wake_();
    return http::Wait{};
  }
  if (!params.stream) {
    if (!finished) return http::Wait{};
    http::Response response;
    response.body = DumpJson(writer_->TakeAnswer(SumUsage()));
    return response;
  }
  if (finished) writer_->AppendEnd(SumUsage(), data);
  if (data.empty()) return http::Wait{};
  streaming_ = true;
  return http::StreamPart{std::move(data), finished};
}

absl::Status GenerationSession::Apply(int index, OutputDelta delta) {
  counts_[index] = delta.usage;
  if (delta.timed_out) writer_->SetTimedOut();
  if (!submission_->params().stream || writer_->keeps_streamed_output()) {
    MOESERVE_RETURN_IF_ERROR(answer_.Add(AnswerBytes(delta), ChargeFor::kRunningRequest));
  }
  return writer_->Add(index, submission_->PromptOf(index), std::move(delta));
}

http::Progress GenerationSession::Fail(const absl::Status& status, std::string data) {
  generation_->Cancel();
  const HttpError error = http::ReportedError(status);
  final_status_ = error.status;
  // After the head of a stream is sent, the status cannot change.
  if (streaming_) {
    writer_->AppendError(error, data);
    return http::StreamPart{std::move(data), true};
  }
  http::Response response = http::ErrorResponse(error);
  response.body = writer_->ErrorBody(error);
  return response;
}

Usage GenerationSession::SumUsage() const {
  moeserve::Usage sums;
  bool known = true;
  double macs = 0.0;
  for (const PreparedPrompt& prompt : submission_->prompts()) {
    sums.prompt_tokens += static_cast<int>(prompt.tokens());
  }
  const auto samples = static_cast<size_t>(submission_->params().n);
  for (size_t i = 0; i < counts_.size(); ++i) {
    sums.completion_tokens += counts_[i].completion_tokens;
    sums.routed_tokens += counts_[i].routed_tokens;
    sums.expert_routes += counts_[i].expert_routes;
    sums.activated_parameters += counts_[i].activated_parameters;
    known = known && (counts_[i].macs || counts_[i].routed_tokens == 0);
    macs += counts_[i].macs.value_or(0.0);
    // All samples of a prompt share the prompt's cached tokens: count them for the first sample
    // only.
    if (i % samples == 0) sums.cached_tokens += counts_[i].cached_tokens;
  }
  if (known) sums.macs = macs;
  return sums;
}

}  // namespace moeserve::server
