// The JSON fields about routing, and routes as JSON: which experts computed the tokens of a
// request, and how the request changed that.
#pragma once

#include <string>

#include "base/status.h"
#include "engine/routes/route_layout.h"
#include "engine/routes/routing_record.h"
#include "nlohmann/json.hpp"
#include "server/generation/routing_params.h"

namespace moeserve::server {

// Reads `return_routing`, `return_routed_experts` and `routing_control`. The error names the field;
// PermissionDenied: the operator does not allow it.
absl::Status ParseRoutingFields(const nlohmann::json& body, const RoutingRules& rules, bool stream,
                                RoutingParams& out);

// {"rows_per_token", "blocks": [{"layer", "block", "experts", "sub_tokens", "first_row"}]}
nlohmann::ordered_json RouteLayoutJson(const RouteLayout& layout);

// {"first_position", "tokens", "reused", "offsets", "experts", "weights"}; a record that begins
// with the prompt's first token has the "layout" in front.
nlohmann::ordered_json RoutingRecordJson(const RoutingRecord& record, const RouteLayout& layout);

// As the request stated it, experts in order.
nlohmann::ordered_json RoutingControlJson(const RoutingChange& change);

// Base64 of an .npy array of unsigned integers [tokens, layers, k]: the ids of the experts of every
// token that the model has seen, 0 in layers that do not route. Every row has equally many experts
// (ParseRoutingFields sees to that).
std::string RoutedExpertsTable(const RoutingRecord& record, const RouteLayout& layout,
                               int num_layers);

}  // namespace moeserve::server
