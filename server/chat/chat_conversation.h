// Parses the messages of a chat request and the fields that select how they are rendered.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "nlohmann/json.hpp"
#include "server/base/limits.h"

namespace moeserve::server {

struct ConversationRules {
  RequestLimits limits;
  bool allow_template = false;  // whether a request may set chat_template and chat_template_kwargs
  bool strict_fields = false;   // whether unknown fields of a message are an error
};

struct Conversation {
  // Objects with "role" (system, developer, user or assistant), "content" (a string) and, if the
  // request has it, "name" (a string).
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  bool add_generation_prompt = true;
  bool continue_final_message = false;
  bool add_special_tokens = false;
  std::optional<std::string> chat_template;  // replaces the model's template
  nlohmann::ordered_json template_variables = nlohmann::ordered_json::object();
  int ignored_fields = 0;  // number of unknown fields in messages
};

// Returns the names of the fields that ParseConversation() reads.
std::span<const std::string_view> ConversationFields();

// Parses the conversation of a request. An error names the field.
Result<Conversation> ParseConversation(const nlohmann::json& body, const ConversationRules& rules);

}  // namespace moeserve::server
