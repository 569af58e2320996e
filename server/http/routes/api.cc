#include "server/http/routes/api.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "engine/validate_request.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/version.h"
#include "server/chat/chat_request.h"
#include "server/completions/completion_request.h"
#include "server/completions/completion_response.h"
#include "server/fields/request_fields.h"
#include "server/fields/routing_fields.h"
#include "server/generation/task_check.h"
#include "server/generation/token_memory.h"
#include "server/http/error_response.h"
#include "server/http/openapi/document.h"
#include "server/http/routes/chat_routes.h"
#include "server/http/routes/encode_routes.h"
#include "server/http/routes/expert_routes.h"
#include "server/http/routes/inference_routes.h"
#include "server/http/routes/json_response.h"
#include "server/http/routes/model_routes.h"
#include "server/http/routes/ollama_routes.h"
#include "server/http/routes/request_body.h"
#include "server/http/routes/server_routes.h"
#include "server/http/routes/submit.h"
#include "server/http/routes/web_assets.h"
#include "server/http/url.h"
#include "server/reports/expert_report.h"

namespace moeserve::server::http {
namespace {

Result<const Tokenizer*> RequireTokenizer(const Engine& engine) {
  if (engine.tokenizer() != nullptr) return engine.tokenizer();
  return InvalidValue("model", "this model has no tokenizer");
}

class Api {
 public:
  explicit Api(ServerContext& context) : context_(context) {}

  Handled Completions(const Request& request) {
    AnswerFormat format = {.id_prefix = "cmpl-", .make_writer = nullptr};
    return StartedOrRefused(StartCompletion(request, format), format, request.key.get(), context_);
  }

  Handled Models(const Request& request) {
    OrderedJson data = OrderedJson::array();
    for (const std::string& name : context_.ModelsOf(request.key.get())) data.push_back(Card(name));
    // All models are on one page.
    const auto id = [](const OrderedJson& list, size_t i) {
      return list.empty() ? OrderedJson(nullptr) : list[i]["id"];
    };
    OrderedJson list = {{"object", "list"},
                        {"first_id", id(data, 0)},
                        {"last_id", id(data, data.size() - 1)},
                        {"has_more", false}};
    list["data"] = std::move(data);
    return JsonResponse(list);
  }

  Handled Model(const Request& request) {
    const std::optional<std::string> id = PercentDecode(
        std::string_view(request.path).substr(std::string_view("/v1/models/").size()));
    const auto name =
        id ? ResolveModel(*id, context_.ModelsOf(request.key.get()))
           : Result<std::string>(InvalidValue("model", "the address is not well-formed"));
    if (!name.ok()) return ErrorResponse(name.status());
    return JsonResponse(Card(*name));
  }

  Handled Tokenize(const Request& request) {
    const auto run = [&]() -> Result<OrderedJson> {
      MOESERVE_RETURN_IF_ERROR(context_.CheckServing());
      MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context_));
      MOESERVE_ASSIGN_OR_RETURN(const auto model, NamedModel(request, *body));
      const Engine& engine = model->engine();
      MOESERVE_RETURN_IF_ERROR(CheckFields(*body, FieldRoute::kTokenize));
      MOESERVE_ASSIGN_OR_RETURN(const auto strings, BoolField(*body, "return_token_strs"));
      MOESERVE_ASSIGN_OR_RETURN(const Tokenizer* tokenizer, RequireTokenizer(engine));
      MOESERVE_ASSIGN_OR_RETURN(const auto ids,
                                FindField(*body, "messages") != nullptr
                                    ? EncodeMessages(*body, request.body, *model, *tokenizer)
                                    : EncodePrompt(*body, *tokenizer));
      MemoryCharge charge(context_.memory());
      MOESERVE_RETURN_IF_ERROR(
          charge.Add(TokenListBytes(*tokenizer, ids, strings.value_or(false))));
      OrderedJson out = {{"count", ids.size()}, {"max_model_len", engine.max_model_len()}};
      out["tokens"] = ids;
      out["token_strs"] = nullptr;
      if (strings.value_or(false)) {
        OrderedJson list = OrderedJson::array();
        for (const TokenId id : ids) list.push_back(std::string(tokenizer->TokenString(id)));
        out["token_strs"] = std::move(list);
      }
      return out;
    };
    return JsonOrError(run());
  }

