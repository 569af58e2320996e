#pragma once

#include <nlohmann/json.hpp>

#include "server/answers/answer.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// Returns the response 200 with `body`.
inline Response JsonResponse(const nlohmann::ordered_json& body) {
  Response response;
  response.body = DumpJson(body);
  return response;
}

}  // namespace moeserve::server::http
