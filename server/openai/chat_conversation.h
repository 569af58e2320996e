// The messages of a chat request, and how to render them.
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
  bool allow_template = false;  // chat_template and chat_template_kwargs of a request
  bool strict_fields = false;   // unknown fields of a message are an error
};

struct Conversation {
  // Objects with "role" (system, developer, user or assistant), "content" (a string) and, if sent,
  // "name" (a string).
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  bool add_generation_prompt = true;
  bool continue_final_message = false;
  bool add_special_tokens = false;
  std::optional<std::string> chat_template;  // replaces the model's
  nlohmann::ordered_json template_variables = nlohmann::ordered_json::object();
  int ignored_fields = 0;  // of messages
};

// The fields that ParseConversation reads.
std::span<const std::string_view> ConversationFields();

// The error names the field.
Result<Conversation> ParseConversation(const nlohmann::json& body, const ConversationRules& rules);

}  // namespace moeserve::server
