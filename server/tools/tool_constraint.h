// The constraint of a chat answer: its parts in the order in which AnswerSplitter reads them.
#pragma once

#include <optional>

#include "engine/text/structured/constraint.h"
#include "server/tools/answer_splitter.h"
#include "server/tools/tool_definitions.h"

namespace moeserve::server {

// Returns the constraint for answers that are split by `rules`. Reasoning may come first and is
// free. If `rules` has tools, `settings` must be enabled: wherever the model begins a call, it
// completes the call of a callable tool, with arguments that match the tool's schema. Depending on
// `settings.choice`, the answer may also have text, or it consists of calls. If `text` is set, it
// describes the content of the answer; if the model may also choose calls, an answer without calls
// matches `text`, and an answer with calls has no other text. Without tools, `text` must be set.
ConstraintSpec AnswerConstraint(const ToolSettings& settings, const SplitRules& rules,
                                const std::optional<ConstraintSpec>& text);

}  // namespace moeserve::server
