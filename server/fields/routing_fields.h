// The JSON fields about routing: routing records (which experts computed the tokens of a request)
// and the routing override of a request.
#pragma once

#include <string>

#include "base/status.h"
#include "engine/routes/route_layout.h"
#include "engine/routes/routing_record.h"
#include "server/base/json.h"
#include "server/generation/routing_params.h"

namespace moeserve::server {

// Reads `return_routing`, `return_routed_experts`, `return_word_experts` and `routing_control`. An
// error names the field. PermissionDenied if the server's options do not allow the field.
absl::Status ParseRoutingFields(const Json& body, const RoutingRules& rules, bool stream,
                                RoutingParams& out);

// Returns {"rows_per_token", "blocks": [{"layer", "block", "experts", "sub_tokens", "first_row"}]}.
OrderedJson RouteLayoutJson(const RouteLayout& layout);

// Returns {"first_position", "tokens", "reused", "offsets", "experts", "weights"}. If the record
// begins with the prompt's first token, "layout" is the first member.
OrderedJson RoutingRecordJson(const RoutingRecord& record, const RouteLayout& layout);

// Returns the routing override as the request stated it.
OrderedJson RoutingControlJson(const RoutingChange& change);

// Returns the base64 text of an .npy array of unsigned integers [tokens, layers, k]: the ids of the
// selected experts for every token that the model has computed, 0 in layers without routing.
// Requires that every row of the record has equally many experts, which ParseRoutingFields() has
// checked.
std::string RoutedExpertsTable(const RoutingRecord& record, const RouteLayout& layout,
                               int num_layers);

}  // namespace moeserve::server
