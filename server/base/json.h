// JSON values.
#pragma once

#include "nlohmann/json.hpp"

namespace moeserve::server {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;  // keeps the order in which members were added

}  // namespace moeserve::server
