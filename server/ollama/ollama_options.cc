#include "server/ollama/ollama_options.h"

#include <absl/algorithm/container.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/fields/sampling_fields.h"

namespace moeserve::server {
namespace {

// Options about how a model is loaded or computed. They do not change what it answers, or belong to
// another option that is off.
constexpr std::string_view kNoEffect[] = {
    "numa",     "num_batch",  "num_gpu",        "main_gpu",     "low_vram",
    "f16_kv",   "logits_all", "vocab_only",     "use_mmap",     "use_mlock",
    "num_keep", "num_thread", "embedding_only", "mirostat_tau", "mirostat_eta"};

// Options that this server cannot follow; the answer has a warning.
struct Warned {
  std::string_view name;
  std::string_view reason;
};
constexpr Warned kWarned[] = {
    {"num_ctx", "the server's --max-model-len sets the length of the context"},
    {"repeat_last_n", "penalties count all tokens"},
    {"penalize_newline", "penalties count line breaks, too"},
};

// Options that are refused unless they have the value that turns them off.
struct Refused {
  std::string_view name;
  double off;
};
constexpr Refused kRefused[] = {{"mirostat", 0},
                                {"tfs_z", 1},
                                {"typical_p", 1},
                                {"rope_frequency_base", 0},
                                {"rope_frequency_scale", 0}};

std::string Where(std::string_view name) { return "options." + Printable(std::string(name), 64); }

// The number of tokens: -1 and -2 stand for as many as fit into the context.
absl::Status ConvertLimit(const Json& value, OllamaRequest& out) {
  const auto tokens = AsInteger(value);
  if (!tokens || (*tokens < 1 && *tokens != -1 && *tokens != -2) ||
      *tokens > std::numeric_limits<int32_t>::max()) {
    return InvalidValue("options.num_predict",
                        "'options.num_predict' must be a positive integer, or -1 or -2 for as many "
                        "tokens as fit");
  }
  if (*tokens > 0) out.body["max_tokens"] = *tokens;
  return absl::OkStatus();
}

absl::Status ConvertOption(const std::string& name, const Json& value, bool strict,
                           OllamaRequest& out) {
  if (name == "num_predict") return ConvertLimit(value, out);
  if (name == "repeat_penalty") {
    out.body["repetition_penalty"] = value;
    return absl::OkStatus();
  }
  if (name == "seed" && value == -1) return absl::OkStatus();  // a random seed
  if (absl::c_linear_search(SamplingFields(), name)) {
    out.body[name] = value;
    return absl::OkStatus();
  }
  if (absl::c_linear_search(kNoEffect, name)) return absl::OkStatus();
  for (const Warned& warned : kWarned) {
    if (warned.name != name) continue;
    out.warnings.push_back(Concat("'", Where(name), "' has no effect: ", warned.reason));
    return absl::OkStatus();
  }
  for (const Refused& refused : kRefused) {
    if (refused.name != name) continue;
    if (value.is_number() && value.get<double>() == refused.off) return absl::OkStatus();
    return UnsupportedParameter(Where(name), Concat("'", Where(name), "' is not supported"));
  }
  if (strict) return InvalidValue(Where(name), Concat("unknown field '", Where(name), "'"));
  ++out.ignored_fields;
  return absl::OkStatus();
}

}  // namespace

absl::Status ConvertOllamaOptions(const Json& options, bool strict, OllamaRequest& out) {
  if (!options.is_object()) return InvalidValue("options", "'options' must be an object");
  for (const auto& [name, value] : options.items()) {
    if (value.is_null()) continue;
    MOESERVE_RETURN_IF_ERROR(ConvertOption(name, value, strict, out));
  }
  if (out.body.contains("repetition_penalty") && options.contains("repetition_penalty") &&
      options.contains("repeat_penalty")) {
    return InvalidValue("options.repeat_penalty",
                        "'options.repeat_penalty' and 'options.repetition_penalty' are the same: "
                        "send one of them");
  }
  return absl::OkStatus();
}

}  // namespace moeserve::server
