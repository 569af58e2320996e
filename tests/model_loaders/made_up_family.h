// A family of checkpoint folders that exists in tests only and is written like a real one. It has
// Mixtral's tensor names, Granite's fused gate and up projections [E, 2 * width, d], and JetMoE's
// joined keys and values.
#pragma once

#include "model_loaders/architectures/architecture.h"

namespace moeserve::testing {

extern const Architecture kMadeUpArchitecture;

}  // namespace moeserve::testing
