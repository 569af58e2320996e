// The request fields about routing, and routes as JSON: which experts computed a request's tokens,
// and what the request may change about that.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "engine/routes/route_layout.h"
#include "engine/routes/routing_control.h"
#include "engine/routes/routing_record.h"
#include "engine/spec/spec.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

// What the operator and the model allow.
struct RoutingRules {
  bool records = false;  // requests may ask for their routes
  RoutingControlLimits control;
  const ModelSpec* spec = nullptr;      // lives as long as the engine
  const RouteLayout* layout = nullptr;  // likewise
};

struct RoutingParams {
  bool record = false;  // `return_routing`
  bool table = false;   // `return_routed_experts`: the record as a table of ids
  std::shared_ptr<const RoutingControl> control;  // null: the model's own routing
  const RouteLayout* layout = nullptr;
  int num_layers = 0;

  bool any_record() const { return record || table; }
};

// Reads `return_routing`, `return_routed_experts` and `routing_control`. The error names the field;
// PermissionDenied: the operator does not allow it.
absl::Status ParseRoutingFields(const nlohmann::json& body, const RoutingRules& rules, bool stream,
                                RoutingParams& out);

// The same checks for a request that was read elsewhere. `field` names it in messages.
absl::Status CheckRecords(const RoutingRules& rules, const char* field);
Result<std::shared_ptr<const RoutingControl>> MakeRoutingControl(const RoutingChange& change,
                                                                 const RoutingRules& rules,
                                                                 const char* field);

// The most (row, expert) pairs that a token can have. `control` may be null.
int64_t MostRoutes(const ModelSpec& spec, const RoutingControl* control);

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
