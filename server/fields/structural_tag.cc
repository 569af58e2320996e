#include "server/fields/structural_tag.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

using FormatKind = TextFormat::Kind;

// Largest nesting of formats; limits the use of the stack.
constexpr int kMaxNesting = 16;
constexpr size_t kMaxStringBytes = 1 << 20;

// Returns an error if `object` has a field that is not in `known`.
absl::Status CheckFields(const Json& object, const std::string& param,
                         std::initializer_list<std::string_view> known) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string field = Concat(param, ".", Printable(name, 64));
    return UnsupportedParameter(field, Concat("'", field, "' is not supported"));
  }
  return absl::OkStatus();
}

Result<std::string> Text(const Json& object, const char* name, const std::string& param,
                         std::optional<std::string> otherwise = std::nullopt) {
  const std::string field = Concat(param, ".", name);
  const Json* value = FindField(object, name);
  if (value == nullptr) {
    if (otherwise.has_value()) return *std::move(otherwise);
    return MissingField(field);
  }
  if (!value->is_string()) return InvalidValue(field, Concat("'", field, "' must be a string"));
  return value->get<std::string>();
}

Result<bool> Flag(const Json& object, const char* name, const std::string& param) {
  const Json* value = FindField(object, name);
  if (value == nullptr) return false;
  if (value->is_boolean()) return value->get<bool>();
  const std::string field = Concat(param, ".", name);
  return InvalidValue(field, Concat("'", field, "' must be a boolean"));
}

// Returns the elements of a list that is not empty.
Result<const Json*> List(const Json& object, const char* name, const std::string& param) {
  const std::string field = Concat(param, ".", name);
  const Json* value = FindField(object, name);
  if (value == nullptr) return MissingField(field);
  if (value->is_array() && !value->empty()) return value;
  return InvalidValue(field, Concat("'", field, "' must be a list that is not empty"));
}

// Returns a list of texts, neither the list nor a text empty.
Result<std::vector<std::string>> Texts(const Json& object, const char* name,
                                       const std::string& param) {
  MOESERVE_ASSIGN_OR_RETURN(const Json* list, List(object, name, param));
  std::vector<std::string> out;
  for (const Json& item : *list) {
    if (!item.is_string() || item.get_ref<const std::string&>().empty()) {
      const std::string field = Concat(param, ".", name);
      return InvalidValue(field, Concat("'", field, "' must be a list of strings, none empty"));
    }
    out.push_back(item.get<std::string>());
  }
  return out;
}

Result<TextFormat> Schema(const Json& object, const char* name, const std::string& param) {
  const Json* value = FindField(object, name);
  const std::string field = Concat(param, ".", name);
  if (value == nullptr) return MissingField(field);
  TextFormat out;
  out.kind = FormatKind::kJsonSchema;
  out.closed_objects = true;
  if (value->is_string()) {
    out.text = value->get<std::string>();
  } else if (value->is_object() || value->is_boolean()) {
    out.text = value->dump();
  } else {
    return InvalidValue(field, Concat("'", field, "' must be a JSON schema"));
  }
  return out;
}

