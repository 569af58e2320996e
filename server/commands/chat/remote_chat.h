// A chat with a server that has the API of OpenAI.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "server/commands/chat/chat_model.h"

namespace moeserve::server {

struct RemoteChatOptions {
  std::string url;           // base URL, such as http://127.0.0.1:8080/v1
  std::string model;         // name at the server; empty: the first that it lists
  std::string api_key_file;  // its first key is sent; empty: none
  bool completion = false;   // continue plain text
  int max_tokens = 512;      // of an answer, unless the settings have another number
};

// Asks the server for its models unless `options` names one. Unavailable if nobody answers.
Result<std::unique_ptr<ChatModel>> ConnectRemoteChat(const RemoteChatOptions& options);

}  // namespace moeserve::server
