// The settings that single gates have, for tests of routers.
#pragma once

#include "kernels/base/route_settings.h"

namespace moeserve::testing {

// Gives a router a gate, and the settings of this gate alone values that are not their defaults.
inline void SetGate(RouteSettings& s, GateKind gate) {
  s.gate = gate;
  switch (gate) {
    case GateKind::kSoftmax:
    case GateKind::kSigmoid:
    case GateKind::kSoftmaxSelected:
    case GateKind::kSqrtSoftplus:
      return;
    case GateKind::kSparseMixer:
      s.mixer_limit = 0.8f;  // half of the scores of random rows are near
      return;
  }
}

}  // namespace moeserve::testing
