// The `attention` and `feed_forward` objects of config.json.
#pragma once

#include <string>

#include "engine/model/spec.h"
#include "model_loaders/message.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// `path` names the object in messages. What is read means something only if nothing was added to
// `problems`.
AttentionSpec ParseAttention(const nlohmann::json& json, const std::string& path,
                             Problems* problems);
FeedForwardSpec ParseFeedForward(const nlohmann::json& json, const std::string& path,
                                 Problems* problems);

}  // namespace moeserve
