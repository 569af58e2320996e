// The bodies of requests that compute something of texts.
#pragma once

#include "base/status.h"
#include "server/base/json.h"
#include "server/encode/encode_job.h"
#include "server/fields/request_fields.h"
#include "server/generation/generation_params.h"

namespace moeserve::server {

// Parses the body of a request to `route`, one of kEmbeddings to kFillMask. An error names the
// field. NotFound for a model that is not served; InvalidArgument, with API error code
// "unsupported_task", for a task that the model does not have. `returns_documents`: what a ranking
// does by default.
Result<EncodeJob> ParseEncode(const Json& body, FieldRoute route, const RequestRules& rules,
                              const EncodeModel& model, bool returns_documents);

}  // namespace moeserve::server
