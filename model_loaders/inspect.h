// A summary of a model: parameters, memory and architecture, as `moeserve inspect` prints it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/spec/spec.h"
#include "kernels/base/dtype.h"
#include "kernels/base/quantization.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// One routed block of one layer.
struct RoutedBlockSummary {
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  std::vector<int64_t> expert_parameters;  // by expert, without the router
  // Bounds on the distinct experts of one token. With h sub-tokens that select k each: k and
  // min(h * k, E). Top-p selects between 1 and `max` for a row.
  int64_t min_experts = 0;
  int64_t max_experts = 0;
};

// Parameters that one token uses. Counts the whole embedding, as papers do.
struct ActivatedParameters {
  int64_t min = 0;  // in every block the fewest and smallest experts
  int64_t max = 0;  // in every block the most and largest experts
  // Mean expert size times the number of experts (the upper bound of it if sub-tokens may share
  // experts). Absent if a block selects by top-p, because it then depends on the text.
  std::optional<int64_t> nominal;
};

// Layers with equal settings, which the text shows together.
struct LayerGroup {
  std::vector<int> layers;  // ascending
  std::string attention;    // one line each
  std::string feed_forward;
};

struct ModelSummary {
  int64_t parameters = 0;            // all of them; a tied head counts once
  int64_t embedding_parameters = 0;  // token and position tables, and the head if it is not tied
  int64_t expert_parameters = 0;     // of routed experts
  int64_t always_active = 0;         // the rest: attention, dense blocks, routers, norms
  ActivatedParameters activated;
  // Bytes of a folder with matrices of that integer type and the rest in bf16, for every type.
  std::vector<std::pair<Quantization, int64_t>> quantized_bytes;
  std::vector<RoutedBlockSummary> routed_blocks;  // by layer, attention first
  int64_t kv_elements_per_token = 0;              // keys and values of all layers
  std::vector<LayerGroup> groups;
  std::string general;  // one line: widths, norm, position

  int64_t WeightBytes(DType dtype) const {
    return parameters * static_cast<int64_t>(SizeOf(dtype));
  }
  int64_t KvBytesPerToken(DType dtype) const {
    return kv_elements_per_token * static_cast<int64_t>(SizeOf(dtype));
  }
};

// `spec` is valid (Validate()).
ModelSummary Summarize(const ModelSpec& spec);

// Several lines, each ended by a newline.
std::string SummaryText(const ModelSummary& summary);

// The same facts for programs.
nlohmann::json SummaryJson(const ModelSummary& summary);

}  // namespace moeserve
