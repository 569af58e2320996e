#include "server/http/routes/encode_routes.h"

#include <memory>
#include <string_view>
#include <utility>

#include "base/steady_clock.h"
#include "server/base/json_fields.h"
#include "server/encode/encode_answer.h"
#include "server/encode/encode_fields.h"
#include "server/encode/encode_run.h"
#include "server/http/error_response.h"
#include "server/http/offloaded_response.h"
#include "server/http/routes/request_body.h"
#include "server/http/routes/submit.h"

namespace moeserve::server::http {
namespace {

// What distinguishes the routes.
struct EncodeRoute {
  std::string_view path;
  FieldRoute fields;
  std::string_view id_prefix;
  bool returns_documents = true;
};

constexpr EncodeRoute kRoutes[] = {
    {"/v1/embeddings", FieldRoute::kEmbeddings, "embd-"},
    {"/pooling", FieldRoute::kPooling, "pool-"},
    {"/classify", FieldRoute::kClassify, "classify-"},
    {"/v1/classify", FieldRoute::kClassify, "classify-"},
    {"/score", FieldRoute::kScore, "score-"},
    {"/v1/score", FieldRoute::kScore, "score-"},
    {"/rerank", FieldRoute::kRerank, "rerank-"},
    {"/v1/rerank", FieldRoute::kRerank, "rerank-"},
    {"/v2/rerank", FieldRoute::kRerank, "rerank-", false},
    {"/v1/fill-mask", FieldRoute::kFillMask, "fill-"},
};

// One running request, from its submission to the answer.
class EncodeSession final : public PendingResponse {
 public:
  EncodeSession(std::unique_ptr<EncodeRun> run, const EncodeRoute& route,
                std::function<void()> wake)
      : run_(std::move(run)), route_(route), wake_(std::move(wake)) {}

  Progress Next() override {
    const Result<bool> done = run_->Advance();
    if (!done.ok()) return Fail(done.status());
    if (!*done) return Wait{};
    if (run_->answer_is_large() && !std::exchange(writes_, true)) {
      // The next call, which NextIsSlow() announces, writes the answer.
      wake_();
      return Wait{};
    }
    Result<std::string> body = EncodeAnswer(*run_, route_.fields, run_->IdWith(route_.id_prefix));
    if (!body.ok()) return Fail(body.status());
    Response response;
    response.body = *std::move(body);
    return response;
  }

  bool NextIsSlow() const override { return writes_; }
  int FinalStatus() const override { return final_status_; }

 private:
  Progress Fail(const absl::Status& status) {
    run_->Cancel();
    final_status_ = ToHttpError(status).status;
    return ErrorResponse(status);
  }

  const std::unique_ptr<EncodeRun> run_;
  const EncodeRoute& route_;
  const std::function<void()> wake_;
  bool writes_ = false;
  int final_status_ = 200;
};

Result<Handled> Start(ServerContext& context, const EncodeRoute& route, const Request& request) {
  MOESERVE_RETURN_IF_ERROR(context.CheckServing());
  std::shared_ptr<ServedModel> model;
  EncodeJob job;
  {
    MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context));
    MOESERVE_ASSIGN_OR_RETURN(const auto name, StringField(*body, "model"));
    MOESERVE_ASSIGN_OR_RETURN(model, context.ModelFor(name.value_or(""), request.key.get()));
    const RequestRules rules = context.Rules(*model, request.key.get());
    MOESERVE_ASSIGN_OR_RETURN(job, ParseEncode(*body, route.fields, rules, model->encode_model(),
                                               route.returns_documents));
  }
  context.metrics().ignored_fields += static_cast<uint64_t>(job.ignored_fields);
  const RequestLimits& limits = context.settings().limits;
  MOESERVE_ASSIGN_OR_RETURN(auto texts,
                            PrepareTexts(job, model->encode_model(), limits.max_prompt_bytes));
  MOESERVE_ASSIGN_OR_RETURN(
      auto run, EncodeRun::Prepare(context.Submissions(model, request.key, request.record),
                                   model->encode_model(), std::move(job), std::move(texts)));
  MOESERVE_RETURN_IF_ERROR(run->Start(SteadyNow() + limits.max_request_time, request.wake));
  auto session = std::make_shared<EncodeSession>(std::move(run), route, request.wake);
  return Handled(
      std::make_unique<OffloadedResponse>(std::move(session), context.answer_pool(), request.wake));
}

}  // namespace

void AddEncodeRoutes(Router& router, ServerContext& context) {
  for (const EncodeRoute& route : kRoutes) {
    router.Add("POST", route.path, Access::Key(Scope::kGenerate), Work::kQuick,
               [&context, &route](const Request& request) -> Handled {
                 return StartedOrRefused(Start(context, route, request), {}, request.key.get(),
                                         context);
               });
  }
}

}  // namespace moeserve::server::http
