// Models with random weights, for measurements without a checkpoint.
#pragma once

#include <memory>
#include <string_view>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"

namespace moeserve {

inline constexpr std::string_view kSyntheticNames[] = {
    "small", "medium", "small-dense", "medium-dense", "small-hybrid", "medium-hybrid", "mixtral"};

// Returns the spec of a named model. "small" (0.64 B parameters, 32 experts, top-2) and "medium"
// (2.93 B, 64 experts, top-8) are decoders with gated experts of equal width, softmax renormalized
// over the selected experts, and per-head query and key norms. "small-dense" and "medium-dense"
// replace the experts by one feed-forward that is as wide as the selected experts together.
// "small-hybrid" and "medium-hybrid" have linear attention with a delta rule in three of four
// layers, gates of attention in the others, and a shared expert, as Qwen3.5. "mixtral" (11.8 B) has
// 8 of the 32 layers of Mixtral-8x7B. InvalidArgument for another name.
Result<ModelSpec> SyntheticSpec(std::string_view name);

// Returns whether the name is that of a model with linear attention.
bool IsHybridName(std::string_view name);
// Makes three of four layers linear attention with a delta rule, as Qwen3.5 has, with twice the
// width of the model in values, and gives the other layers' dense attention a gate and routed
// feed-forwards a shared expert with a gate, which is as wide as the first expert.
void MakeHybrid(ModelSpec& spec);

// Returns a source that makes a tensor of any name and shape. Matrices are normally distributed
// with standard deviation fan_in^-0.5, embeddings with 1; norm weights are 1, biases and
// logarithms of decays 0. Routers
// are f32, other tensors `dtype`. Values depend only on the tensor's name. Tensors share no memory.
std::unique_ptr<WeightSource> MakeSyntheticWeights(DType dtype);

}  // namespace moeserve
