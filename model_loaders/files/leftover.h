// Why a tensor that a folder holds does not belong to its model.
#pragma once

#include <string>
#include <string_view>

#include "engine/spec/spec.h"

namespace moeserve {

// The setting that rules the tensor out ("feed_forward[1].routing.num_experts is 8"), or a text
// that says that no setting knows such a name. `name` is not one of RequiredTensors(spec).
std::string WhyLeftOver(std::string_view name, const ModelSpec& spec);

}  // namespace moeserve
