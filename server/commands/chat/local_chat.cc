#include "server/commands/chat/local_chat.h"

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <utility>

#include "base/error_text.h"
#include "engine/text/chat/chat_template.h"
#include "model_loaders/files/mapped_file.h"
#include "server/chat/chat_format.h"
#include "server/commands/chat/answer_experts.h"
#include "server/commands/run_to_end.h"
#include "server/commands/start_model.h"
#include "server/generation/generation_request.h"

namespace moeserve::server {
namespace {

constexpr int kTopExperts = 5;

void Apply(const ChatSettings& settings, GenerationParams& params) {
  const auto set = [&](const SamplingField& field) {
    const auto found = settings.find(field.name);
    if (found != settings.end()) field.Set(params.sampling, found->second);
  };
  for (const SamplingField& field : kDrawFields) set(field);
  for (const SamplingField& field : kPenaltyFields) set(field);
  if (const auto seed = settings.find("seed"); seed != settings.end()) {
    params.sampling.seed = static_cast<int64_t>(seed->second);
  }
  if (const auto tokens = settings.find("max_tokens"); tokens != settings.end()) {
    params.default_max_tokens = static_cast<int>(tokens->second);
  }
}

class LocalChat final : public ChatModel {
 public:
  LocalChat(RunningModel model, const ChatFormat* format, int max_tokens)
      : model_(std::move(model)), format_(format), max_tokens_(max_tokens) {}

  absl::Status Answer(const ChatTurn& turn, const std::function<void(std::string_view)>& on_text,
                      const std::function<bool()>& cancelled) override {
    CompletionParams params;
    params.sampling = DefaultSampling(model_.defaults);
    params.default_max_tokens = max_tokens_;  // reduced to what fits
    Apply(turn.settings, params);
    PromptInput prompt;
    if (turn.messages.empty()) {
      prompt.is_text = true;
      prompt.text = turn.text;
    } else {
      MOESERVE_ASSIGN_OR_RETURN(prompt.ids, Encode(turn.messages));
    }
    params.prompts.push_back(std::move(prompt));
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<PreparedPrompt> prompts,
                              PreparePrompts(params, PromptRulesOf(*model_.engine)));
    before_ = model_.engine->ExpertSnapshot();
    return RunToEnd(
        model_.engine,
        MakeEngineRequests(params, prompts, Concat("chat-", ++answers_), absl::InfiniteFuture()),
        [&](size_t, const OutputDelta& delta) { on_text(delta.text); }, cancelled);
  }

  Result<std::string> Experts() override {
    if (!before_) return absl::FailedPreconditionError("there is no answer yet");
    return AnswerExperts(Difference(model_.engine->ExpertSnapshot(), *before_), kTopExperts);
  }

 private:
  Result<std::vector<TokenId>> Encode(const std::vector<ChatMessage>& messages) const {
    Conversation conversation;
    for (const ChatMessage& message : messages) {
      OrderedJson json;
      json["role"] = message.role;
      json["content"] = message.content;
      conversation.messages.push_back(std::move(json));
    }
    MOESERVE_ASSIGN_OR_RETURN(ChatPrompt prompt,
                              format_->Encode(conversation, *model_.engine->tokenizer(),
                                              RequestLimits(), std::time(nullptr)));
    return std::move(prompt.ids);
  }

  const RunningModel model_;
  const std::unique_ptr<const ChatFormat> format_;  // null: only texts are continued
  const int max_tokens_;
  int64_t answers_ = 0;
  std::optional<ExpertStats> before_;  // the counters before the last answer
};

}  // namespace

Result<std::unique_ptr<ChatModel>> StartLocalChat(const LocalChatOptions& options) {
  EngineOptionsText engine_text = options.engine;
  engine_text.engine.max_num_seqs = 1;
  MOESERVE_ASSIGN_OR_RETURN(const EngineOptions engine, ResolveEngineOptions(engine_text));
  ModelOptionsText model_options = options.model;
  model_options.must_generate = true;
  std::optional<std::string> given;
  if (!options.chat_template.empty()) {
    auto source = ReadTextFile(options.chat_template, chat::kMaxTemplateBytes);
    if (!source.ok()) return Prefixed("--chat-template: ", source.status());
    given = *std::move(source);
  }
  MOESERVE_ASSIGN_OR_RETURN(RunningModel model, StartModel(model_options, engine));
  if (model.engine->tokenizer() == nullptr) {
    return absl::FailedPreconditionError("a chat needs a tokenizer, and the model has none");
  }
  std::unique_ptr<const ChatFormat> format;
  if (!options.completion) {
    TokenizerConfig config = model.tokenizer_config;
    if (given) config.chat_template = given;
    format = std::make_unique<const ChatFormat>(config);
    if (absl::IsNotFound(format->status())) {
      return absl::FailedPreconditionError(
          "the model has no chat template, so it may know plain text only: give a template with "
          "--chat-template FILE, or --completion to let it continue what you type");
    }
    if (!format->status().ok()) return Prefixed("the chat template: ", format->status());
  }
  return std::make_unique<LocalChat>(std::move(model), format.release(), options.max_tokens);
}

}  // namespace moeserve::server
