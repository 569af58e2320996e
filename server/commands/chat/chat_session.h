// The conversation of `moeserve chat` and its commands.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/commands/chat/chat_model.h"

namespace moeserve::server {

struct ChatSessionOptions {
  bool completion = false;  // every line continues a text, instead of asking in a chat
  std::string system;       // the first message, unless empty
  ChatSettings settings;
};

// Replaces what could control a terminal (escape sequences and other control characters except
// line breaks and tabs) by '?'. `text` is valid UTF-8.
std::string ForTerminal(std::string_view text);

// Used by one thread. The model must outlive the session.
class ChatSession {
 public:
  // `write` shows a piece of text to the user. `cancelled` returns whether the user has asked to
  // end the answer.
  ChatSession(ChatModel& model, ChatSessionOptions options,
              std::function<void(std::string_view)> write, std::function<bool()> cancelled);

  // Handles one line: a command, or a message, whose answer is written. Returns false if the
  // session ends. Errors are written, and change nothing.
  bool Handle(const std::string& line);

 private:
  struct Entry;

  static const std::vector<Entry>& Commands();
  bool RunCommand(const std::string& line);
  void Ask(const std::string& text);
  void Help(const std::string& argument);
  void Clear(const std::string& argument);
  void System(const std::string& text);
  void Set(const std::string& argument);
  void Experts(const std::string& argument);
  void Save(const std::string& file);
  void Line(std::string_view text);

  ChatModel& model_;
  const bool completion_;
  const std::function<void(std::string_view)> write_;
  const std::function<bool()> cancelled_;
  ChatSettings settings_;
  std::string system_;
  std::vector<ChatMessage> messages_;  // without the system's message
  std::string text_;                   // that is continued
};

}  // namespace moeserve::server
