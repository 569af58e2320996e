// The `attention` and `feed_forward` objects of config.json.
#pragma once

#include <string>

#include "base/message.h"
#include "engine/spec/spec.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// `path` names the object in messages. The result is valid only if nothing was added to `problems`.
AttentionSpec ParseAttention(const nlohmann::json& json, const std::string& path,
                             Problems* problems);
FeedForwardSpec ParseFeedForward(const nlohmann::json& json, const std::string& path,
                                 Problems* problems);

}  // namespace moeserve