class Reader {
 public:
  Result<TextFormat> Read(const Json& value, const std::string& param, int depth) {
    if (depth > kMaxNesting) {
      return InvalidValue(param, Concat("'", param, "' is nested deeper than ", kMaxNesting));
    }
    if (!value.is_object()) return InvalidValue(param, Concat("'", param, "' must be an object"));
    MOESERVE_ASSIGN_OR_RETURN(const std::string type, Text(value, "type", param));
    if (type == "const_string") return Plain(value, param, "value", FormatKind::kText);
    if (type == "regex") return Plain(value, param, "pattern", FormatKind::kRegex);
    if (type == "grammar") return Plain(value, param, "grammar", FormatKind::kGrammar);
    if (type == "any_text") {
      MOESERVE_RETURN_IF_ERROR(CheckFields(value, param, {"type", "excludes"}));
      TextFormat out;
      if (FindField(value, "excludes") != nullptr) {
        MOESERVE_ASSIGN_OR_RETURN(out.excluded, Texts(value, "excludes", param));
      }
      return out;
    }
    if (type == "json_schema") {
      MOESERVE_RETURN_IF_ERROR(CheckFields(value, param, {"type", "json_schema"}));
      return Schema(value, "json_schema", param);
    }
    if (type == "sequence" || type == "or") return Parts(value, param, depth, type);
    if (type == "tag") {
      // A single tag: exactly one, without free text.
      MOESERVE_ASSIGN_OR_RETURN(StructuralTag tag, Tag(value, param, depth));
      StructuralTags tags;
      tags.tags.push_back(std::move(tag));
      tags.free_text = false;
      tags.at_least_one = true;
      tags.max_tags = 1;
      return Wrap(std::move(tags));
    }
    if (type == "triggered_tags") {
      MOESERVE_RETURN_IF_ERROR(CheckFields(
          value, param,
          {"type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"}));
      MOESERVE_ASSIGN_OR_RETURN(StructuralTags tags, Tags(value, param, depth));
      MOESERVE_ASSIGN_OR_RETURN(tags.triggers, Texts(value, "triggers", param));
      if (FindField(value, "excludes") != nullptr) {
        MOESERVE_ASSIGN_OR_RETURN(tags.excluded, Texts(value, "excludes", param));
      }
      MOESERVE_ASSIGN_OR_RETURN(tags.stop_after_first, Flag(value, "stop_after_first", param));
      return Wrap(std::move(tags));
    }
    if (type == "tags_with_separator") {
      MOESERVE_RETURN_IF_ERROR(CheckFields(
          value, param, {"type", "tags", "separator", "at_least_one", "stop_after_first"}));
      MOESERVE_ASSIGN_OR_RETURN(StructuralTags tags, Tags(value, param, depth));
      MOESERVE_ASSIGN_OR_RETURN(tags.separator, Text(value, "separator", param));
      MOESERVE_ASSIGN_OR_RETURN(const bool one, Flag(value, "stop_after_first", param));
      tags.free_text = false;
      tags.max_tags = one ? 1 : 0;
      return Wrap(std::move(tags));
    }
    return UnsupportedParameter(
        param + ".type",
        Concat("'", param,
               ".type' must be const_string, any_text, json_schema, regex, grammar, "
               "sequence, or, tag, triggered_tags or tags_with_separator, found ",
               Quoted(type, 64)));
  }

 private:
  static TextFormat Wrap(StructuralTags tags) {
    TextFormat out;
    out.kind = FormatKind::kTags;
    out.tags = std::make_shared<const StructuralTags>(std::move(tags));
    return out;
  }

  static Result<TextFormat> Plain(const Json& value, const std::string& param, const char* name,
                                  FormatKind kind) {
    MOESERVE_RETURN_IF_ERROR(CheckFields(value, param, {"type", name}));
    TextFormat out;
    out.kind = kind;
    MOESERVE_ASSIGN_OR_RETURN(out.text, Text(value, name, param));
    return out;
  }

  Result<TextFormat> Parts(const Json& value, const std::string& param, int depth,
                           const std::string& type) {
    MOESERVE_RETURN_IF_ERROR(CheckFields(value, param, {"type", "elements"}));
    MOESERVE_ASSIGN_OR_RETURN(const Json* list, List(value, "elements", param));
    TextFormat out;
    out.kind = type == "or" ? FormatKind::kAnyOf : FormatKind::kSequence;
    for (size_t i = 0; i < list->size(); ++i) {
      MOESERVE_ASSIGN_OR_RETURN(out.parts.emplace_back(),
                                Read((*list)[i], Concat(param, ".elements[", i, "]"), depth + 1));
    }
    return out;
  }

  Result<StructuralTag> Tag(const Json& value, const std::string& param, int depth) {
    if (!value.is_object()) return InvalidValue(param, Concat("'", param, "' must be an object"));
    MOESERVE_RETURN_IF_ERROR(CheckFields(value, param, {"type", "begin", "content", "end"}));
    StructuralTag out;
    MOESERVE_ASSIGN_OR_RETURN(out.begin, Text(value, "begin", param));
    // XGrammar accepts a list of ends, too.
    const Json* end = FindField(value, "end");
    if (end != nullptr && end->is_array()) {
      if (end->size() != 1 || !(*end)[0].is_string()) {
        return UnsupportedParameter(
            param + ".end", Concat("'", param, ".end' must be a string or a list of one string"));
      }
      out.end = (*end)[0].get<std::string>();
    } else {
      MOESERVE_ASSIGN_OR_RETURN(out.end, Text(value, "end", param));
    }
    const Json* content = FindField(value, "content");
    if (content == nullptr) return MissingField(param + ".content");
    MOESERVE_ASSIGN_OR_RETURN(out.content, Read(*content, param + ".content", depth + 1));
    return out;
  }

