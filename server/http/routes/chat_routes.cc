#include "server/http/routes/chat_routes.h"

#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "base/strict_json.h"
#include "server/anthropic/message_request.h"
#include "server/anthropic/message_writer.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/chat/chat_request.h"
#include "server/chat/chat_response.h"
#include "server/completions/completion_request.h"
#include "server/generation/task_check.h"
#include "server/http/routes/request_body.h"
#include "server/http/routes/submit.h"
#include "server/ollama/ollama_request.h"
#include "server/ollama/ollama_writer.h"
#include "server/responses/response_request.h"
#include "server/responses/response_writer.h"

namespace moeserve::server::http {
namespace {

std::string ResponseErrorBody(const HttpError& error) {
  HttpError named = error;
  named.param = ResponseParam(error.param);
  return ErrorJson(named);
}

ChatAnswerRules RulesOf(const ChatParams& params) {
  return {.split = params.split,
          .include_reasoning = params.include_reasoning,
          .named_tool = params.conversation.tools.choice == ToolChoice::kNamed};
}

void Append(std::vector<std::string> from, std::vector<std::string>& to) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

// A request in Ollama's form, converted.
struct OllamaCall {
  OllamaRequest converted;
  std::string shown_name;  // of the model, as the client wrote it
};

// A parsed chat and the model that answers it.
struct Chat {
  std::shared_ptr<ServedModel> model;
  ChatParams params;
  std::vector<PreparedPrompt> prompts;
};

class ChatRoutes {
 public:
  explicit ChatRoutes(ServerContext& context) : context_(context) {}

  Handled Completions(const Request& request) {
    AnswerFormat format = {.id_prefix = "chatcmpl-", .make_writer = nullptr};
    const auto run = [&]() -> Result<Handled> {
      MOESERVE_RETURN_IF_ERROR(context_.CheckServing());
      Chat chat;
      {
        MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context_));
        MOESERVE_ASSIGN_OR_RETURN(chat, Parse(*body, request.body, request));
      }
      MOESERVE_RETURN_IF_ERROR(Prepare(chat));
      format.make_writer = [&](AnswerIdentity identity, const Tokenizer* tokenizer, int choices) {
        return std::make_unique<ChatWriter>(std::move(identity), MakeAnswerOptions(chat.params),
                                            RulesOf(chat.params), tokenizer, choices);
      };
      return Submit(context_, request, chat.model, chat.params, std::move(chat.prompts), format);
    };
    return StartedOrRefused(run(), format, request.key.get(), context_);
  }

  Handled Responses(const Request& request) {
    AnswerFormat format = {.id_prefix = "resp_", .error_body = &ResponseErrorBody};
    ResponseRequest converted;
    const auto run = [&]() -> Result<Handled> {
      MOESERVE_ASSIGN_OR_RETURN(Chat chat, PrepareResponse(request, converted));
      format.make_writer = [&](AnswerIdentity identity, const Tokenizer* tokenizer, int) {
        return std::make_unique<ResponseWriter>(std::move(identity), MakeAnswerOptions(chat.params),
                                                RulesOf(chat.params), std::move(converted.echo),
                                                std::move(converted.custom_tools), tokenizer,
                                                chat.params.stream);
      };
      return Submit(context_, request, chat.model, chat.params, std::move(chat.prompts), format);
    };
    return StartedOrRefused(run(), format, request.key.get(), context_);
  }

  Handled CountInput(const Request& request) {
    const AnswerFormat format = {.error_body = &ResponseErrorBody};
    const auto run = [&]() -> Result<Handled> {
      ResponseRequest converted;
      MOESERVE_ASSIGN_OR_RETURN(const Chat chat, PrepareResponse(request, converted));
      Response response;
      response.body = DumpJson(
          {{"object", "response.input_tokens"}, {"input_tokens", chat.prompts.front().ids.size()}});
      return Handled(std::move(response));
    };
    return StartedOrRefused(run(), format, request.key.get(), context_);
  }

  Handled Messages(const Request& request) {
    AnswerFormat format = {.id_prefix = "msg_", .error_body = &MessageErrorJson};
    const auto run = [&]() -> Result<Handled> {
      MOESERVE_ASSIGN_OR_RETURN(Chat chat, PrepareMessages(request, false));
      format.make_writer = [&](AnswerIdentity identity, const Tokenizer* tokenizer, int) {
        return std::make_unique<MessageWriter>(std::move(identity), MakeAnswerOptions(chat.params),
                                               RulesOf(chat.params), tokenizer, chat.params.stream);
      };
      return Submit(context_, request, chat.model, chat.params, std::move(chat.prompts), format);
    };
    return StartedOrRefused(run(), format, request.key.get(), context_);
  }

