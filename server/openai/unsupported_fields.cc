#include "server/openai/unsupported_fields.h"

#include <algorithm>
#include <string>

#include "server/base/api_error.h"
#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

// The value (other than null) of an unsupported field that has the same meaning as an absent field.
enum class Harmless {
  kNever,
  kEmpty,  // [] or {}
  kFalse,
  kTrue,
  kOne,
  kNone,  // "none"
  kZero,
  kMedium,    // "medium"
  kText,      // "text" or ["text"]
  kDisabled,  // {"type": "disabled"}
};

struct Field {
  const char* name;
  Harmless harmless;
  double min = 0.0;  // the valid range, with kOne
  double max = 0.0;
};

constexpr double kHuge = 1e9;

constexpr Field kFields[] = {
    {"length_penalty", Harmless::kOne, -kHuge, kHuge},
    {"suffix", Harmless::kNever},
    {"use_beam_search", Harmless::kFalse},
    {"spaces_between_special_tokens", Harmless::kTrue},
    {"tools", Harmless::kEmpty},
    {"tool_choice", Harmless::kNone},
    {"functions", Harmless::kEmpty},
    {"function_call", Harmless::kNone},
    {"audio", Harmless::kNever},
    {"prompt_embeds", Harmless::kNever},
    {"logits_processors", Harmless::kEmpty},
    {"logit_processors", Harmless::kEmpty},
    // OpenAI
    {"reasoning_effort", Harmless::kNone},
    {"verbosity", Harmless::kMedium},
    {"web_search_options", Harmless::kNever},
    {"prediction", Harmless::kNever},
    {"modalities", Harmless::kText},
    {"moderation", Harmless::kNever},
    // Anthropic and OpenRouter
    {"thinking", Harmless::kDisabled},
    {"reasoning", Harmless::kEmpty},
    {"top_a", Harmless::kZero},
    {"transforms", Harmless::kEmpty},
    {"plugins", Harmless::kEmpty},
    // vLLM
    {"documents", Harmless::kEmpty},
    {"mm_processor_kwargs", Harmless::kEmpty},
    {"media_io_kwargs", Harmless::kEmpty},
    {"guided_whitespace_pattern", Harmless::kNever},
    {"kv_transfer_params", Harmless::kEmpty},
    {"vllm_xargs", Harmless::kEmpty},
    {"thinking_token_budget", Harmless::kNever},
    {"repetition_detection", Harmless::kEmpty},
    // SGLang
    {"regex", Harmless::kNever},
    {"ebnf", Harmless::kNever},
    {"stop_regex", Harmless::kEmpty},
    {"no_stop_trim", Harmless::kFalse},
    {"custom_logit_processor", Harmless::kNever},
    {"custom_params", Harmless::kEmpty},
    {"lora_path", Harmless::kNever},
    {"session_params", Harmless::kEmpty},
    {"input_embeds", Harmless::kNever},
    {"return_hidden_states", Harmless::kFalse},
    {"logprob_start_len", Harmless::kNever},
    {"input_ids", Harmless::kNever},
    // llama.cpp and others with its fields
    {"grammar", Harmless::kNever},
    {"json_schema", Harmless::kNever},
    {"n_predict", Harmless::kNever},
    {"repeat_penalty", Harmless::kOne, -kHuge, kHuge},
    {"typical_p", Harmless::kOne, -kHuge, kHuge},
    {"tfs_z", Harmless::kOne, -kHuge, kHuge},
    {"mirostat", Harmless::kZero},
    {"dynatemp_range", Harmless::kZero},
    {"xtc_probability", Harmless::kZero},
    {"dry_multiplier", Harmless::kZero},
    {"top_n_sigma", Harmless::kNever},
    {"samplers", Harmless::kEmpty},
    {"lora", Harmless::kEmpty},
};

bool IsHarmless(const Json& value, Harmless kind) {
  switch (kind) {
    case Harmless::kNever:
      return false;
    case Harmless::kEmpty:
      return value.is_structured() && value.empty();
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
    case Harmless::kText:
      return value == "text" || value == Json::array({"text"});
    case Harmless::kDisabled:
      return value == Json({{"type", "disabled"}});
  }
  return false;
}

}  // namespace

bool IsKnownUnsupportedField(std::string_view name) {
  for (const Field& field : kFields) {
    if (name == field.name) return true;
  }
  return false;
}

absl::Status CheckUnsupportedFields(const Json& body, std::span<const std::string_view> supported) {
  for (const Field& field : kFields) {
    if (std::find(supported.begin(), supported.end(), field.name) != supported.end()) continue;
    const Json* value = FindField(body, field.name);
    if (value == nullptr) continue;
    if (field.harmless == Harmless::kOne) {
      if (auto number = NumberField(body, field.name, field.min, field.max); !number.ok()) {
        return number.status();
      }
    }
    if (field.harmless == Harmless::kFalse || field.harmless == Harmless::kTrue) {
      if (auto flag = BoolField(body, field.name); !flag.ok()) return flag.status();
    }
    if (!IsHarmless(*value, field.harmless)) return UnsupportedParameter(field.name);
  }
  return absl::OkStatus();
}

}  // namespace moeserve::server