  Result<StructuralTags> Tags(const Json& value, const std::string& param, int depth) {
    MOESERVE_ASSIGN_OR_RETURN(const Json* list, List(value, "tags", param));
    StructuralTags out;
    for (size_t i = 0; i < list->size(); ++i) {
      MOESERVE_ASSIGN_OR_RETURN(out.tags.emplace_back(),
                                Tag((*list)[i], Concat(param, ".tags[", i, "]"), depth + 1));
    }
    MOESERVE_ASSIGN_OR_RETURN(out.at_least_one, Flag(value, "at_least_one", param));
    return out;
  }
};

// Reads the older form of vLLM.
Result<ConstraintSpec> Structures(const Json& value, const std::string& param) {
  MOESERVE_RETURN_IF_ERROR(CheckFields(value, param, {"type", "structures", "triggers"}));
  MOESERVE_ASSIGN_OR_RETURN(const Json* list, List(value, "structures", param));
  StructuralTags tags;
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& item = (*list)[i];
    const std::string place = Concat(param, ".structures[", i, "]");
    if (!item.is_object()) return InvalidValue(place, Concat("'", place, "' must be an object"));
    MOESERVE_RETURN_IF_ERROR(CheckFields(item, place, {"begin", "schema", "end"}));
    StructuralTag tag;
    MOESERVE_ASSIGN_OR_RETURN(tag.begin, Text(item, "begin", place));
    MOESERVE_ASSIGN_OR_RETURN(tag.end, Text(item, "end", place));
    if (FindField(item, "schema") == nullptr) {
      tag.content.kind = FormatKind::kJsonObject;
    } else {
      MOESERVE_ASSIGN_OR_RETURN(tag.content, Schema(item, "schema", place));
    }
    tags.tags.push_back(std::move(tag));
  }
  MOESERVE_ASSIGN_OR_RETURN(tags.triggers, Texts(value, "triggers", param));
  return TagsConstraint(std::move(tags));
}

}  // namespace

void SpellSchemas(OrderedJson& value) {
  if (value.is_object()) {
    for (auto& [name, member] : value.items()) {
      const bool schema = name == "json_schema" || name == "schema";
      if (schema && member.is_object()) {
        member = DumpOrdered(member);
      } else {
        SpellSchemas(member);
      }
    }
  } else if (value.is_array()) {
    for (OrderedJson& item : value) SpellSchemas(item);
  }
}

Result<ConstraintSpec> StructuralTagSpec(const Json& value, const std::string& param) {
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (text.size() > kMaxStringBytes) {
      return InvalidValue(param,
                          Concat("'", param, "' is longer than ", kMaxStringBytes, " bytes"));
    }
    // Formats and schemas inside them are nested less deep than this.
    constexpr int kMaxDepth = 400;
    OrderedJson parsed = ParseOrdered(text, kMaxDepth);
    if (!parsed.is_object()) {
      return InvalidValue(param, Concat("'", param, "' must be a JSON object"));
    }
    SpellSchemas(parsed);
    return StructuralTagSpec(Json(std::move(parsed)), param);
  }
  if (!value.is_object()) return InvalidValue(param, Concat("'", param, "' must be an object"));
  if (FindField(value, "structures") != nullptr) return Structures(value, param);
  const Json* format = FindField(value, "format");
  if (format == nullptr) return MissingField(param + ".format");
  MOESERVE_RETURN_IF_ERROR(CheckFields(value, param, {"type", "format"}));
  ConstraintSpec out;
  out.kind = ConstraintSpec::Kind::kFormat;
  MOESERVE_ASSIGN_OR_RETURN(TextFormat read, Reader().Read(*format, param + ".format", 0));
  out.format = std::make_shared<const TextFormat>(std::move(read));
  return out;
}

}  // namespace moeserve::server