  Handled CountTokens(const Request& request) {
    const AnswerFormat format = {.error_body = &MessageErrorJson};
    const auto run = [&]() -> Result<Handled> {
      MOESERVE_ASSIGN_OR_RETURN(const Chat chat, PrepareMessages(request, true));
      Response response;
      response.body = DumpJson({{"input_tokens", chat.prompts.front().ids.size()}});
      return Handled(std::move(response));
    };
    return StartedOrRefused(run(), format, request.key.get(), context_);
  }

  Handled OllamaChat(const Request& request) { return Ollama(request, OllamaForm::kChat); }
  Handled OllamaGenerate(const Request& request) { return Ollama(request, OllamaForm::kGenerate); }

 private:
  Handled Ollama(const Request& request, OllamaForm form) {
    AnswerFormat format = {.id_prefix = "ollama-", .error_body = &OllamaErrorJson};
    const auto run = [&]() -> Result<Handled> {
      MOESERVE_RETURN_IF_ERROR(context_.CheckServing());
      OllamaCall call;
      Chat chat;
      CompletionParams completion;
      {
        MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context_));
        MOESERVE_ASSIGN_OR_RETURN(const MemoryCharge charge, ChargeForConversion(body));
        MOESERVE_ASSIGN_OR_RETURN(call, ConvertOllama(*body, request, form, chat.model));
        if (call.converted.only_loads) {
          Response response;
          response.body = DumpJson(OllamaLoadedJson(form, call.shown_name));
          return Handled(std::move(response));
        }
        if (call.converted.completes) {
          MOESERVE_ASSIGN_OR_RETURN(completion, ParseOllamaCompletion(call, *chat.model, request));
        } else {
          MOESERVE_ASSIGN_OR_RETURN(chat, ParseConverted(call.converted.body, request));
        }
      }
      GenerationParams& params =
          call.converted.completes ? static_cast<GenerationParams&>(completion) : chat.params;
      params.ignored_fields += call.converted.ignored_fields;
      Append(std::move(call.converted.warnings), params.warnings);
      ChatAnswerRules rules;
      if (call.converted.completes) {
        context_.metrics().ignored_fields += params.ignored_fields;
        const Engine& engine = chat.model->engine();
        MOESERVE_ASSIGN_OR_RETURN(chat.prompts, PreparePrompts(completion, PromptRulesOf(engine)));
        rules.split.syntax = &ChooseCallSyntax("");  // without tools it recognises nothing
      } else {
        MOESERVE_RETURN_IF_ERROR(Prepare(chat));
        rules = RulesOf(chat.params);
      }
      format.make_writer = [&](AnswerIdentity identity, const Tokenizer* tokenizer, int) {
        return std::make_unique<OllamaWriter>(form, call.shown_name, std::move(identity),
                                              MakeAnswerOptions(params), rules, tokenizer,
                                              params.stream);
      };
      return Submit(context_, request, chat.model, params, std::move(chat.prompts), format);
    };
    return StartedOrRefused(run(), format, request.key.get(), context_);
  }

  // Sets `model` to the one that the body names.
  Result<OllamaCall> ConvertOllama(const Json& body, const Request& request, OllamaForm form,
                                   std::shared_ptr<ServedModel>& model) {
    OllamaCall out;
    MOESERVE_ASSIGN_OR_RETURN(auto name, StringField(body, "model"));
    const std::string served =
        ResolveOllamaName(name.value_or(""), context_.ModelsOf(request.key.get()));
    MOESERVE_ASSIGN_OR_RETURN(model, context_.ModelFor(served, request.key.get()));
    out.shown_name = name ? *std::move(name) : model->name();
    const bool strict = context_.settings().strict_fields;
    const bool has_template = model->chat_format().status().ok();
    MOESERVE_ASSIGN_OR_RETURN(
        out.converted, form == OllamaForm::kChat
                           ? ParseOllamaChat(body, request.body, served, strict)
                           : ParseOllamaGenerate(body, request.body, served, has_template, strict));
    return out;
  }

  Result<CompletionParams> ParseOllamaCompletion(const OllamaCall& call, const ServedModel& model,
                                                 const Request& request) {
    const std::string text = DumpJson(call.converted.body);
    MOESERVE_ASSIGN_OR_RETURN(Json body, ParseOwn(text));
    Result<CompletionParams> params =
        ParseCompletion(body, context_.Rules(model, request.key.get()), text);
    ClearJson(body);
    if (params.ok()) params->default_max_tokens = std::numeric_limits<int32_t>::max();
    return params;
  }

  // A body is converted to another one, which is converted to text and parsed: three copies.
  Result<MemoryCharge> ChargeForConversion(const Body& body) const {
    MemoryCharge charge(context_.memory());
    MOESERVE_RETURN_IF_ERROR(
        charge.Add(3 * body.charged_bytes(), ChargeFor::kNewRequest, body.charged_bytes()));
    return charge;
  }

  // Sets `converted` without its chat.
  Result<Chat> PrepareResponse(const Request& request, ResponseRequest& converted) {
    MOESERVE_RETURN_IF_ERROR(context_.CheckServing());
    Chat chat;
    {
      MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context_));
      MOESERVE_ASSIGN_OR_RETURN(const MemoryCharge charge, ChargeForConversion(body));
      MOESERVE_ASSIGN_OR_RETURN(
          converted, ParseResponseRequest(*body, request.body, context_.settings().strict_fields));
      MOESERVE_ASSIGN_OR_RETURN(chat, ParseConverted(converted.chat, request));
      converted.chat = nullptr;
      chat.params.ignored_fields += converted.ignored_fields;
      Append(std::move(converted.warnings), chat.params.warnings);
      // As values, and as text when the response is written.
      chat.params.repeated_bytes = 8 * DumpJson(converted.echo).size();
    }
    MOESERVE_RETURN_IF_ERROR(Prepare(chat));
    return chat;
  }

  Result<Chat> PrepareMessages(const Request& request, bool counts_only) {
    MOESERVE_RETURN_IF_ERROR(context_.CheckServing());
    Chat chat;
    {
      MOESERVE_ASSIGN_OR_RETURN(const auto body, ParseBody(request.body, request, context_));
      MOESERVE_ASSIGN_OR_RETURN(const MemoryCharge charge, ChargeForConversion(body));
      MOESERVE_ASSIGN_OR_RETURN(
          MessageRequest converted,
          ParseMessageRequest(*body, request.body, counts_only, context_.settings().strict_fields));
      MOESERVE_ASSIGN_OR_RETURN(chat, ParseConverted(converted.chat, request));
      chat.params.ignored_fields += converted.ignored_fields;
      Append(std::move(converted.warnings), chat.params.warnings);
    }
    MOESERVE_RETURN_IF_ERROR(Prepare(chat));
    return chat;
  }

  // Parses the text of a converted body.
  Result<Json> ParseOwn(const std::string& text) const {
    JsonLimits limits;
    limits.max_bytes = text.size();
    limits.max_values = text.size() + 1;
    limits.max_depth = context_.settings().limits.json_depth + 8;  // some values are nested deeper
    return ParseStrictJson(text, limits);
  }

  Result<Chat> ParseConverted(const OrderedJson& converted, const Request& request) {
    const std::string text = DumpJson(converted);
    MOESERVE_ASSIGN_OR_RETURN(Json body, ParseOwn(text));
    Result<Chat> chat = Parse(body, text, request);
    ClearJson(body);
    return chat;
  }

  Result<Chat> Parse(const Json& body, std::string_view text, const Request& request) {
    Chat chat;
    MOESERVE_ASSIGN_OR_RETURN(const auto name, StringField(body, "model"));
    MOESERVE_ASSIGN_OR_RETURN(chat.model, context_.ModelFor(name.value_or(""), request.key.get()));
    MOESERVE_RETURN_IF_ERROR(CheckGenerates(chat.model->engine().spec()));
    MOESERVE_ASSIGN_OR_RETURN(chat.params,
                              ParseChat(body, text, context_.Rules(*chat.model, request.key.get()),
                                        context_.settings().allow_request_chat_template));
    return chat;
  }

  absl::Status Prepare(Chat& chat) {
    context_.metrics().ignored_fields += chat.params.ignored_fields;
    const Engine& engine = chat.model->engine();
    MOESERVE_ASSIGN_OR_RETURN(
        PreparedPrompt prompt,
        PrepareChat(chat.params, chat.model->chat_format(), engine.tokenizer(),
                    context_.settings().limits, engine.max_model_len(), absl::ToTimeT(absl::Now()),
                    engine.context_reason()));
    chat.prompts.push_back(std::move(prompt));
    return absl::OkStatus();
  }

  ServerContext& context_;
};

}  // namespace

void AddChatRoutes(Router& router, ServerContext& context) {
  auto routes = std::make_shared<ChatRoutes>(context);
  // Slow because chat templates are programs.
  const auto add = [&](std::string_view pattern, Handled (ChatRoutes::*handler)(const Request&),
                       BodyType body = BodyType::kJson) {
    router.Add("POST", pattern, Access::Key(Scope::kGenerate), Work::kSlow,
               HandlerOf(routes, handler), body);
  };
  add("/v1/chat/completions", &ChatRoutes::Completions);
  add("/v1/responses", &ChatRoutes::Responses);
  add("/v1/responses/input_tokens", &ChatRoutes::CountInput);
  add("/v1/messages", &ChatRoutes::Messages);
  add("/v1/messages/count_tokens", &ChatRoutes::CountTokens);
  // Ollama's users send JSON without saying so.
  add("/api/chat", &ChatRoutes::OllamaChat, BodyType::kAny);
  add("/api/generate", &ChatRoutes::OllamaGenerate, BodyType::kAny);
}

}  // namespace moeserve::server::http
