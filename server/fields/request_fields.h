// The table of all request fields that this server or others know, and what every route does with
// each of them. No route ignores a field of the table: it obeys the field, or refuses it by name
// unless its value means the same as its absence.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/base/json.h"

namespace moeserve::server {

// The routes whose bodies have such fields. Routes of the Open Inference Protocol that generate are
// read as completions.
enum class FieldRoute : uint8_t {
  kCompletions,
  kChat,
  kResponses,
  kMessages,
  kCountTokens,  // POST /v1/messages/count_tokens
  kTokenize,
  kDetokenize,
  kOllamaChat,      // POST /api/chat
  kOllamaGenerate,  // POST /api/generate
  kEmbeddings,
  kPooling,
  kClassify,
  kScore,
  kRerank,
  kFillMask,
};
inline constexpr int kFieldRoutes = 15;

// Returns the path of the route, such as "/v1/completions".
std::string_view PathOf(FieldRoute route);

enum class FieldUse {
  kUnknown,  // the table has no such field
  kObeyed,   // the route's parser reads it, and refuses values that it cannot obey
  // The field cannot change the route's answer: a label, or a field about the generation where
  // nothing is generated.
  kNoEffect,
  kHint,     // a wish that this server cannot follow here; the answer has a warning
  kRefused,  // unless the value has no effect
};

FieldUse UseOf(std::string_view field, FieldRoute route);

// Returns the names of all fields of the table, in its order.
std::vector<std::string_view> KnownFields();

// What a body has beside the fields that its route obeys.
struct FieldFindings {
  int ignored = 0;                    // number of fields that nobody knows
  std::vector<std::string> warnings;  // about hints
};

// Checks the fields of the object `body`, which came to `route`. InvalidArgument, naming the field,
// for the first that the route refuses, with API error code "unsupported_parameter", or
// "invalid_value" if the value is invalid for every server. Unknown fields are an error if
// `strict`, else counted.
absl::Status CheckRequestFields(const Json& body, FieldRoute route, bool strict,
                                FieldFindings& out);

}  // namespace moeserve::server
