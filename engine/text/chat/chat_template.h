// Chat templates: the subset of Jinja that checkpoints use to write a conversation as a prompt.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/text/chat/budget.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace moeserve::chat {

inline constexpr size_t kMaxTemplateBytes = size_t{1} << 20;

struct RenderInput {
  // A list of objects. What stands under "role" in them is taken for trusted, so the caller must
  // have checked it; all other strings come from the client.
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  // Objects of further variables: the server's own (bos_token, ...), and the client's.
  nlohmann::ordered_json trusted = nlohmann::ordered_json::object();
  nlohmann::ordered_json untrusted = nlohmann::ordered_json::object();
  std::time_t now = 0;  // for strftime_now()
  RenderLimits limits;
};

struct RenderedPrompt {
  std::string text;
  // Where the text comes from the template or from trusted variables; ascending, disjoint. Special
  // tokens may be recognised inside one span only.
  std::vector<TextSpan> trusted;
};

// A compiled template. Immutable: any number of threads may render at the same time.
class ChatTemplate {
 public:
  // InvalidArgument, naming line and cause: not a template, or one that uses what is not supported.
  static Result<std::unique_ptr<const ChatTemplate>> Compile(std::string_view source);
  ~ChatTemplate();

  // InvalidArgument: the template refuses the conversation (its own message, as it is), or the text
  // exceeds max_output_bytes. FailedPrecondition: the template fails (line and cause), or exceeds
  // another limit.
  Result<RenderedPrompt> Render(const RenderInput& input) const;

  const std::string& source() const { return source_; }

 private:
  struct Tree;
  ChatTemplate();

  std::string source_;
  std::unique_ptr<const Tree> tree_;
};

}  // namespace moeserve::chat
