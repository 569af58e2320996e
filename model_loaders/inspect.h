// A summary of a model for `moeserve inspect`: parameters, memory and architecture.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/spec/spec.h"
#include "engine/statistics/measures/macs.h"
#include "kernels/base/dtype.h"
#include "kernels/base/quantization.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// Facts about one routed block of one layer.
struct RoutedBlockSummary {
  Stack stack = Stack::kOnly;
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  std::vector<int64_t> expert_parameters;  // [expert], without the router
  // Bounds on the number of distinct experts that one token selects. With h sub-tokens that select
  // k of E experts each, the bounds are k and min(h * k, E). With top-p, k is 1 in the lower bound
  // and the largest number of experts that a row may select in the upper bound.
  int64_t min_experts = 0;
  int64_t max_experts = 0;
};

// The number of parameters that one token uses. Includes the whole embedding table, as papers do.
struct ActivatedParameters {
  int64_t min = 0;  // if every block selects the fewest and smallest experts
  int64_t max = 0;  // if every block selects the most and largest experts
  // The parameters outside of routed experts plus, for each routed block, the mean size of an
  // expert times the number of selected experts. If sub-tokens may share experts, uses the largest
  // number of distinct experts. Absent if a block selects by top-p, because the number of selected
  // experts then depends on the text.
  std::optional<int64_t> nominal;
};

// Layers with equal settings, which SummaryText() shows together.
struct LayerGroup {
  Stack stack = Stack::kOnly;
  std::vector<int> layers;  // ascending
  std::string attention;    // one line
  std::string source;       // attention to a source; empty if there is none
  std::string feed_forward;
};

struct ModelSummary {
  int64_t parameters = 0;            // of the whole model; a tied LM head counts once
  int64_t embedding_parameters = 0;  // token and position embeddings, and an untied LM head
  int64_t expert_parameters = 0;     // in routed experts
  int64_t always_active = 0;         // in all other parts: attention, dense blocks, routers, norms
  ActivatedParameters activated;
  MacsRange macs;
  std::optional<MacsRange> source_macs;  // for each token of an encoder-decoder's source
  int64_t head_macs = 0;                 // of the LM head, for each token whose logits are computed
  // For every integer type: the bytes of a folder with matrices of that type and all other tensors
  // in bf16.
  std::vector<std::pair<Quantization, int64_t>> quantized_bytes;
  std::vector<RoutedBlockSummary> routed_blocks;  // by layer; attention before feed-forward
  int64_t kv_elements_per_token = 0;              // elements of keys and values, all layers
  int64_t state_bytes = 0;  // of one sequence, whatever its length and the types of weights
  std::vector<LayerGroup> groups;
  std::string general;  // one line about widths, norm and positions

  int64_t WeightBytes(DType dtype) const {
    return parameters * static_cast<int64_t>(SizeOf(dtype));
  }
  int64_t KvBytesPerToken(DType dtype) const {
    return kv_elements_per_token * static_cast<int64_t>(SizeOf(dtype));
  }
};

// `spec` must have passed Validate().
ModelSummary Summarize(const ModelSpec& spec);

// Returns several lines, each ending in a newline.
std::string SummaryText(const ModelSummary& summary);

// Returns the facts of SummaryText() as JSON.
nlohmann::json SummaryJson(const ModelSummary& summary);

}  // namespace moeserve
