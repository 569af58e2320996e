#pragma once

#include "server/answers/answer.h"
#include "server/base/json.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// Returns the response 200 with `body`.
inline Response JsonResponse(const OrderedJson& body) {
  Response response;
  response.body = DumpJson(body);
  return response;
}

}  // namespace moeserve::server::http
