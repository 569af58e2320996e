// How models that write every parameter of a call as an element of its own write the values.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"
#include "server/tools/tool_definitions.h"

namespace moeserve::server {

// What the schema of a parameter says about its value.
enum class ParameterKind {
  kString,  // always a string, written without quotes and escapes
  kJson,    // never a string, written as JSON
  kAny,     // JSON if the text is that of a value other than a string, else a string
};

// A tool whose calls are recognised in answers.
struct OfferedTool {
  std::string name;
  std::map<std::string, ParameterKind> parameters;  // others are kAny
};
using OfferedTools = std::vector<OfferedTool>;

// Returns the kind of values of a schema. `root` is the schema that references point into.
ParameterKind KindOf(const nlohmann::ordered_json& schema, const nlohmann::ordered_json& root);

// Returns what an AnswerSplitter needs to know about tools.
std::shared_ptr<const OfferedTools> Offered(const std::vector<Tool>& tools);

// Returns the JSON value of a parameter that the model wrote as `text`.
std::string ParameterJson(ParameterKind kind, std::string_view text);

// Returns `text` as a part of a JSON string, without quotes. Works for parts of characters, too.
std::string EscapedPart(std::string_view text);

}  // namespace moeserve::server
