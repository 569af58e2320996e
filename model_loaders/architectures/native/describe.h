// Descriptions of a specification for people.
#pragma once

#include <string>

#include "engine/spec/spec.h"

namespace moeserve {

// One line each. Two blocks with the same settings have the same line.
std::string DescribeModel(const ModelSpec& spec);
std::string DescribeAttention(const AttentionSpec& attention);
std::string DescribeFeedForward(const FeedForwardSpec& feed_forward);

}  // namespace moeserve
