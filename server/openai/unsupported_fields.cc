#include "server/openai/unsupported_fields.h"

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

absl::Status CheckUnsupportedFields(const Json& body) {
  for (const Field& field : kFields) {
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
