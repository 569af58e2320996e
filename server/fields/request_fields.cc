#include "server/fields/request_fields.h"

#include <algorithm>
#include <unordered_map>

#include "base/error_text.h"
#include "engine/beam/beam_params.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/fields/sampling_fields.h"

namespace moeserve::server {
namespace {

// A value (other than null) of a refused field that has the same meaning as an absent field.
enum class Harmless {
  kNever,
  kEmpty,  // [], {} or ""
  kFalse,
  kTrue,
  kOne,
  kNone,  // "none"
  kZero,
  kMedium,     // "medium"
  kStandard,   // "standard"
  kText,       // "text" or ["text"]
  kDisabled,   // {"type": "disabled"}
  kNoLogprob,  // false or 0
  kFloat32,    // "float32"
  kLittle,     // "little"
};

// Sets of routes.
constexpr unsigned Only(FieldRoute route) { return 1U << static_cast<unsigned>(route); }
constexpr unsigned kNone = 0;
constexpr unsigned kCompletion = Only(FieldRoute::kCompletions);
constexpr unsigned kChat = Only(FieldRoute::kChat);
constexpr unsigned kResponse = Only(FieldRoute::kResponses);
constexpr unsigned kMessage = Only(FieldRoute::kMessages);
constexpr unsigned kCount = Only(FieldRoute::kCountTokens);
constexpr unsigned kTokenize = Only(FieldRoute::kTokenize);
constexpr unsigned kDetokenize = Only(FieldRoute::kDetokenize);
constexpr unsigned kOllamaChat = Only(FieldRoute::kOllamaChat);
constexpr unsigned kOllamaGenerate = Only(FieldRoute::kOllamaGenerate);
constexpr unsigned kEmbeddings = Only(FieldRoute::kEmbeddings);
constexpr unsigned kPooling = Only(FieldRoute::kPooling);
constexpr unsigned kClassify = Only(FieldRoute::kClassify);
constexpr unsigned kScore = Only(FieldRoute::kScore);
constexpr unsigned kRerank = Only(FieldRoute::kRerank);
constexpr unsigned kFillMask = Only(FieldRoute::kFillMask);
// Their sampling fields are in `options`.
constexpr unsigned kOllama = kOllamaChat | kOllamaGenerate;
constexpr unsigned kGenerate = kCompletion | kChat | kResponse | kMessage;
// The routes that compute something of texts and generate nothing.
constexpr unsigned kVectors = kEmbeddings | kPooling;
constexpr unsigned kPairs = kScore | kRerank;
constexpr unsigned kEncode = kVectors | kClassify | kPairs | kFillMask;
constexpr unsigned kTokensOnly = kCount | kTokenize | kDetokenize | kEncode;
// The routes that render a conversation.
constexpr unsigned kRender = kChat | kResponse | kMessage | kCount | kTokenize;
// Those of them whose requests say where the answer begins. In Messages, it continues a last
// message of the assistant.
constexpr unsigned kTurns = kRender & ~(kMessage | kCount);
constexpr unsigned kAll = kGenerate | kTokensOnly | kOllama;

struct Field {
  std::string_view name;
  unsigned obeyed;  // the other routes refuse the field, except those of the next two sets
  unsigned no_effect = kNone;
  unsigned hint = kNone;
  Harmless harmless = Harmless::kNever;
  double min = 0.0;  // the valid range, with kOne
  double max = 0.0;
};

constexpr double kHuge = 1e9;

// Without most sampling fields, which SamplingFields() lists and all routes that generate obey.
constexpr Field kFields[] = {
    // What the answer is made from
    {"model", kAll},
    {"prompt", kCompletion | kTokenize | kOllamaGenerate},
    {"decoder_prompt", kCompletion},
    {"forced_bos_token_id", kCompletion},
    {"target_language", kCompletion},
    {"messages", (kRender & ~kResponse) | kOllamaChat},
    {"input", kResponse | kVectors | kClassify | kFillMask},
    {"token_type_ids", kVectors | kClassify | kFillMask, kNone, kNone, Harmless::kEmpty},
    {"text_1", kScore},
    {"text_2", kScore},
    {"queries", kScore},
    {"query", kRerank},
    {"prompt_name", kVectors},
    {"input_type", kVectors},
    {"truncation_side", kEncode & ~kFillMask},
    {"max_tokens_per_doc", kRerank},
    // What is computed of texts
    {"task", kPooling},
    {"dimensions", kVectors},
    {"use_activation", kEncode & ~kFillMask},
    {"normalize", kVectors},
    {"aggregation", kClassify},
    {"targets", kFillMask, kNone, kNone, Harmless::kEmpty},
    {"targets_of", kFillMask, kNone, kNone, Harmless::kEmpty},
    {"encoding_format", kVectors},
    {"embed_dtype", kNone, kNone, kNone, Harmless::kFloat32},
    {"endianness", kNone, kNone, kNone, Harmless::kLittle},
    {"top_n", kRerank},
    {"return_documents", kRerank, kNone, kNone, Harmless::kFalse},
    {"instructions", kResponse},
    {"system", kMessage | kCount | kOllamaGenerate},
    {"tokens", kDetokenize},
    {"tools", kRender | kOllamaChat, kNone, kNone, Harmless::kEmpty},
    {"tool_choice", kRender, kNone, kNone, Harmless::kNone},
    {"parallel_tool_calls", kRender, kCompletion | kDetokenize},
    {"chat_template", kRender},
    {"chat_template_kwargs", kRender, kNone, kNone, Harmless::kEmpty},
    {"add_generation_prompt", kTurns, kNone, kNone, Harmless::kTrue},
    {"continue_final_message", kTurns, kNone, kNone, Harmless::kFalse},
    {"add_special_tokens", kRender | kCompletion | kEncode},
    {"truncate_prompt_tokens", kGenerate | kCount | (kEncode & ~kFillMask)},
    {"reasoning_effort", kRender, kDetokenize, kCompletion, Harmless::kNone},
    {"reasoning", kResponse, kNone, kNone, Harmless::kEmpty},
    {"thinking", kMessage | kCount, kNone, kNone, Harmless::kDisabled},
    // How much is generated, and in which form
    {"max_tokens", kGenerate, kTokensOnly},
    {"max_completion_tokens", kGenerate, kTokensOnly},
    {"max_output_tokens", kResponse},
    {"stop_sequences", kMessage, kCount},
    {"n", kCompletion | kChat, kTokensOnly, kNone, Harmless::kOne, 1, kHuge},
    {"best_of", kCompletion | kChat, kTokensOnly, kNone, Harmless::kOne, 1, kHuge},
    {"use_beam_search", kCompletion | kChat, kTokensOnly, kNone, Harmless::kFalse},
    {"num_beams", kCompletion | kChat, kTokensOnly, kNone, Harmless::kOne, 1, kMaxBeams},
    {"length_penalty", kCompletion | kChat, kTokensOnly, kNone, Harmless::kOne, -kMaxLengthPenalty,
     kMaxLengthPenalty},
    {"early_stopping", kCompletion | kChat, kTokensOnly, kNone, Harmless::kFalse},
    {"response_format", kGenerate, kTokensOnly},
    {"structured_outputs", kGenerate, kTokensOnly},
    {"guided_json", kGenerate, kTokensOnly},
    {"guided_regex", kGenerate, kTokensOnly},
    {"guided_choice", kGenerate, kTokensOnly},
    {"guided_grammar", kGenerate, kTokensOnly},
    {"text", kResponse},
    {"output_config", kMessage, kCount},
    {"output_format", kMessage, kCount},
    {"prediction", kGenerate, kTokensOnly},
    {"verbosity", kNone, kTokensOnly, kGenerate, Harmless::kMedium},
    // What the answer shows
    {"stream", kGenerate | kOllama, kTokensOnly},
    {"stream_options", kGenerate, kTokensOnly},
    {"echo", kCompletion, kNone, kNone, Harmless::kFalse},
    {"logprobs", kCompletion | kChat | kOllama | kFillMask, kTokensOnly, kNone,
     Harmless::kNoLogprob},
    {"top_logprobs", kChat | kResponse | kOllama, kTokensOnly, kNone, Harmless::kNoLogprob},
    {"prompt_logprobs", kCompletion | kChat},
    {"include", kResponse, kNone, kNone, Harmless::kEmpty},
    {"include_reasoning", kChat | kResponse | kMessage, kTokensOnly, kNone, Harmless::kTrue},
    {"return_token_ids", kCompletion | kChat, kNone, kNone, Harmless::kFalse},
    {"return_tokens_as_token_ids", kCompletion | kChat | kResponse, kNone, kNone, Harmless::kFalse},
    {"return_token_strs", kTokenize, kNone, kNone, Harmless::kFalse},
    {"return_routing", kCompletion | kChat | kEncode, kNone, kNone, Harmless::kFalse},
    {"routing_records", kEncode, kNone, kNone, Harmless::kFalse},
    {"return_routed_experts", kCompletion | kChat | kEncode, kNone, kNone, Harmless::kFalse},
    {"return_word_experts", kCompletion},
    // How it is served
    {"routing_control", kGenerate | kEncode, kTokensOnly},
    {"priority", kGenerate | kEncode, kTokensOnly},
    {"cache_salt", kGenerate | kEncode, kTokensOnly},
    {"request_id", kGenerate | kEncode, kTokensOnly},
    // Sampling fields with rows of their own: two are also fields of other routes, and two are none
    // of Messages, whose users know no penalties.
    {"top_k", kGenerate | kFillMask, kTokensOnly},
    {"skip_special_tokens", kGenerate | kDetokenize, kCount | kTokenize},
    {"presence_penalty", kGenerate & ~kMessage, kTokensOnly, kNone, Harmless::kZero},
    {"frequency_penalty", kGenerate & ~kMessage, kTokensOnly, kNone, Harmless::kZero},
    // Labels, and hints about caches and queues that this server does not have
    {"user", kNone, kAll},
    {"metadata", kNone, kAll},
    {"store", kNone, kAll},
    {"service_tier", kNone, kAll},
    {"safety_identifier", kNone, kAll},
    {"prompt_cache_key", kNone, kAll},
    {"prompt_cache_retention", kNone, kAll},
    {"cache_control", kNone, kAll},
    {"prompt_cache_options", kNone, kAll},
    {"inference_geo", kNone, kAll},
    {"access_programs", kNone, kAll},
    {"user_profile_id", kNone, kAll},
    {"workspace_id", kNone, kAll},
    {"billing_policy", kNone, kAll},
    {"diagnostics", kNone, kAll},
    {"speed", kNone, kTokensOnly, kGenerate, Harmless::kStandard},
    {"personality", kNone, kTokensOnly, kGenerate},
    // Which models answer where one declines; none of this server does. The others are headers that
    // some gateways put into the body.
    {"fallbacks", kNone, kMessage | kCount},
    {"fallback_credit_token", kNone, kMessage | kCount},
    {"betas", kNone, kMessage | kCount},
    {"anthropic_beta", kNone, kMessage | kCount},
    {"anthropic_version", kNone, kMessage | kCount},
    // State of the server between requests
    {"context_management", kResponse | kMessage | kCount, kNone, kNone, Harmless::kEmpty},
    {"truncation", kResponse},
    {"previous_response_id", kNone},
    {"conversation", kNone},
    {"thread", kNone},
    {"compaction", kNone},
    {"background", kNone, kNone, kNone, Harmless::kFalse},
    {"background_options", kNone, kNone, kNone, Harmless::kEmpty},
    {"max_tool_calls", kNone},
    {"container", kNone},
    {"mcp_servers", kNone, kNone, kNone, Harmless::kEmpty},
    // OpenAI
    {"suffix", kNone, kNone, kNone, Harmless::kEmpty},
    {"image", kNone, kNone, kNone, Harmless::kEmpty},
    {"functions", kNone, kNone, kNone, Harmless::kEmpty},
    {"function_call", kNone, kNone, kNone, Harmless::kNone},
    {"audio", kNone},
    {"web_search_options", kNone},
    {"modalities", kNone, kNone, kNone, Harmless::kText},
    {"moderation", kNone},
    // Ollama
    {"options", kOllama},
    {"format", kOllama},
    {"think", kOllama},
    {"raw", kOllamaGenerate, kNone, kNone, Harmless::kFalse},
    {"keep_alive", kNone, kOllama},
    {"template", kNone, kNone, kNone, Harmless::kEmpty},
    {"context", kNone, kNone, kNone, Harmless::kEmpty},
    {"images", kNone, kNone, kNone, Harmless::kEmpty},
    {"width", kNone, kNone, kNone, Harmless::kZero},
    {"height", kNone, kNone, kNone, Harmless::kZero},
    {"steps", kNone, kNone, kNone, Harmless::kZero},
    {"truncate", kNone, kNone, kNone, Harmless::kFalse},
    {"shift", kNone, kNone, kNone, Harmless::kFalse},
    // OpenRouter
    {"top_a", kNone, kNone, kNone, Harmless::kZero},
    {"transforms", kNone, kNone, kNone, Harmless::kEmpty},
    {"plugins", kNone, kNone, kNone, Harmless::kEmpty},
    // vLLM
    {"spaces_between_special_tokens", kNone, kNone, kNone, Harmless::kTrue},
    {"prompt_embeds", kNone},
    {"logits_processors", kNone, kNone, kNone, Harmless::kEmpty},
    {"logit_processors", kNone, kNone, kNone, Harmless::kEmpty},
    {"documents", kPairs, kNone, kNone, Harmless::kEmpty},
    {"mm_processor_kwargs", kNone, kNone, kNone, Harmless::kEmpty},
    {"media_io_kwargs", kNone, kNone, kNone, Harmless::kEmpty},
    {"guided_whitespace_pattern", kNone},
    {"kv_transfer_params", kNone, kNone, kNone, Harmless::kEmpty},
    {"vllm_xargs", kNone, kNone, kNone, Harmless::kEmpty},
    {"thinking_token_budget", kNone},
    {"repetition_detection", kNone, kNone, kNone, Harmless::kEmpty},
    // SGLang
    {"regex", kNone},
    {"ebnf", kNone},
    {"stop_regex", kNone, kNone, kNone, Harmless::kEmpty},
    {"no_stop_trim", kNone, kNone, kNone, Harmless::kFalse},
    {"custom_logit_processor", kNone},
    {"custom_params", kNone, kNone, kNone, Harmless::kEmpty},
    {"lora_path", kNone},
    {"session_params", kNone, kNone, kNone, Harmless::kEmpty},
    {"input_embeds", kNone},
    {"return_hidden_states", kNone, kNone, kNone, Harmless::kFalse},
    {"logprob_start_len", kNone},
    {"input_ids", kNone},
    // llama.cpp and others with its fields
    {"grammar", kNone},
    {"json_schema", kNone},
    {"n_predict", kNone},
    {"repeat_penalty", kNone, kNone, kNone, Harmless::kOne, -kHuge, kHuge},
    {"typical_p", kNone, kNone, kNone, Harmless::kOne, -kHuge, kHuge},
    {"tfs_z", kNone, kNone, kNone, Harmless::kOne, -kHuge, kHuge},
    {"mirostat", kNone, kNone, kNone, Harmless::kZero},
    {"dynatemp_range", kNone, kNone, kNone, Harmless::kZero},
    {"xtc_probability", kNone, kNone, kNone, Harmless::kZero},
    {"dry_multiplier", kNone, kNone, kNone, Harmless::kZero},
    {"top_n_sigma", kNone},
    {"samplers", kNone, kNone, kNone, Harmless::kEmpty},
    {"lora", kNone, kNone, kNone, Harmless::kEmpty},
};

constexpr Field kSampling = {"", kGenerate, kTokensOnly};

// Returns null for a field that nobody knows.
const Field* Find(std::string_view name) {
  static const auto* const kTable = [] {
    auto* table = new std::unordered_map<std::string_view, const Field*>;
    for (const Field& field : kFields) table->emplace(field.name, &field);
    for (const std::string_view sampling : SamplingFields()) table->emplace(sampling, &kSampling);
    return table;
  }();
  const auto found = kTable->find(name);
  return found == kTable->end() ? nullptr : found->second;
}

FieldUse UseOf(const Field& field, FieldRoute route) {
  const unsigned bit = Only(route);
  if ((field.obeyed & bit) != 0) return FieldUse::kObeyed;
  if ((field.no_effect & bit) != 0) return FieldUse::kNoEffect;
  return (field.hint & bit) != 0 ? FieldUse::kHint : FieldUse::kRefused;
}

bool IsHarmless(const Json& value, Harmless kind) {
  switch (kind) {
    case Harmless::kNever:
      return false;
    case Harmless::kEmpty:
      return value == "" || (value.is_structured() && value.empty());
    case Harmless::kFalse:
      return value == false;
    case Harmless::kTrue:
      return value == true;
    case Harmless::kOne:
      return value.is_number() && value.get<double>() == 1.0;
    case Harmless::kNone:
      return value == "none";
    case Harmless::kZero:
      return value.is_number() && value.get<double>() == 0.0;
    case Harmless::kMedium:
      return value == "medium";
    case Harmless::kStandard:
      return value == "standard";
    case Harmless::kText:
      return value == "text" || value == Json::array({"text"});
    case Harmless::kDisabled:
      return value == Json({{"type", "disabled"}});
    case Harmless::kNoLogprob:
      return value == false || (value.is_number() && value.get<double>() == 0.0);
    case Harmless::kFloat32:
      return value == "float32";
    case Harmless::kLittle:
      return value == "little";
  }
  return false;
}

// `name` is the field's; the rows of sampling fields have none.
absl::Status Refuse(const Json& body, const Field& field, const std::string& name,
                    const Json& value, FieldRoute route) {
  if (field.harmless == Harmless::kOne) {
    if (auto number = NumberField(body, name.c_str(), field.min, field.max); !number.ok()) {
      return number.status();
    }
  }
  if (field.harmless == Harmless::kFalse || field.harmless == Harmless::kTrue) {
    if (auto flag = BoolField(body, name.c_str()); !flag.ok()) return flag.status();
  }
  if (IsHarmless(value, field.harmless)) return absl::OkStatus();
  std::string others;
  for (int i = 0; i < kFieldRoutes; ++i) {
    const auto other = static_cast<FieldRoute>(i);
    if ((field.obeyed & Only(other)) == 0) continue;
    others += Concat(others.empty() ? "" : ", ", PathOf(other));
  }
  if (others.empty()) return UnsupportedParameter(name);
  return UnsupportedParameter(name, Concat("'", name, "' is not supported by ", PathOf(route),
                                           "; it is a field of ", others));
}

}  // namespace

std::string_view PathOf(FieldRoute route) {
  switch (route) {
    case FieldRoute::kCompletions:
      return "/v1/completions";
    case FieldRoute::kChat:
      return "/v1/chat/completions";
    case FieldRoute::kResponses:
      return "/v1/responses";
    case FieldRoute::kMessages:
      return "/v1/messages";
    case FieldRoute::kCountTokens:
      return "/v1/messages/count_tokens";
    case FieldRoute::kTokenize:
      return "/tokenize";
    case FieldRoute::kDetokenize:
      return "/detokenize";
    case FieldRoute::kOllamaChat:
      return "/api/chat";
    case FieldRoute::kOllamaGenerate:
      return "/api/generate";
    case FieldRoute::kEmbeddings:
      return "/v1/embeddings";
    case FieldRoute::kPooling:
      return "/pooling";
    case FieldRoute::kClassify:
      return "/classify";
    case FieldRoute::kScore:
      return "/score";
    case FieldRoute::kRerank:
      return "/rerank";
    case FieldRoute::kFillMask:
      return "/v1/fill-mask";
  }
  return "";
}

FieldUse UseOf(std::string_view field, FieldRoute route) {
  const Field* known = Find(field);
  return known == nullptr ? FieldUse::kUnknown : UseOf(*known, route);
}

std::vector<std::string_view> KnownFields() {
  std::vector<std::string_view> names;
  for (const Field& field : kFields) names.push_back(field.name);
  for (const std::string_view name : SamplingFields()) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

absl::Status CheckRequestFields(const Json& body, FieldRoute route, bool strict,
                                FieldFindings& out) {
  for (const auto& [name, value] : body.items()) {
    const Field* const field = Find(name);
    if (field == nullptr) {
      if (strict) {
        const std::string shown = Printable(name, 64);
        return InvalidValue(shown, Concat("unknown field '", shown, "'"));
      }
      ++out.ignored;
      continue;
    }
    if (value.is_null()) continue;
    const FieldUse use = UseOf(*field, route);
    if (use == FieldUse::kRefused) {
      MOESERVE_RETURN_IF_ERROR(Refuse(body, *field, name, value, route));
    }
    if (use == FieldUse::kHint && !value.is_string()) {
      return InvalidValue(name, Concat("'", name, "' must be a string"));
    }
    if (use == FieldUse::kHint && !IsHarmless(value, field->harmless)) {
      out.warnings.push_back(Concat("'", name, "' has no effect on this server"));
    }
  }
  return absl::OkStatus();
}

}  // namespace moeserve::server
