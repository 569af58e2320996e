#include "server/http/routes/server_routes.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/steady_clock.h"
#include "server/answers/answer.h"
#include "server/base/api_error.h"
#include "server/base/version.h"
#include "server/http/error_response.h"
#include "server/http/routes/expert_routes.h"
#include "server/http/routes/json_response.h"
#include "server/http/url.h"
#include "server/metrics/expert_metrics.h"

namespace moeserve::server::http {
namespace {

// The class that transformers uses for a tokenizer.json of any kind.
constexpr std::string_view kDefaultClass = "PreTrainedTokenizerFast";

// Limit on the special tokens that /tokenizer_info lists.
constexpr size_t kMaxSpecialTokens = 4096;

template <typename T>
OrderedJson OrNull(const std::optional<T>& value) {
  return value ? OrderedJson(*value) : OrderedJson(nullptr);
}

std::string_view StateName(ServerState state) {
  switch (state) {
    case ServerState::kLoading:
      return "loading";
    case ServerState::kServing:
      return "serving";
    case ServerState::kDraining:
      return "draining";
  }
  return "loading";
}

OrderedJson RequestLimitsJson(const ServerSettings& settings) {
  const RequestLimits& limits = settings.limits;
  OrderedJson out;
  out["max_body_bytes"] = settings.http.max_body_bytes;
  out["max_request_seconds"] = limits.max_request_time == absl::InfiniteDuration()
                                   ? 0.0  // no limit
                                   : absl::ToDoubleSeconds(limits.max_request_time);
  out["max_n"] = limits.max_n;
  out["max_prompts"] = limits.max_prompts;
  out["max_choices"] = limits.max_choices;
  out["max_prompt_bytes"] = limits.max_prompt_bytes;
  out["max_messages"] = limits.max_messages;
  out["max_message_bytes"] = limits.max_message_bytes;
  out["max_stop"] = limits.max_stop;
  out["max_stop_bytes"] = limits.max_stop_bytes;
  out["max_stop_token_ids"] = limits.max_stop_token_ids;
  out["max_logit_bias"] = limits.max_logit_bias;
  out["max_bad_words"] = limits.max_bad_words;
  out["max_logprobs"] = limits.max_logprobs;
  out["max_json_depth"] = limits.json_depth;
  out["request_memory_bytes"] = settings.request_memory;
  return out;
}

// The settings on which it depends how a request is answered.
OrderedJson SettingsJson(const ServerSettings& settings, bool model_control) {
  OrderedJson out;
  out["api_keys"] = !settings.keys.empty();
  out["tls"] = settings.tls != nullptr;
  out["strict_fields"] = settings.strict_fields;
  out["min_priority"] = settings.min_priority;
  out["allow_request_chat_template"] = settings.allow_request_chat_template;
  out["routing_records"] = settings.routing_records;
  out["model_control"] = model_control;
  out["cors_origins"] = settings.cors_origins;
  out["dashboard"] = settings.dashboard;
  out["moe_metrics"] = Name(settings.moe_metrics.mode);
  return out;
}

OrderedJson ModelJson(const ModelStatus& status, const ModelRegistry& models) {
  OrderedJson out;
  out["id"] = status.name;
  out["aliases"] = status.aliases;
  out["state"] = Name(status.state);
  out["version"] = status.version;
  out["memory_bytes"] = status.memory_bytes;
  const auto model = models.Find(status.name);
  if (!model.ok()) return out;
  const Engine& engine = (*model)->engine();
  const GenerationDefaults& defaults = (*model)->defaults();
  out["max_model_len"] = engine.max_model_len();
  out["vocab_size"] = engine.spec().vocab_size;
  out["tokenizer"] = engine.tokenizer() != nullptr;
  out["chat_template"] = (*model)->chat_format().status().ok();
  out["routing_control"] = engine.options().routing_control.enabled;
  OrderedJson sampling = OrderedJson::object();
  const auto put = [&](const char* name, const auto& value) {
    if (value) sampling[name] = *value;
  };
  put("temperature", defaults.temperature);
  put("top_p", defaults.top_p);
  put("top_k", defaults.top_k);
  put("min_p", defaults.min_p);
  put("repetition_penalty", defaults.repetition_penalty);
  out["default_sampling"] = std::move(sampling);
  return out;
}

class ServerRoutes {
 public:
  explicit ServerRoutes(ServerContext& context) : context_(context) {}

  Handled Ping(const Request&) const {
    absl::Status status = context_.CheckServing();
    status.Update(context_.EngineStatus());
    if (!status.ok()) return ErrorResponse(status);
    return JsonResponse({{"status", "ok"}});
  }

