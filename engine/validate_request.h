// Checks of a request that do not depend on the engine's state.
#pragma once

#include "absl/status/status.h"
#include "engine/request.h"

namespace moeserve {

struct RequestLimits {
  int vocab_size = 0;
  int max_model_len = 0;
  bool has_tokenizer = false;
  bool routing_records = false;
  bool routing_control = false;
};

// Returns InvalidArgument with the field, what was expected and what was found if `request` exceeds
// a limit.
absl::Status ValidateRequest(const Request& request, const RequestLimits& limits);

}  // namespace moeserve
