#pragma once

#include "base/status.h"
#include "server/answers/answer.h"
#include "server/base/json.h"
#include "server/http/error_response.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// Returns the response 200 with `body`.
inline Response JsonResponse(const OrderedJson& body) {
  Response response;
  response.body = DumpJson(body);
  return response;
}

// Returns the response 200 with the value of `body`, or the response that reports its error.
inline Response JsonOrError(const Result<OrderedJson>& body, ErrorBody* error_body = &ErrorJson) {
  return body.ok() ? JsonResponse(*body) : ErrorResponse(body.status(), error_body);
}

}  // namespace moeserve::server::http
