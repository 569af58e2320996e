#include "engine/text/structured/schemas/schema_references.h"

#include <absl/algorithm/container.h>

#include <algorithm>
#include <string_view>

#include "base/error_text.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Keywords whose value is a schema, a map of schemas, or a list of schemas. Of
// those that can be several of these, the type of the value decides.
constexpr std::string_view kSchemaKeywords[] = {"additionalProperties",
                                                "additionalItems",
                                                "items",
                                                "contains",
                                                "propertyNames",
                                                "not",
                                                "if",
                                                "then",
                                                "else",
                                                "unevaluatedItems",
                                                "unevaluatedProperties"};
constexpr std::string_view kMapKeywords[] = {"properties",  "patternProperties", "$defs",
                                             "definitions", "dependentSchemas",  "dependencies"};
constexpr std::string_view kListKeywords[] = {"allOf", "anyOf", "oneOf", "prefixItems", "items"};

bool HasScheme(std::string_view uri) {
  const size_t colon = uri.find(':');
  return colon != uri.npos && colon > 0 && uri.substr(0, colon).find_first_of("/?#") == uri.npos;
}

// Resolves a reference against a base URI, both without fragments. Does not
// remove "." and "..".
std::string ResolveUri(const std::string& base, const std::string& reference) {
  if (reference.empty()) return base;
  if (HasScheme(reference)) return reference;
  const size_t scheme = HasScheme(base) ? base.find(':') + 1 : 0;
  if (reference.starts_with("//")) return base.substr(0, scheme) + reference;
  size_t path = scheme;
  if (base.substr(scheme).starts_with("//")) {
    path = std::min(base.find('/', scheme + 2), base.size());
  }
  if (reference[0] == '/') return base.substr(0, path) + reference;
  const size_t slash = base.rfind('/');
  if (slash == base.npos || slash < path) {
    return base.substr(0, path) + (path > scheme ? "/" : "") + reference;
  }
  return base.substr(0, slash + 1) + reference;
}

std::string PercentDecoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && HexDigit(text[i + 1]) >= 0 &&
        HexDigit(text[i + 2]) >= 0) {
      out += static_cast<char>(16 * HexDigit(text[i + 1]) + HexDigit(text[i + 2]));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

// Follows one step of a JSON pointer; null if it leads nowhere.
const json* Follow(const json& at, const std::string& step) {
  if (at.is_object()) {
    const auto it = at.find(step);
    return it == at.end() ? nullptr : &*it;
  }
  const bool index =
      at.is_array() && !step.empty() && step.size() < 6 &&
      std::all_of(step.begin(), step.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!index || std::stoul(step) >= at.size()) return nullptr;
  return &at[std::stoul(step)];
}

// Paths serve error messages, so long ones are cut.
std::string Extended(const std::string& path, const std::string& step) {
  constexpr size_t kLongPath = 500;
  return path.size() > kLongPath ? path : path + "/" + step.substr(0, 64);
}

// Longer identifiers are ignored, to limit the memory for the URIs.
constexpr size_t kLongUri = 4000;

Status LeadsNowhere(const std::string& reference) {
  return absl::InvalidArgumentError("$ref \"" + reference.substr(0, 64) + "\" leads nowhere");
}

}  // namespace

SchemaReferences::SchemaReferences(const json& root) : root_(root) {
  if (root.is_object()) {
    const auto it = root.find("$schema");
    if (it != root.end() && it->is_string()) {
      const auto& text = it->get_ref<const std::string&>();
      for (const char* draft : {"/draft-03/", "/draft-04/", "/draft-06/", "/draft-07/"}) {
        ref_stands_alone_ |= text.find(draft) != text.npos;
      }
      for (const char* draft : {"/draft-03/", "/draft-04/"}) {
        if (text.find(draft) != text.npos) id_keyword_ = "id";
      }
    }
  }
  uris_.emplace_back();
  Collect(root, &uris_.back(), "");
}

