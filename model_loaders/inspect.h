// What a model is made of, in numbers and words: the facts behind `moeserve inspect`.
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
  std::vector<int64_t> expert_parameters;  // by expert; the router is not among them
  // How many different experts one token can use: with `h` sub-tokens that select `k` each, between
  // k and min(h * k, E). Top-p selects between 1 and `max` in a row.
  int64_t min_experts = 0;
  int64_t max_experts = 0;
};

// Parameters that one token touches. The embedding counts as a whole, as is usual in papers.
struct ActivatedParameters {
  int64_t min = 0;  // the fewest and smallest experts everywhere
  int64_t max = 0;  // the most and largest
  // Mean expert size times the number of experts, the upper number where sub-tokens may share;
  // absent if a block selects by top-p, because the number then depends on the text.
  std::optional<int64_t> nominal;
};

// A run of the text rendering: layers that are alike.
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
  // Of a folder with matrices of a type of integers and the rest in bf16; all types.
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
