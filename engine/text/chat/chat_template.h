// Chat templates: the subset of Jinja that checkpoints use to turn a conversation into a prompt.
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

// Values of the type binary stand for integers beyond 64 bits: their bytes are the digits.
struct RenderInput {
  // A list of objects. The values of "role" count as trusted, so the caller must check them first;
  // all other strings come from the client and are untrusted.
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  // Objects with further variables: `trusted` ones from the server (bos_token, ...), `untrusted`
  // ones from the client.
  nlohmann::ordered_json trusted = nlohmann::ordered_json::object();
  nlohmann::ordered_json untrusted = nlohmann::ordered_json::object();
  std::time_t now = 0;  // the time that strftime_now() formats
  RenderLimits limits;
};

struct RenderedPrompt {
  std::string text;
  // The parts of the text that come from the template or from trusted variables; ascending,
  // disjoint. A special token in the text is only recognised if it lies within one of these spans.
  std::vector<TextSpan> trusted;
};

// A compiled template. Immutable: any number of threads may render at the same time.
class ChatTemplate {
 public:
  // Returns InvalidArgument, with line and cause, if `source` is no valid template or uses an
  // unsupported feature.
  static Result<std::unique_ptr<const ChatTemplate>> Compile(std::string_view source);
  ~ChatTemplate();

  // Errors: InvalidArgument if the template rejects the conversation (with the template's message)
  // or the text exceeds max_output_bytes; FailedPrecondition if the template fails (with line and
  // cause) or exceeds another limit.
  Result<RenderedPrompt> Render(const RenderInput& input) const;

  const std::string& source() const { return source_; }

 private:
  struct Tree;
  ChatTemplate();

  std::string source_;
  std::unique_ptr<const Tree> tree_;
};

}  // namespace moeserve::chat
