// A chat with a model in this process.
#pragma once

#include <memory>

#include "base/status.h"
#include "server/commands/chat/chat_model.h"
#include "server/commands/model_options.h"

namespace moeserve::server {

struct LocalChatOptions {
  ModelOptionsText model;
  EngineOptionsText engine;
  std::string chat_template;  // path of a file; empty: the model's
  bool completion = false;    // continue plain text, which needs no template
  int max_tokens = 512;       // of an answer, unless the settings have another number
};

// Loads the model. FailedPrecondition if it has no usable chat template and needs one.
Result<std::unique_ptr<ChatModel>> StartLocalChat(const LocalChatOptions& options);

}  // namespace moeserve::server
