#include "server/fields/structured_fields.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/json_text.h"
#include "server/fields/structural_tag.h"

namespace moeserve::server {
namespace {

using SpecKind = ConstraintSpec::Kind;

// Reads a JSON schema, which is sent as a JSON object or as a string that contains JSON.
Result<ConstraintSpec> SchemaSpec(const Json& value, const std::string& param) {
  ConstraintSpec spec;
  spec.kind = SpecKind::kJsonSchema;
  spec.closed_objects = true;
  if (value.is_string()) {
    spec.text = value.get<std::string>();
  } else if (value.is_object() || value.is_boolean()) {
    spec.text = DumpOrdered(value);
  } else {
    return InvalidValue(param, Concat("'", param, "' must be a JSON schema"));
  }
  return spec;
}

// Reads a pattern (kRegex) or a grammar (kGrammar).
Result<ConstraintSpec> PlainSpec(SpecKind kind, const Json& value, const std::string& param) {
  ConstraintSpec spec;
  spec.kind = kind;
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
    return InvalidValue(param, Concat("'", param, "' must be a string that is not empty"));
  }
  spec.text = value.get<std::string>();
  return spec;
}

Result<ConstraintSpec> RegexSpec(const Json& value, const std::string& param) {
  return PlainSpec(SpecKind::kRegex, value, param);
}

Result<ConstraintSpec> GrammarSpec(const Json& value, const std::string& param) {
  return PlainSpec(SpecKind::kGrammar, value, param);
}

Result<ConstraintSpec> ChoiceSpec(const Json& value, const std::string& param) {
  ConstraintSpec spec;
  spec.kind = SpecKind::kChoice;
  const bool strings =
      value.is_array() && !value.empty() &&
      std::all_of(value.begin(), value.end(), [](const Json& item) { return item.is_string(); });
  if (!strings) {
    return InvalidValue(param, Concat("'", param, "' must be a list of strings, not empty"));
  }
  for (const Json& item : value) spec.choices.push_back(item.get<std::string>());
  return spec;
}

bool IsSchemaName(std::string_view name) {
  return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
  });
}

Result<ConstraintSpec> NamedSchema(const Json& format) {
  const std::string param = "response_format.json_schema";
  const Json* named = FindField(format, "json_schema");
  if (named == nullptr) return MissingField(param);
  if (!named->is_object()) return InvalidValue(param, Concat("'", param, "' must be an object"));
  const Json* name = FindField(*named, "name");
  if (name == nullptr) return MissingField(param + ".name");
  if (!name->is_string() || !IsSchemaName(name->get_ref<const std::string&>())) {
    return InvalidValue(param + ".name",
                        Concat("'", param, ".name' must be 1 to 64 letters, digits, '_', '-'"));
  }
  const auto strict = BoolField(*named, "strict");
  if (!strict.ok()) {
    return InvalidValue(param + ".strict", Concat("'", param, ".strict' must be a boolean"));
  }
  const Json* schema = FindField(*named, "schema");
  if (schema == nullptr) return MissingField(param + ".schema");
  MOESERVE_ASSIGN_OR_RETURN(ConstraintSpec spec, SchemaSpec(*schema, param + ".schema"));
  spec.strict = strict->value_or(false);
  return spec;
}

Result<std::optional<ConstraintSpec>> ResponseFormat(const Json& format) {
  const Json* type = format.is_object() ? FindField(format, "type") : nullptr;
  if (type == nullptr || !type->is_string()) {
    return InvalidValue("response_format",
                        "'response_format' must be an object with a string 'type'");
  }
  const auto& name = type->get_ref<const std::string&>();
  if (name == "text") return std::optional<ConstraintSpec>();
  if (name == "json_object") return std::optional<ConstraintSpec>(ConstraintSpec());
  if (name == "json_schema") {
    MOESERVE_ASSIGN_OR_RETURN(ConstraintSpec spec, NamedSchema(format));
    return std::optional<ConstraintSpec>(std::move(spec));
  }
  if (name == "structural_tag") {
    MOESERVE_ASSIGN_OR_RETURN(ConstraintSpec spec, StructuralTagSpec(format, "response_format"));
    return std::optional<ConstraintSpec>(std::move(spec));
  }
  return UnsupportedParameter(
      "response_format.type",
      Concat("'response_format.type' must be text, json_object, json_schema or "
             "structural_tag, found ",
             Quoted(name, 64)));
}

// Replaces a schema by its text.
void Spell(OrderedJson& schema) {
  if (schema.is_object()) schema = DumpOrdered(schema);
}

