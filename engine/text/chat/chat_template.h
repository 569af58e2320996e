// Chat templates: the subset of Jinja with which checkpoints turn a conversation into a prompt.
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
  // A list of objects. The values of "role" are trusted, so the caller must have checked them; all
  // other strings are the client's.
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  // Objects of further variables: the server's own (bos_token, ...), and the client's.
  nlohmann::ordered_json trusted = nlohmann::ordered_json::object();
  nlohmann::ordered_json untrusted = nlohmann::ordered_json::object();
  std::time_t now = 0;  // for strftime_now()
  RenderLimits limits;
};

struct RenderedPrompt {
  std::string text;
  // The parts of the text that come from the template or from trusted variables; ascending,
  // disjoint. A special token counts only if it lies in one span.
  std::vector<TextSpan> trusted;
};

// A compiled template. Immutable: any number of threads may render at the same time.
class ChatTemplate {
 public:
  // InvalidArgument, with line and cause: not a template, or it uses a feature that is not
  // supported.
  static Result<std::unique_ptr<const ChatTemplate>> Compile(std::string_view source);
  ~ChatTemplate();

  // InvalidArgument: the template rejects the conversation (with the message of the template), or
  // the text exceeds max_output_bytes. FailedPrecondition: the template fails (line and cause) or
  // exceeds another limit.
  Result<RenderedPrompt> Render(const RenderInput& input) const;

  const std::string& source() const { return source_; }

 private:
  struct Tree;
  ChatTemplate();

  std::string source_;
  std::unique_ptr<const Tree> tree_;
};

}  // namespace moeserve::chat
