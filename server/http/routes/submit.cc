#include "server/http/routes/submit.h"

#include <utility>

#include "absl/time/clock.h"
#include "base/steady_clock.h"
#include "server/base/request_id.h"
#include "server/generation/submission.h"
#include "server/http/deferred_response.h"
#include "server/http/routes/generation_session.h"
#include "server/http/routes/request_body.h"

namespace moeserve::server::http {
namespace {

Result<Handled> Start(std::shared_ptr<const Submission> submission,
                      std::unique_ptr<AnswerWriter> writer, absl::Time deadline, WorkPool& pool,
                      std::function<void()> wake) {
  MOESERVE_ASSIGN_OR_RETURN(
      auto pending, GenerationSession::Start(std::move(submission), std::move(writer), deadline,
                                             pool, std::move(wake)));
  return Handled(std::move(pending));
}

}  // namespace

Result<Handled> Submit(ServerContext& context, const Request& request,
                       const std::shared_ptr<ServedModel>& model, const GenerationParams& params,
                       std::vector<PreparedPrompt> prompts, const AnswerFormat& format) {
  auto submission = std::make_shared<Submission>(
      context.Submissions(model, request.key, request.record), params, format.id_prefix);
  MOESERVE_RETURN_IF_ERROR(submission->SetPrompts(std::move(prompts)));
  std::unique_ptr<AnswerWriter> writer = format.make_writer(
      {.id = submission->id(),
       .unique_id = NewRequestId(),
       .created = absl::ToUnixSeconds(absl::Now()),
       .model = params.model},
      submission->engine()->tokenizer(), static_cast<int>(submission->num_choices()));
  const absl::Time deadline = SteadyNow() + context.settings().limits.max_request_time;
  if (!submission->NeedsCompiling()) {
    return Start(std::move(submission), std::move(writer), deadline, context.answer_pool(),
                 request.wake);
  }
  auto shared_writer = std::make_shared<std::unique_ptr<AnswerWriter>>(std::move(writer));
  return PrepareLater(context, request,
                      [&context, format, submission, shared_writer, deadline, wake = request.wake,
                       key = request.key] {
                        const absl::Status status = submission->CompileConstraint();
                        return StartedOrRefused(status.ok()
                                                    ? Start(submission, std::move(*shared_writer),
                                                            deadline, context.answer_pool(), wake)
                                                    : status,
                                                format, key.get(), context);
                      });
}

Handled PrepareLater(ServerContext& context, const Request& request, std::function<Handled()> job) {
  Handled deferred =
      DeferredResponse::Start(context.work_pool(), std::move(job), request.wake, request.client);
  if (std::holds_alternative<Response>(deferred)) {
    context.metrics().CountRejected(Rejection::kQueueFull);
  }
  return deferred;
}

Handled StartedOrRefused(Result<Handled> started, const AnswerFormat& format, const ApiKey* key,
                         ServerContext& context) {
  if (started.ok()) return *std::move(started);
  Response response = ErrorResponse(started.status(), format.error_body);
  CountRefusal(started.status(), response, key, context);
  return response;
}

}  // namespace moeserve::server::http
