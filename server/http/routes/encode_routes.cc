#include "server/http/routes/encode_routes.h"

#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/steady_clock.h"
#include "server/base/json_fields.h"
#include "server/base/version.h"
#include "server/encode/encode_answer.h"
#include "server/encode/encode_fields.h"
#include "server/encode/encode_run.h"
#include "server/encode/tei.h"
#include "server/http/error_response.h"
#include "server/http/offloaded_response.h"
#include "server/http/routes/expert_routes.h"
#include "server/http/routes/json_response.h"
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
  std::optional<TeiRoute> tei = std::nullopt;  // bodies have the form of TEI
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
    {"/embed", FieldRoute::kEmbeddings, "embd-", true, TeiRoute::kEmbed},
    {"/embed_all", FieldRoute::kPooling, "pool-", true, TeiRoute::kEmbedAll},
    {"/predict", FieldRoute::kClassify, "classify-", true, TeiRoute::kPredict},
    {"/similarity", FieldRoute::kScore, "score-", true, TeiRoute::kSimilarity},
};
// What /rerank is if the body has "texts" instead of "documents".
constexpr EncodeRoute kTeiRerank = {"/rerank", FieldRoute::kRerank, "rerank-", true,
                                    TeiRoute::kRerank};

// One running request, from its submission to the answer.
class EncodeSession final : public PendingResponse {
 public:
  // `batch`: TeiRequest::batch.
  EncodeSession(std::unique_ptr<EncodeRun> run, const EncodeRoute& route, bool batch,
                std::function<void()> wake)
      : run_(std::move(run)), route_(route), batch_(batch), wake_(std::move(wake)) {}

  Progress Next() override {
    const Result<bool> done = run_->Advance();
    if (!done.ok()) return Fail(done.status());
    if (!*done) return Wait{};
    if (run_->answer_is_large() && !std::exchange(writes_, true)) {
      // The next call, which NextIsSlow() announces, writes the answer.
      wake_();
      return Wait{};
    }
    Result<std::string> body =
        route_.tei ? Result<std::string>(TeiAnswer(*run_, *route_.tei, batch_))
                   : EncodeAnswer(*run_, route_.fields, run_->IdWith(route_.id_prefix));
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
  const bool batch_;
  const std::function<void()> wake_;
  bool writes_ = false;
  int final_status_ = 200;
};

// Parses a body in the form of TEI. Sets `batch`.
Result<EncodeJob> ParseTei(const Body& body, const EncodeRoute& route, const RequestRules& rules,
                           const EncodeModel& model, ServerContext& context, bool& batch) {
  MemoryCharge charge(context.memory());  // of the translated body
  MOESERVE_RETURN_IF_ERROR(charge.Add(body.charged_bytes()));
  if (*route.tei == TeiRoute::kPredict) {
    // Labels of tokens have no place in the answer.
    MOESERVE_RETURN_IF_ERROR(CheckTask(*model.spec, EncodeTask::kClassify));
  }
  MOESERVE_ASSIGN_OR_RETURN(const TeiRequest translated, FromTei(*route.tei, *body));
  batch = translated.batch;
  Result<EncodeJob> job = ParseEncode(translated.body, translated.fields, rules, model, true);
  if (!job.ok()) return TeiError(*route.tei, job.status());
  return job;
}

Result<Handled> Start(ServerContext& context, const EncodeRoute& by_path, const Request& request) {
  MOESERVE_RETURN_IF_ERROR(context.CheckServing());
  std::shared_ptr<ServedModel> model;
  EncodeJob job;
  const EncodeRoute* route = &by_path;
  bool batch = true;
  {
    MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context));
    MOESERVE_ASSIGN_OR_RETURN(const auto name, StringField(*body, "model"));
    MOESERVE_ASSIGN_OR_RETURN(model, context.ModelFor(name.value_or(""), request.key.get()));
    const RequestRules rules = context.Rules(*model, request.key.get());
    if (by_path.path == kTeiRerank.path && FindField(*body, "texts") != nullptr &&
        FindField(*body, "documents") == nullptr) {
      route = &kTeiRerank;
    }
    if (route->tei) {
      MOESERVE_ASSIGN_OR_RETURN(
          job, ParseTei(body, *route, rules, model->encode_model(), context, batch));
    } else {
      MOESERVE_ASSIGN_OR_RETURN(job, ParseEncode(*body, route->fields, rules, model->encode_model(),
                                                 route->returns_documents));
    }
  }
  context.metrics().ignored_fields += static_cast<uint64_t>(job.ignored_fields);
  const RequestLimits& limits = context.settings().limits;
  MOESERVE_ASSIGN_OR_RETURN(auto texts,
                            PrepareTexts(job, model->encode_model(), limits.max_prompt_bytes));
  MOESERVE_ASSIGN_OR_RETURN(
      auto run, EncodeRun::Prepare(context.Submissions(model, request.key, request.record),
                                   model->encode_model(), std::move(job), std::move(texts)));
  MOESERVE_RETURN_IF_ERROR(run->Start(SteadyNow() + limits.max_request_time, request.wake));
  auto session = std::make_shared<EncodeSession>(std::move(run), *route, batch, request.wake);
  return Handled(
      std::make_unique<OffloadedResponse>(std::move(session), context.answer_pool(), request.wake));
}

// Describes a model in the form of TEI.
OrderedJson TeiInfo(const ServedModel& model) {
  const EncodeModel& encode = model.encode_model();
  const ModelSpec& spec = *encode.spec;
  OrderedJson out = {{"model_id", model.name()}, {"model_sha", nullptr}};
  if (spec.head.kind == HeadKind::kSequenceClassification) {
    OrderedJson names = OrderedJson::object(), ids = OrderedJson::object();
    for (size_t i = 0; i < spec.head.labels.size(); ++i) {
      names[std::to_string(i)] = spec.head.labels[i];
      ids[spec.head.labels[i]] = i;
    }
    const char* const kind = spec.head.labels.size() == 1 ? "reranker" : "classifier";
    out["model_type"][kind] = {{"id2label", std::move(names)}, {"label2id", std::move(ids)}};
  } else if (spec.pooling) {
    out["model_type"]["embedding"]["pooling"] = KindName(spec.pooling->kind);
  }
  out["max_input_length"] = encode.max_tokens;
  out["max_client_batch_size"] = kMaxEncodeInputs;
  out["version"] = kVersion;
  return out;
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
  router.Add(
      "GET", "/info", Access::Key(Scope::kGenerate), Work::kQuick,
      [&context](const Request& request) -> Handled {
        const auto model = QueriedModel(request, context);
        return JsonOrError(model.ok() ? TeiInfo(**model) : Result<OrderedJson>(model.status()));
      });
}

}  // namespace moeserve::server::http
