// The constraint that makes every call of a tool valid.
#pragma once

#include <optional>

#include "engine/text/structured/constraint.h"
#include "server/tools/answer_splitter.h"
#include "server/tools/tool_definitions.h"

namespace moeserve::server {

// Returns the constraint for answers to a request with tools: wherever the model begins a call, it
// completes the call of a callable tool, with arguments that match the tool's schema. Depending on
// `settings.choice`, the answer may also have text, or it consists of calls. Reasoning may come
// first in any case. `settings` must be enabled. If the model may choose and `text` is set, an
// answer without calls matches `text`, and an answer with calls has no other text.
ConstraintSpec ToolConstraint(const ToolSettings& settings, const SplitRules& rules,
                              const std::optional<ConstraintSpec>& text);

}  // namespace moeserve::server
