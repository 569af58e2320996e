// The tools that a chat request offers to the model, and which of them the model may or must call.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/base/json.h"

namespace moeserve::server {

// A function that the client can run.
struct Tool {
  std::string name;
  // The JSON schema of the arguments, as text. Empty: any object.
  std::string parameters;
  bool strict = false;  // whether the schema must be enforced exactly or the request is refused
};

enum class ToolChoice {
  kNone,      // the model is not told about the tools
  kAuto,      // the model decides whether to call tools
  kRequired,  // the answer consists of at least one call
  kNamed,     // the answer is one call of the only tool of `callable`
};

struct ToolSettings {
  ToolChoice choice = ToolChoice::kNone;
  bool parallel = true;        // whether an answer may have several calls
  std::vector<Tool> callable;  // that the model may call; not empty unless `choice` is kNone
  // The list of tools for the chat template, with the members in the client's order. Contains all
  // tools of the request, also those that `tool_choice` excludes. Empty if `choice` is kNone.
  OrderedJson definitions = OrderedJson::array();

  bool enabled() const { return choice != ToolChoice::kNone; }
};

// The largest number of tools of a request, and the largest size of their JSON.
inline constexpr size_t kMaxTools = 128;
inline constexpr size_t kMaxToolBytes = size_t{256} << 10;

// Reads `tools`, `tool_choice` and `parallel_tool_calls` of `body`. `text` is the JSON from which
// `body` was parsed; the order of members is read from it. Errors name the field.
Result<ToolSettings> ParseTools(const Json& body, std::string_view text);

// Returns the names of the fields that ParseTools() reads.
std::vector<std::string_view> ToolFields();

// Returns whether `name` can be the name of a tool: 1 to 64 letters, digits, '_', '-' and '.'.
bool IsToolName(std::string_view name);

// Returns the text of `tools` in the request's body `text`, or nullopt if MemberText() does not
// find it. InvalidArgument if the tools have more than kMaxToolBytes.
Result<std::optional<std::string_view>> CheckToolBytes(const Json& tools, std::string_view text);

}  // namespace moeserve::server
