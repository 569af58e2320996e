// What a request may ask about the routing of its tokens: to record it, or to change it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "engine/routes/route_layout.h"
#include "engine/routes/routing_control.h"
#include "engine/spec/spec.h"

namespace moeserve::server {

// Most experts that one RoutingChange may name.
inline constexpr size_t kMaxChangedExperts = 65536;

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

// PermissionDenied, naming `field`: the operator does not allow records.
absl::Status CheckRecords(const RoutingRules& rules, const char* field);
// PermissionDenied: the operator does not allow changes. InvalidArgument: the model cannot route
// so. Both name `field`.
Result<std::shared_ptr<const RoutingControl>> MakeRoutingControl(const RoutingChange& change,
                                                                 const RoutingRules& rules,
                                                                 const char* field);

// The most (row, expert) pairs that a token can have. `control` may be null.
int64_t MostRoutes(const ModelSpec& spec, const RoutingControl* control);

}  // namespace moeserve::server
