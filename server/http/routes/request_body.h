// The bodies of requests that have JSON, and the count of requests that were refused.
#pragma once

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "base/status.h"
#include "server/base/json.h"
#include "server/base/memory_budget.h"
#include "server/context.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// A parsed body, and the memory that it holds.
class Body {
 public:
  Body(Json json, MemoryCharge charge) : json_(std::move(json)), charge_(std::move(charge)) {}
  Body(Body&&) = default;
  Body& operator=(Body&&) = delete;
  ~Body();

  const Json& operator*() const { return json_; }
  size_t charged_bytes() const { return charge_.bytes(); }

 private:
  Json json_;
  MemoryCharge charge_;
};

// Parses `text`, which is the request's body or a part of it. InvalidArgument with code
// "invalid_json" unless it is a JSON object; ResourceExhausted if there is no memory for it.
Result<Body> ParseBody(std::string_view text, const Request& request, ServerContext& context);

// Counts a request that was refused with `status` and `response`. The engine and the limits of keys
// count their own refusals. `key` may be null.
void CountRefusal(const absl::Status& status, const Response& response, const ApiKey* key,
                  ServerContext& context);

}  // namespace moeserve::server::http
