// Models with random weights, for measurements without a checkpoint.
#pragma once

#include <memory>
#include <string_view>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"

namespace moeserve {

inline constexpr const char* kSyntheticNames[] = {"small", "medium", "small-dense", "medium-dense",
                                                  "mixtral"};

// "small" (0.64 B parameters, 32 experts, top-2) or "medium" (2.93 B, 64 experts, top-8): decoders
// with gated experts of equal width, renormalised softmax, per-head query and key norms.
// "small-dense", "medium-dense": one feed-forward as wide as the selected experts in their place.
// "mixtral" (11.8 B): 8 layers of Mixtral-8x7B, which has 32. InvalidArgument: another name.
Result<ModelSpec> SyntheticSpec(std::string_view name);

// A source of any tensor: normal with standard deviation fan_in^-0.5, embeddings 1, norms all 1,
// biases 0, routers f32 and the rest `dtype`. Values depend only on the tensor's name; tensors
// share no memory.
std::unique_ptr<WeightSource> MakeSyntheticWeights(DType dtype);

}  // namespace moeserve
