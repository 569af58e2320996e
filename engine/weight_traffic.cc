#include "engine/weight_traffic.h"

#include "engine/model/weights.h"

namespace moeserve {

int64_t MatrixBytes(int64_t parameters, DType weights) {
  return parameters * static_cast<int64_t>(SizeOf(weights));
}

int64_t FixedWeightBytes(const ModelSpec& spec, DType weights) {
  int64_t bytes = 0;
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    const bool router = t.name.find(".router.") != std::string::npos;
    const bool expert = !router && t.name.find(".experts.") != std::string::npos;
    const bool lookup = t.name == "embed_position.weight" ||
                        (t.name == "embed.weight" && !spec.tie_word_embeddings);
    if (expert || lookup) continue;
    int64_t size = 1;
    for (int64_t s : t.shape) size *= s;
    bytes += router || t.shape.size() == 1 ? size * 4 : MatrixBytes(size, weights);
  }
  return bytes;
}

double WeightBytesRead(const ExpertStats& stats, const ModelSpec& spec, DType weights) {
  double bytes =
      static_cast<double>(stats.steps) * static_cast<double>(FixedWeightBytes(spec, weights));
  for (const BlockExpertStats& block : stats.blocks) {
    for (int e = 0; e < block.num_experts; ++e) {
      bytes += static_cast<double>(block.visits[e]) *
               static_cast<double>(MatrixBytes(block.expert_parameters[e], weights));
    }
  }
  return bytes;
}

}  // namespace moeserve