  Handled Detokenize(const Request& request) {
    const auto run = [&]() -> Result<OrderedJson> {
      MOESERVE_RETURN_IF_ERROR(context_.CheckServing());
      MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context_));
      MOESERVE_ASSIGN_OR_RETURN(const auto model, NamedModel(request, *body));
      MOESERVE_RETURN_IF_ERROR(CheckFields(*body, FieldRoute::kDetokenize));
      MOESERVE_ASSIGN_OR_RETURN(const auto skip, BoolField(*body, "skip_special_tokens"));
      const Engine& engine = model->engine();
      const Json* tokens = FindField(*body, "tokens");
      if (tokens == nullptr) return MissingField("tokens");
      MOESERVE_ASSIGN_OR_RETURN(const auto ids,
                                TokenIdList(*tokens, "tokens", engine.spec().vocab_size));
      MOESERVE_ASSIGN_OR_RETURN(const Tokenizer* tokenizer, RequireTokenizer(engine));
      MemoryCharge charge(context_.memory());
      MOESERVE_RETURN_IF_ERROR(charge.Add(DecodedBytes(*tokenizer, ids)));
      MOESERVE_ASSIGN_OR_RETURN(std::string text, tokenizer->Decode(ids, skip.value_or(false)));
      return OrderedJson{{"prompt", std::move(text)}};
    };
    return JsonOrError(run());
  }

  Handled Ready(const Request&) {
    absl::Status status = context_.CheckServing();
    status.Update(context_.EngineStatus());
    if (!status.ok()) return ErrorResponse(status);
    return JsonResponse({{"status", "ok"}, {"ready", true}});
  }

  Handled Live(const Request&) {
    if (const absl::Status status = context_.EngineStatus(); !status.ok()) {
      return ErrorResponse(status);
    }
    return JsonResponse({{"status", "ok"}, {"live", true}});
  }

  Handled Version(const Request&) {
    const std::string& commit = context_.settings().commit;
    return JsonResponse({{"version", std::string(kVersion)},
                         {"commit", commit.empty() ? OrderedJson(nullptr) : OrderedJson(commit)},
                         {"backend", context_.settings().device}});
  }

  Handled Metrics(const Request& request) {
    const ExpositionFormat format = ChooseExposition(request.accept);
    Response response;
    response.content_type = ContentType(format);
    response.body = context_.MetricsText(format);
    return response;
  }

  Handled ExpertLayout(const Request& request) {
    const auto run = [&]() -> Result<OrderedJson> {
      MOESERVE_ASSIGN_OR_RETURN(const auto model, QueriedModel(request, context_));
      MOESERVE_ASSIGN_OR_RETURN(const auto experts, QueriedStack(request, model->engine()));
      OrderedJson out = {{"model", model->name()}};
      if (experts.stack() != Stack::kOnly) out["stack"] = KindName(experts.stack());
      out.update(RouteLayoutJson(experts.layout()));
      return out;
    };
    return JsonOrError(run());
  }

  Handled ExpertStatistics(const Request& request) {
    if (context_.settings().moe_metrics.mode == MoeMetricsMode::kOff) {
      return ProtocolError(404, "", "expert statistics are switched off (--moe-metrics=off)");
    }
    const auto run = [&]() -> Result<OrderedJson> {
      MOESERVE_ASSIGN_OR_RETURN(const auto window, QueryNumber(request.query, "window", 1,
                                                               ExpertHistory::kMaxWindowSeconds));
      MOESERVE_ASSIGN_OR_RETURN(const auto threshold,
                                QueryNumber(request.query, "threshold", 0, 1e6));
      MOESERVE_ASSIGN_OR_RETURN(const auto model, QueriedModel(request, context_));
      MOESERVE_ASSIGN_OR_RETURN(const auto asked, QueriedStack(request, model->engine()));
      const absl::Time now = SteadyNow();
      std::optional<double> covered;
      if (window) covered = 0.0;
      ExpertStats stats;
      std::vector<ExpertStats> stacks;
      for (const StackExperts& experts : StackExperts::All(model->engine())) {
        ExpertStats& of_stack = stacks.emplace_back(experts.Snapshot());
        const ExpertHistory* const history = model->expert_history(experts.stack());
        if (window && history != nullptr) {
          if (const auto base = history->Before(now, absl::Seconds(*window))) {
            of_stack = Difference(of_stack, *base->stats);
            covered = absl::ToDoubleSeconds(now - base->time);
          }
        }
        if (experts.stack() == asked.stack()) stats = of_stack;
      }
      OrderedJson out = ExpertStatsJson(stats, model->name(), covered, threshold.value_or(0.0));
      if (stacks.size() > 1) out["stacks"] = StacksJson(stacks);
      return out;
    };
    return JsonOrError(run());
  }

 private:
  Result<Handled> StartCompletion(const Request& request, AnswerFormat& format) {
    MOESERVE_RETURN_IF_ERROR(context_.CheckServing());
    std::shared_ptr<ServedModel> model;
    CompletionParams params;
    {
      MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context_));
      MOESERVE_ASSIGN_OR_RETURN(model, NamedModel(request, *body));
      MOESERVE_RETURN_IF_ERROR(CheckGenerates(model->engine().spec()));
      const RequestRules rules = context_.Rules(*model, request.key.get());
      MOESERVE_ASSIGN_OR_RETURN(params, ParseCompletion(*body, rules, request.body));
    }
    context_.metrics().ignored_fields += params.ignored_fields;
    const Engine& engine = model->engine();
    MOESERVE_ASSIGN_OR_RETURN(auto prompts, PreparePrompts(params, PromptRulesOf(engine)));
    format.make_writer = [&](AnswerIdentity identity, const Tokenizer* tokenizer, int choices) {
      return std::make_unique<CompletionWriter>(std::move(identity), MakeAnswerOptions(params),
                                                tokenizer, choices);
    };
    return Submit(context_, request, model, params, std::move(prompts), format);
  }

  absl::Status CheckFields(const Json& body, FieldRoute route) {
    FieldFindings findings;
    MOESERVE_RETURN_IF_ERROR(
        CheckRequestFields(body, route, context_.settings().strict_fields, findings));
    context_.metrics().ignored_fields += findings.ignored;
    return absl::OkStatus();
  }

  Result<std::vector<TokenId>> EncodePrompt(const Json& body, const Tokenizer& tokenizer) const {
    for (const std::string_view name : ConversationFields()) {
      if (name != "add_special_tokens" && FindField(body, std::string(name).c_str()) != nullptr) {
        return InvalidValue(name, Concat("'", name, "' needs 'messages' instead of 'prompt'"));
      }
    }
    MOESERVE_ASSIGN_OR_RETURN(const auto prompt, StringField(body, "prompt"));
    if (!prompt) return MissingField("prompt");
    if (prompt->size() > context_.settings().limits.max_prompt_bytes) {
      return InvalidValue("prompt", "'prompt' is too long");
    }
    MOESERVE_ASSIGN_OR_RETURN(const auto special, BoolField(body, "add_special_tokens"));
    return tokenizer.source().Encode(*prompt, special.value_or(true));
  }

  Result<std::vector<TokenId>> EncodeMessages(const Json& body, std::string_view text,
                                              const ServedModel& model,
                                              const Tokenizer& tokenizer) const {
    if (FindField(body, "prompt") != nullptr) {
      return InvalidValue("messages", "either 'prompt' or 'messages' can be given, not both");
    }
    const ServerSettings& settings = context_.settings();
    const ConversationRules rules = {.limits = settings.limits,
                                     .allow_template = settings.allow_request_chat_template,
                                     .strict_fields = settings.strict_fields};
    MOESERVE_ASSIGN_OR_RETURN(const Conversation conversation,
                              ParseConversation(body, text, rules));
    MOESERVE_ASSIGN_OR_RETURN(ChatPrompt prompt,
                              model.chat_format().Encode(conversation, tokenizer, settings.limits,
                                                         absl::ToTimeT(absl::Now())));
    return std::move(prompt.ids);
  }

  // Returns the model that a request's body names. Errors: those of ServerContext::ModelFor().
  Result<std::shared_ptr<ServedModel>> NamedModel(const Request& request, const Json& body) const {
    MOESERVE_ASSIGN_OR_RETURN(const auto name, StringField(body, "model"));
    return context_.ModelFor(name.value_or(""), request.key.get());
  }

  // Describes a model with the members that OpenAI's API has, and with those of Anthropic's.
  OrderedJson Card(const std::string& name) const {
    OrderedJson card;
    card["id"] = name;
    card["object"] = "model";
    card["type"] = "model";
    card["display_name"] = name;
    const auto model = context_.models().Find(name);
    const int64_t created = model.ok() ? (*model)->created() : created_;
    card["created"] = created;
    card["created_at"] =
        absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromUnixSeconds(created), absl::UTCTimeZone());
    card["lifecycle"] = "active";
    card["owned_by"] = "moeserve";
    card["root"] = model.ok() ? (*model)->name() : name;
    card["parent"] = nullptr;
    card["max_model_len"] =
        model.ok() ? OrderedJson((*model)->engine().max_model_len()) : OrderedJson(nullptr);
    card["max_input_tokens"] = card["max_model_len"];
    card["max_tokens"] = card["max_model_len"];
    if (model.ok()) {
      card["tasks"] = TaskNames((*model)->engine().spec());
      const std::vector<StackExperts> stacks = StackExperts::All((*model)->engine());
      for (const StackExperts& one : stacks) {
        if (stacks.size() > 1) card["stacks"].push_back(KindName(one.stack()));
      }
    }
    card["version"] = model.ok() ? OrderedJson((*model)->version()) : OrderedJson(nullptr);
    return card;
  }

  const int64_t created_ = absl::ToUnixSeconds(absl::Now());
  ServerContext& context_;
};

}  // namespace

