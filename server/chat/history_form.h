// The form in which a chat template expects the earlier messages of the assistant. Templates differ
// in it, and do not declare it, so it is found by rendering short conversations.
#pragma once

#include <string>
#include <vector>

#include "engine/text/chat/chat_template.h"
#include "server/base/json.h"

namespace moeserve::server {

struct HistoryForm {
  // Whether the content of a message that has only calls is null, because the template does not
  // show the calls otherwise. By default it is an empty string.
  bool null_content = false;
  // Whether the arguments of calls are JSON text, because the template joins them with text. By
  // default they are objects.
  bool text_arguments = false;
  // Whether the template refuses a message with calls that has both content and reasoning, so that
  // the content is appended to the reasoning.
  bool joins_reasoning = false;
  // Whether the template refuses a message with several calls, so that an answer may have one.
  bool single_call = false;
  // Names under which the template reads reasoning, besides "reasoning_content".
  std::vector<const char*> reasoning_names;
};

// Finds the form that `compiled` expects. The result depends on the template alone. `variables` are
// special tokens. Takes less than a slow template takes to render once; mostly a millisecond.
HistoryForm FindHistoryForm(const chat::ChatTemplate& compiled, const OrderedJson& variables);

// Changes messages from the form that ParseMessage() describes to `form`. `argument_texts` are the
// texts of the arguments of all calls, in their order.
void ApplyHistoryForm(const HistoryForm& form, const std::vector<std::string>& argument_texts,
                      OrderedJson& messages);

}  // namespace moeserve::server
