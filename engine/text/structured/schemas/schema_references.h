// References between schemas of one document.
#pragma once

#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "base/status.h"

namespace moeserve::structured {

// The identifiers ($id) and anchors in a document. Nothing is ever loaded from
// a file or an address.
class SchemaReferences {
 public:
  // `root` must outlive this object.
  explicit SchemaReferences(const nlohmann::json& root);

  struct Target {
    const nlohmann::json* schema = nullptr;
    std::string path;  // JSON pointer from the root; "" if it is not known
    int steps = 0;     // number of steps of the pointer
  };
  // Resolves `reference`, which stands in `schema`. The error says what is
  // wrong, not where.
  Result<Target> Resolve(const nlohmann::json* schema, const std::string& reference) const;

  // Whether the document declares a draft of JSON Schema up to draft 7, in
  // which keywords beside $ref have no effect.
  bool ref_stands_alone() const { return ref_stands_alone_; }

 private:
  // Records the identifiers in `schema` and the schemas in it. `base` is the
  // URI of the resource around it.
  void Collect(const nlohmann::json& schema, const std::string* base, const std::string& path);

  struct Resource {
    const nlohmann::json* schema;
    std::string path;
  };
  const nlohmann::json& root_;
  bool ref_stands_alone_ = false;
  const char* id_keyword_ = "$id";             // of the declared draft
  std::map<std::string, Resource> resources_;  // by URI
  std::map<std::string, Resource> anchors_;    // by URI and fragment
  std::deque<std::string> uris_;
  std::map<const nlohmann::json*, const std::string*> bases_;  // point into uris_
};

}  // namespace moeserve::structured
