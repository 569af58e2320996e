#include "server/http/routes/request_body.h"

#include <algorithm>
#include <string>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "server/base/api_error.h"

namespace moeserve::server::http {

Body::~Body() { ClearJson(json_); }

Result<Body> ParseBody(std::string_view text, const Request& request, ServerContext& context) {
  MemoryCharge charge(context.memory());
  const size_t body_bytes = request.memory != nullptr ? request.memory->bytes() : 0;
  absl::Status charged;
  JsonLimits json_limits;
  json_limits.max_depth = context.settings().limits.json_depth;
  json_limits.max_values = size_t{8} << 20;  // no real limit: the limits on bytes are stricter
  const TakeMemory take_memory = [&](size_t bytes) {
    charged = charge.Add(bytes, ChargeFor::kNewRequest, body_bytes);
    return charged.ok();
  };
  Result<Json> body = ParseStrictJson(text, json_limits, take_memory);
  if (body.ok()) {
    if (!body->is_object()) {
      return MakeError(absl::StatusCode::kInvalidArgument, "invalid_json",
                       "the body must be a JSON object");
    }
    return Body(*std::move(body), std::move(charge));
  }
  if (!charged.ok()) return charged;
  // Cut off the part of the message in which the parser quotes the input, because that can be part
  // of a prompt.
  std::string message(body.status().message());
  message.resize(std::min(message.size(), message.find("; last read")));
  return MakeError(absl::StatusCode::kInvalidArgument, "invalid_json",
                   Concat("the body is not acceptable JSON: ", message));
}

void CountRefusal(const absl::Status& status, const Response& response, const ApiKey* key,
                  ServerContext& context) {
  if (key != nullptr && ApiCode(status) == "permission_denied") key->Count(KeyRefusal::kScope);
  if (response.status < 500 && response.status != 429) {
    context.metrics().CountRejected(Rejection::kInvalid);
  } else if (context.state() == ServerState::kDraining) {
    context.metrics().CountRejected(Rejection::kDraining);
  }
}

}  // namespace moeserve::server::http
