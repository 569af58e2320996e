// The bodies of POST /api/chat and POST /api/generate, the form of Ollama's API, converted to those
// of a chat or a completion.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/base/json.h"

namespace moeserve::server {

struct OllamaRequest {
  // The body of the chat request that generates the answer, or of the completion request.
  OrderedJson body = OrderedJson::object();
  bool completes = false;  // whether `body` is that of a completion
  // Whether there is nothing to generate: clients send such requests to have a model loaded.
  bool only_loads = false;
  int ignored_fields = 0;             // number of unknown fields
  std::vector<std::string> warnings;  // about fields that have no effect
};

// Returns the served name that `name` means: "NAME:latest" is NAME, unless it is served itself.
std::string ResolveOllamaName(const std::string& name, const std::vector<std::string>& served);

// Convert the body of a request to the model that is served as `model`. `body` was parsed from
// `text`, from which the order of members is read. An error names the field. What the new body has
// in common with this one is checked when it is parsed.
Result<OllamaRequest> ParseOllamaChat(const Json& body, std::string_view text,
                                      const std::string& model, bool strict_fields);
// `has_template`: whether the model has a chat template, which makes prompts conversations.
Result<OllamaRequest> ParseOllamaGenerate(const Json& body, std::string_view text,
                                          const std::string& model, bool has_template,
                                          bool strict_fields);

}  // namespace moeserve::server
