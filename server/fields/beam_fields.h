// The fields of a JSON body about beam search.
#pragma once

#include "absl/status/status.h"
#include "server/base/json.h"
#include "server/generation/generation_params.h"

namespace moeserve::server {

// Reads use_beam_search, num_beams, length_penalty and early_stopping, after all other fields about
// sampling and the number of tokens. InvalidArgument, naming the field, if one of the last three
// has an effect only with the first, or if others contradict it.
absl::Status ParseBeamFields(const Json& body, const RequestRules& rules, GenerationParams& out);

}  // namespace moeserve::server
