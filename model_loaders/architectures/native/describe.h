// Descriptions of a spec for people.
#pragma once

#include <string>

#include "engine/spec/spec.h"

namespace moeserve {

// Each function returns one line. Blocks with equal settings have equal lines.
std::string DescribeModel(const ModelSpec& spec);
std::string DescribeBlock(const BlockSpec& block);

}  // namespace moeserve