void SchemaReferences::Collect(const json& schema, const std::string* base,
                               const std::string& path) {
  if (!schema.is_object()) return;
  const auto text = [&](const char* key) -> std::string {
    const auto it = schema.find(key);
    return it != schema.end() && it->is_string() ? it->get<std::string>() : "";
  };
  const std::string id = text(id_keyword_);
  const size_t hash = std::min(id.find('#'), id.size());
  if (hash > 0 && id.size() + base->size() <= kLongUri) {
    uris_.push_back(ResolveUri(*base, id.substr(0, hash)));
    base = &uris_.back();
    resources_.try_emplace(*base, Resource{&schema, path});
  }
  const std::string& here = *base;
  // Up to draft 7, an $id that is a fragment is an anchor.
  if (hash + 1 < id.size()) anchors_.try_emplace(here + id.substr(hash), Resource{&schema, path});
  const std::string anchor = text("$anchor");
  if (!anchor.empty()) anchors_.try_emplace(here + "#" + anchor, Resource{&schema, path});
  bases_[&schema] = base;
  if (&schema == &root_) resources_.try_emplace("", Resource{&schema, path});
  for (const auto& [key, value] : schema.items()) {
    if (value.is_object() && absl::c_linear_search(kSchemaKeywords, key)) {
      Collect(value, base, Extended(path, key));
    } else if (value.is_object() && absl::c_linear_search(kMapKeywords, key)) {
      for (const auto& [name, child] : value.items()) {
        Collect(child, base, Extended(Extended(path, key), name));
      }
    } else if (value.is_array() && absl::c_linear_search(kListKeywords, key)) {
      for (size_t i = 0; i < value.size(); ++i) {
        Collect(value[i], base, Extended(Extended(path, key), std::to_string(i)));
      }
    }
  }
}

Result<SchemaReferences::Target> SchemaReferences::Resolve(const json* schema,
                                                           const std::string& reference) const {
  const auto base = bases_.find(schema);
  const auto root_base = bases_.find(&root_);
  const size_t hash = std::min(reference.find('#'), reference.size());
  const std::string uri = ResolveUri(base != bases_.end()        ? *base->second
                                     : root_base != bases_.end() ? *root_base->second
                                                                 : "",
                                     reference.substr(0, hash));
  const std::string fragment =
      PercentDecoded(std::string_view(reference).substr(std::min(hash + 1, reference.size())));
  Target out;
  if (!fragment.empty() && fragment[0] != '/') {
    const auto it = anchors_.find(uri + "#" + fragment);
    if (it == anchors_.end()) return LeadsNowhere(reference);
    out.schema = it->second.schema;
    out.path = it->second.path;
    out.steps = static_cast<int>(std::count(out.path.begin(), out.path.end(), '/'));
    return out;
  }
  const auto resource = resources_.find(uri);
  if (resource == resources_.end()) {
    return absl::InvalidArgumentError(
        "$ref must point into this schema, as in #/$defs/name; schemas are not "
        "loaded from files or "
        "addresses");
  }
  const json* at = resource->second.schema;
  for (size_t pos = 0; pos < fragment.size();) {
    const size_t end = std::min(fragment.find('/', pos + 1), fragment.size());
    std::string step;
    for (size_t i = pos + 1; i < end; ++i) {
      if (fragment[i] == '~' && i + 1 < end && (fragment[i + 1] == '0' || fragment[i + 1] == '1')) {
        step += fragment[++i] == '0' ? '~' : '/';
      } else {
        step += fragment[i];
      }
    }
    pos = end;
    at = Follow(*at, step);
    if (at == nullptr) return LeadsNowhere(reference);
  }
  if (!at->is_object() && !at->is_boolean()) {
    return absl::InvalidArgumentError("$ref \"" + reference.substr(0, 64) +
                                      "\" does not lead to a schema");
  }
  out.schema = at;
  out.path = resource->second.path + fragment;
  out.steps = static_cast<int>(std::count(out.path.begin(), out.path.end(), '/'));
  return out;
}

}  // namespace moeserve::structured