  Handled ServerInfo(const Request& request) const {
    const ServerSettings& settings = context_.settings();
    OrderedJson out;
    out["name"] = "moeserve";
    out["version"] = kVersion;
    out["commit"] = settings.commit.empty() ? OrderedJson(nullptr) : OrderedJson(settings.commit);
    out["device"] = settings.device;
    out["state"] = StateName(context_.state());
    out["uptime_seconds"] = absl::ToDoubleSeconds(SteadyNow() - start_);
    OrderedJson models = OrderedJson::array();
    for (const ModelStatus& status : context_.models().List()) {
      if (request.key != nullptr && !request.key->MayUseModel(status.name)) continue;
      models.push_back(ModelJson(status, context_.models()));
    }
    out["models"] = std::move(models);
    out["limits"] = RequestLimitsJson(settings);
    out["settings"] = SettingsJson(settings, context_.model_manager() != nullptr);
    OrderedJson& ranks = out["ranks"] = OrderedJson::array();
    if (settings.ranks) {
      for (const RankStatus::Rank& rank : settings.ranks().ranks) {
        ranks.push_back({{"rank", ranks.size()}, {"host", rank.host}, {"up", rank.up}});
      }
    }
    return JsonResponse(out);
  }

  Handled History(const Request& request) const {
    const auto name = FormDecode(QueryText(request.query, "model").value_or(""));
    if (!name) return ErrorResponse(InvalidValue("model", "'model' is not well-formed"));
    return JsonResponse(context_.metrics_history().ToJson(SteadyNow(), *name));
  }

  Handled TokenizerInfo(const Request& request) const {
    const auto model = QueriedModel(request, context_);
    if (!model.ok()) return ErrorResponse(model.status());
    const Tokenizer* const tokenizer = (*model)->engine().tokenizer();
    if (tokenizer == nullptr) {
      return ErrorResponse(InvalidValue("model", "this model has no tokenizer"));
    }
    return JsonResponse(TokenizerJson(**model, *tokenizer));
  }

 private:
  OrderedJson TokenizerJson(const ServedModel& model, const Tokenizer& tokenizer) const {
    const TokenizerConfig& config = model.tokenizer_config();
    const ModelSpec& spec = model.engine().spec();
    // Without tokenizer_config.json, the model's configuration still names these by their ids.
    const auto token = [&](const std::optional<std::string>& text, std::optional<TokenId> id) {
      if (text) return OrderedJson(*text);
      const std::string_view spelled = id ? tokenizer.TokenString(*id) : std::string_view();
      return spelled.empty() ? OrderedJson(nullptr) : OrderedJson(std::string(spelled));
    };
    const bool has_eos = !spec.eos_token_ids.empty();
    OrderedJson out;
    out["model"] = model.name();
    out["tokenizer_class"] = config.tokenizer_class.value_or(std::string(kDefaultClass));
    out["vocab_size"] = tokenizer.vocab_size();
    out["model_max_length"] = model.engine().max_model_len();
    out["bos_token"] = token(config.bos_token, spec.bos_token_id);
    out["eos_token"] =
        token(config.eos_token, has_eos ? std::optional(spec.eos_token_ids.front()) : std::nullopt);
    out["pad_token"] = OrNull(config.pad_token);
    out["unk_token"] = OrNull(config.unk_token);
    out["eos_token_ids"] = spec.eos_token_ids;
    out["add_bos_token"] = OrNull(config.add_bos_token);
    out["add_eos_token"] = OrNull(config.add_eos_token);
    OrderedJson special = OrderedJson::array();
    for (TokenId id = 0; id < tokenizer.vocab_size(); ++id) {
      if (!tokenizer.IsSpecial(id) || tokenizer.TokenString(id).empty()) continue;
      if (special.size() == kMaxSpecialTokens) break;
      special.push_back({{"id", id}, {"token", std::string(tokenizer.TokenString(id))}});
    }
    out["special_tokens"] = std::move(special);
    const bool shown = context_.settings().show_chat_template;
    out["chat_template"] = shown ? OrNull(config.chat_template) : OrderedJson(nullptr);
    return out;
  }

  ServerContext& context_;
  const absl::Time start_ = SteadyNow();
};

}  // namespace

void AddServerRoutes(Router& router, ServerContext& context) {
  const auto routes = std::make_shared<const ServerRoutes>(context);
  const auto add = [&](std::string_view method, std::string_view path, Access access, Work work,
                       Handled (ServerRoutes::*handler)(const Request&) const,
                       BodyType body = BodyType::kJson) {
    router.Add(method, path, access, work, HandlerOf(routes, handler), body);
  };
  add("GET", "/ping", Access::Operator(), Work::kQuick, &ServerRoutes::Ping);
  add("POST", "/ping", Access::Operator(), Work::kQuick, &ServerRoutes::Ping, BodyType::kAny);
  add("GET", "/v1/metrics/history", Access::Operator(), Work::kQuick, &ServerRoutes::History);
  // It shows how the server is set up.
  add("GET", "/server_info", Access::Key(Scope::kAdmin), Work::kQuick, &ServerRoutes::ServerInfo);
  // Slow because it looks at every token.
  add("GET", "/tokenizer_info", Access::Key(Scope::kGenerate), Work::kSlow,
      &ServerRoutes::TokenizerInfo);
}

}  // namespace moeserve::server::http
