// Splits the text of a chat answer, while it is generated, into reasoning, content and calls of
// tools.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/tools/call_syntax.h"
#include "server/tools/tool_parameters.h"

namespace moeserve::server {

// A part of a call. Only the first part of a call has `id` and `name`; the arguments of a call are
// those of all its parts, joined.
struct ToolCallDelta {
  int index = 0;  // of the call in its answer
  std::string id;
  std::string name;
  std::string arguments;  // a part of the JSON text
};

struct AssistantDelta {
  std::string reasoning;
  std::string content;
  std::vector<ToolCallDelta> calls;

  bool empty() const { return reasoning.empty() && content.empty() && calls.empty(); }
  // Adds `delta`, which comes after this part. Parts of one call are joined.
  void Append(AssistantDelta delta);
};

// How the answers to one request are split.
struct SplitRules {
  // Never null. Calls are recognised only if `has_tools`.
  const CallSyntax* syntax = nullptr;
  bool has_tools = false;
  // The tools whose calls are recognised; null: calls of any name are.
  std::shared_ptr<const OfferedTools> tools = nullptr;
  // Whether the answer may begin with reasoning between kThinkTags, and whether the prompt ends
  // within it.
  bool reasons = false;
  bool begins_in_reasoning = false;
  // Whether the chat template can show one call of a message only.
  bool single_call = false;

  // Whether answers must be split at all.
  bool needed() const { return has_tools || reasons || syntax->has_channels; }
};

// Splits one answer. Text that could be the start of a tag is held back until it is known. Takes
// time proportional to the text. One thread at a time.
class AnswerSplitter {
 public:
  // `call_id` returns the id of the call with the given index.
  static std::unique_ptr<AnswerSplitter> Make(const SplitRules& rules,
                                              std::function<std::string(int)> call_id);
  virtual ~AnswerSplitter() = default;

  virtual AssistantDelta Push(std::string_view text) = 0;
  // Returns what was held back. Push() must not be called afterwards.
  virtual AssistantDelta Finish() = 0;
  // Returns the number of calls that have begun.
  virtual int calls() const = 0;
};

}  // namespace moeserve::server
