#include <string>

#include "engine/spec/checker.h"
#include "engine/spec/spec_limits.h"

namespace moeserve {
namespace {

// Checks the widths of what a recurrent mixer projects to, and of its states.
void CheckWidths(Checker& check, const std::string& scope, const StateShape& state,
                 const char* value_key) {
  const RecurrentShape& shape = state.recurrence;
  const auto limit = [&](const char* key, int64_t found) {
    check.Refuse(found > kMaxWidth, scope, key, Concat("projections of at most ", kMaxWidth),
                 found);
  };
  limit("num_heads", int64_t{shape.heads} * shape.value_dim);
  limit(value_key, 2 * int64_t{shape.key_heads} * shape.key_dim);
  limit("num_heads", int64_t{shape.heads} * (shape.decays_keys ? shape.key_dim : 1));
  const int64_t floats = int64_t{shape.heads} * shape.key_dim * shape.value_dim;
  check.Refuse(floats > kMaxStateFloats, scope, "num_heads",
               Concat("states of at most ", kMaxStateFloats, " numbers"), floats);
}

}  // namespace

void CheckDelta(Checker& check, const std::string& scope, const DeltaSpec& delta) {
  check.Divides(scope, "num_key_heads", delta.num_key_heads, "num_heads", delta.num_heads);
  CheckWidths(check, scope, {.recurrence = delta.recurrence()}, "num_key_heads");
  check.Refuse(delta.gate_activation == GateActivation::kSoftplus2, scope, "gate_activation",
               "\"silu\" or \"sigmoid\"", "\"softplus2\"");
}

void CheckStateSpace(Checker& check, const std::string& scope, const StateSpaceSpec& ssm) {
  check.Divides(scope, "groups", ssm.groups, "num_heads", ssm.num_heads);
  CheckWidths(check, scope, {.recurrence = ssm.recurrence()}, "groups");
  check.Refuse(ssm.step_high.has_value() && *ssm.step_high < ssm.step_low, scope, "step_high",
               "at least step_low", Number(ssm.step_high.value_or(0)));
}

}  // namespace moeserve
