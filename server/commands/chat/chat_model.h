// What answers in `moeserve chat`: a model in this process, or a server.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moeserve::server {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

// Settings that the user has changed, by the names of the API (SamplingField, "max_tokens",
// "seed"). Values are in the fields' ranges.
using ChatSettings = std::map<std::string, double>;

struct ChatTurn {
  std::vector<ChatMessage> messages;  // a chat; the last one is the user's
  std::string text;                   // a text to continue, if `messages` is empty
  ChatSettings settings;
};

// Used by one thread.
class ChatModel {
 public:
  virtual ~ChatModel() = default;

  // Passes the answer to `on_text`, piece by piece; pieces are valid UTF-8. Returns OK at its end,
  // Cancelled soon after `cancelled` has returned true, or why there is no (complete) answer.
  virtual absl::Status Answer(const ChatTurn& turn,
                              const std::function<void(std::string_view)>& on_text,
                              const std::function<bool()>& cancelled) = 0;

  // Returns a text about the experts that computed the last answer.
  virtual Result<std::string> Experts() = 0;
};

}  // namespace moeserve::server
