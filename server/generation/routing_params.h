// The parameters of a request about routing: recording the routes of its tokens, and overriding the
// selection of experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/routes/route_layout.h"
#include "engine/routes/routing_control.h"
#include "engine/spec/spec.h"

namespace moeserve::server {

// Limits on the number of words in `return_word_experts` and on their bytes.
inline constexpr size_t kMaxListedWords = 1000;
inline constexpr size_t kMaxWordBytes = 128;

// Limit on the number of experts that one RoutingChange may name.
inline constexpr size_t kMaxChangedExperts = 65536;

// What the server's options and the model allow requests to do with routing.
struct RoutingRules {
  // Whether the request's key allows records and overrides; the options below apply as well.
  bool permitted = true;
  bool records = false;  // whether requests may ask for their routes
  RoutingControlLimits control;
  const ModelSpec* spec = nullptr;             // lives as long as the engine
  const RouteLayout* layout = nullptr;         // lives as long as the engine
  const RouteLayout* source_layout = nullptr;  // likewise; null without an encoder
};

struct RoutingParams {
  bool record = false;             // `return_routing`
  bool table = false;              // `return_routed_experts`: return a table of expert ids
  std::vector<std::string> words;  // `return_word_experts`: return the experts of these words
  std::shared_ptr<const RoutingControl> control;  // routing override; null if there is none
  const RouteLayout* layout = nullptr;
  const RouteLayout* source_layout = nullptr;  // of the routes of sources; null without them
  int num_layers = 0;

  bool any_record() const { return record || table || !words.empty(); }
};

// Returns PermissionDenied, naming `field`, if the key or the server's options do not allow routing
// records.
absl::Status CheckRecords(const RoutingRules& rules, const char* field);
// Returns the routing override that `change` describes. PermissionDenied if the key or the
// server's options do not allow overrides; InvalidArgument if the model cannot route in that way.
// Both errors name `field`.
Result<std::shared_ptr<const RoutingControl>> MakeRoutingControl(const RoutingChange& change,
                                                                 const RoutingRules& rules,
                                                                 const char* field);

// Returns the largest number of (row, expert) pairs that one token, also one of a source, can have.
// `control` may be null.
int64_t MostRoutes(const ModelSpec& spec, const RoutingControl* control);

}  // namespace moeserve::server
