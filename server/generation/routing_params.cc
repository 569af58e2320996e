#include "server/generation/routing_params.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

absl::Status LacksScope(const char* field) {
  return MakeError(absl::StatusCode::kPermissionDenied, "permission_denied",
                   Concat("'", field, "': this API key lacks the scope routing"), field);
}

}  // namespace

absl::Status CheckRecords(const RoutingRules& rules, const char* field) {
  if (!rules.permitted) return LacksScope(field);
  if (rules.records) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kPermissionDenied, "not_enabled",
      Concat("'", field, "': this server keeps no routing records (--routing-records)"), field);
}

Result<std::shared_ptr<const RoutingControl>> MakeRoutingControl(const RoutingChange& change,
                                                                 const RoutingRules& rules,
                                                                 const char* field) {
  if (!rules.permitted) return LacksScope(field);
  if (!rules.control.enabled) {
    return MakeError(absl::StatusCode::kPermissionDenied, "not_enabled",
                     Concat("'", field,
                            "': this server lets nobody change its routing "
                            "(--routing-control)"),
                     field);
  }
  if (change.experts.size() > kMaxChangedExperts) {
    return InvalidValue(field, Concat("'", field, "' names at most ", kMaxChangedExperts,
                                      " experts, found ", change.experts.size()));
  }
  auto control = RoutingControl::Create(change, *rules.spec, rules.control);
  if (!control.ok()) {
    return InvalidValue(field, Concat("'", field, "': ", std::string(control.status().message())));
  }
  return std::make_shared<const RoutingControl>(*std::move(control));
}

int64_t MostRoutes(const ModelSpec& spec, const RoutingControl* control) {
  int64_t routes = 0;
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    if (routing == nullptr) continue;
    int most = routing->select.MaxSelected();
    if (control != nullptr) {
      const RouteOverride change = control->For(spec.stack, block.layer, block.kind());
      if (change.k > 0) most = change.k;
      if (change.p > 0 && routing->select.kind != SelectKind::kTopP) most = routing->num_experts;
    }
    routes += int64_t{most} * routing->split.heads;
  }
  if (spec.encoder != nullptr) routes = std::max(routes, MostRoutes(*spec.encoder, control));
  return routes;
}

}  // namespace moeserve::server
