#include "server/bench/weight_traffic.h"

#include "engine/spec/weights.h"

namespace moeserve {

int64_t MatrixBytes(int64_t parameters, DType weights, Quantization quantization) {
  if (quantization == Quantization::kNone) {
    return parameters * static_cast<int64_t>(SizeOf(weights));
  }
  const int64_t values = parameters / Traits(quantization).per_byte;
  // With one scale per row this leaves the scales out, 0.1 % of the bytes of a row of 2,000
  // columns.
  return values + parameters / QuantGroup(quantization) * static_cast<int64_t>(sizeof(F16));
}

int64_t FixedWeightBytes(const ModelSpec& spec, const ModelOptions& types) {
  int64_t bytes = 0;
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    const bool router = t.name.find(".router.") != std::string::npos;
    const bool expert = !router && t.name.find(".experts.") != std::string::npos;
    const bool lookup = t.name == "embed_position.weight" || t.name == "embed_layers.weight" ||
                        (t.name == "embed.weight" && !spec.tie_word_embeddings);
    if (expert || lookup || t.ids || IsOfPrediction(t.name)) continue;
    int64_t size = 1;
    for (int64_t s : t.shape) size *= s;
    bytes +=
        router || t.shape.size() == 1
            ? size * 4
            : MatrixBytes(size, types.compute, QuantizationOf(t.name, t.shape, types.quantization));
  }
  return bytes;
}

double WeightBytesRead(const ExpertStats& stats, const ModelSpec& spec, const ModelOptions& types) {
  double bytes =
      static_cast<double>(stats.steps) * static_cast<double>(FixedWeightBytes(spec, types));
  for (const BlockExpertStats& block : stats.blocks) {
    for (int e = 0; e < block.num_experts; ++e) {
      bytes += static_cast<double>(block.visits[e]) *
               static_cast<double>(
                   MatrixBytes(block.expert_parameters[e], types.compute, types.quantization));
    }
  }
  return bytes;
}

}  // namespace moeserve
