// The fields of a JSON body that determine how tokens are sampled.
#pragma once

#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/base/json.h"
#include "server/generation/generation_params.h"

namespace moeserve::server {

// Reads the numbers and flags of engine/sampling_params.h, `seed`, `stop`, `stop_token_ids`,
// `logit_bias`, `allowed_token_ids` and `bad_words`. Absent fields get the default of the model or
// of the API. An error names the field.
absl::Status ParseSamplingFields(const Json& body, const RequestRules& rules, SamplingParams& out);

// Returns the names of the fields that ParseSamplingFields() reads.
std::vector<std::string_view> SamplingFields();

}  // namespace moeserve::server