// Returns field `name` of `body`, which was parsed from `text`. The schemas in it are replaced by
// their texts, which keep the order of properties. Returns the field as it is if `text` spells its
// name with escapes.
Json SpelledField(const Json& body, const char* name, std::string_view text) {
  const auto part = MemberText(text, name);
  OrderedJson value = part ? ParseOrdered(*part) : OrderedJson(OrderedJson::value_t::discarded);
  if (value.is_discarded()) return body[name];
  if (std::string_view(name) == "guided_json") {
    Spell(value);
  } else if (value.is_object()) {
    const std::string_view type = name == std::string_view("response_format") ? "json_schema" : "";
    for (auto& [key, member] : value.items()) {
      if (key == "json") {
        Spell(member);
      } else if (type.empty() || !member.is_object() || key != type) {
        SpellSchemas(member);
      } else if (const auto schema = member.find("schema"); schema != member.end()) {
        Spell(*schema);
      }
    }
  }
  return Json(std::move(value));
}

class Collector {
 public:
  // Adds the constraint of one field. Returns an error if another field has already set a
  // constraint.
  absl::Status Add(Result<ConstraintSpec> spec, const std::string& param) {
    if (!spec.ok()) return spec.status();
    if (found_) {
      return InvalidValue(param, Concat("'", param, "' and '", found_->param,
                                        "' both constrain the text: send one of them"));
    }
    found_ = ConstraintField{*std::move(spec), param};
    return absl::OkStatus();
  }
  std::optional<ConstraintField> Take() { return std::move(found_); }

 private:
  std::optional<ConstraintField> found_;
};

absl::Status StructuredOutputs(const Json& value, Collector& out) {
  const std::string base = "structured_outputs";
  if (!value.is_object()) return InvalidValue(base, "'structured_outputs' must be an object");
  for (const auto& [name, item] : value.items()) {
    if (item.is_null()) continue;
    const std::string param = Concat(base, ".", Printable(name, 64));
    absl::Status status;
    if (name == "json") {
      status = out.Add(SchemaSpec(item, param), param);
    } else if (name == "regex") {
      status = out.Add(RegexSpec(item, param), param);
    } else if (name == "grammar") {
      status = out.Add(GrammarSpec(item, param), param);
    } else if (name == "structural_tag") {
      status = out.Add(StructuralTagSpec(item, param), param);
    } else if (name == "choice") {
      status = out.Add(ChoiceSpec(item, param), param);
    } else if (name == "json_object") {
      if (!item.is_boolean()) return InvalidValue(param, Concat("'", param, "' must be a boolean"));
      if (item == true) status = out.Add(ConstraintSpec(), param);
    } else {
      status = UnsupportedParameter(param, Concat("'", param,
                                                  "' is not supported; expected json, "
                                                  "json_object, regex, choice, grammar or "
                                                  "structural_tag"));
    }
    MOESERVE_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

}  // namespace

Result<std::optional<ConstraintField>> ParseConstraint(const Json& body, std::string_view text) {
  Collector out;
  if (FindField(body, "response_format") != nullptr) {
    const Json format = SpelledField(body, "response_format", text);
    MOESERVE_ASSIGN_OR_RETURN(std::optional<ConstraintSpec> spec, ResponseFormat(format));
    if (spec) MOESERVE_RETURN_IF_ERROR(out.Add(*std::move(spec), "response_format"));
  }
  if (FindField(body, "structured_outputs") != nullptr) {
    MOESERVE_RETURN_IF_ERROR(
        StructuredOutputs(SpelledField(body, "structured_outputs", text), out));
  }
  if (FindField(body, "guided_json") != nullptr) {
    const Json value = SpelledField(body, "guided_json", text);
    MOESERVE_RETURN_IF_ERROR(out.Add(SchemaSpec(value, "guided_json"), "guided_json"));
  }
  if (const Json* value = FindField(body, "guided_regex")) {
    MOESERVE_RETURN_IF_ERROR(out.Add(RegexSpec(*value, "guided_regex"), "guided_regex"));
  }
  if (const Json* value = FindField(body, "guided_choice")) {
    MOESERVE_RETURN_IF_ERROR(out.Add(ChoiceSpec(*value, "guided_choice"), "guided_choice"));
  }
  if (const Json* value = FindField(body, "guided_grammar")) {
    MOESERVE_RETURN_IF_ERROR(out.Add(GrammarSpec(*value, "guided_grammar"), "guided_grammar"));
  }
  return out.Take();
}

}  // namespace moeserve::server
