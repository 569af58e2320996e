// The `position`, `attention` and `feed_forward` objects of config.json.
#pragma once

#include <string>

#include "base/message.h"
#include "engine/spec/spec.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// `path` is the name of the object in error messages. The result is valid only if the call added
// nothing to `problems`.
PositionSpec ParsePosition(const nlohmann::json& json, const std::string& path, Problems* problems);
// Reads an `attention` object: the layer's mixer of tokens, which may be of another kind.
Mixer ParseTokenMixer(const nlohmann::json& json, const std::string& path, Problems* problems);
FeedForwardSpec ParseFeedForward(const nlohmann::json& json, const std::string& path,
                                 Problems* problems);

}  // namespace moeserve