std::unique_ptr<Router> MakeRouter(ServerContext& context) {
  auto api = std::make_shared<Api>(context);
  auto router = std::make_unique<Router>(context.keys());
  const auto add = [&](std::string_view method, std::string_view pattern, Access access,
                       Handled (Api::*handler)(const Request&), Work work = Work::kQuick) {
    router->Add(method, pattern, access, work, HandlerOf(api, handler));
  };
  // Many clients list the models before they generate.
  constexpr Access kModels = Access::AnyOf(Scope::kStatistics, Scope::kGenerate);
  add("POST", "/v1/completions", Access::Key(Scope::kGenerate), &Api::Completions);
  AddChatRoutes(*router, context);
  AddEncodeRoutes(*router, context);
  add("GET", "/v1/models", kModels, &Api::Models);
  AddModelRoutes(*router, context);  // before the pattern that matches its paths, too
  add("GET", "/v1/models/*", kModels, &Api::Model);
  add("POST", "/tokenize", Access::Key(Scope::kGenerate), &Api::Tokenize, Work::kSlow);
  add("POST", "/detokenize", Access::Key(Scope::kGenerate), &Api::Detokenize);
  add("GET", "/v1/experts/stats", Access::Key(Scope::kStatistics), &Api::ExpertStatistics);
  add("GET", "/v1/experts/layout", Access::Key(Scope::kStatistics), &Api::ExpertLayout);
  AddExpertRoutes(*router, context);
  AddInferenceRoutes(*router, context);
  AddOllamaRoutes(*router, context);
  AddServerRoutes(*router, context);
  add("GET", "/health", Access::Operator(), &Api::Ready);
  add("GET", "/health/ready", Access::Operator(), &Api::Ready);
  add("GET", "/health/live", Access::Operator(), &Api::Live);
  add("GET", "/v2/health/ready", Access::Operator(), &Api::Ready);
  add("GET", "/v2/health/live", Access::Operator(), &Api::Live);
  add("GET", "/version", Access::Open(), &Api::Version);
  add("GET", "/metrics", Access::Operator(), &Api::Metrics);
  if (context.settings().dashboard) AddWebAssets(*router);
  AddOpenApi(*router, context);
  for (const Router::Route& route : router->routes()) {
    context.metrics().DeclareHttp(route.pattern, route.method);
  }
  return router;
}

}  // namespace moeserve::server::http
