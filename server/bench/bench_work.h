// Counts the bytes that a step must at least read and the operations that it must at least compute.
// Dividing them by the machine's rates bounds the speed.
#pragma once

#include <cstdint>

#include "engine/model/step_report.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"
#include "kernels/kv_cache_type.h"

namespace moeserve::server {

// Counts the experts that the tokens of steps selected, and the work of these experts.
class RoutedWork {
 public:
  // `spec` must outlive this object.
  explicit RoutedWork(const ModelSpec& spec) : spec_(spec) {}

  void Add(int layer, BlockKind block, const RoutingPlan& plan);
  void Add(const StepReport& report) {  // requires that `report` has routing plans
    for (const BlockReport& b : report.blocks) Add(b.layer, b.block, b.plan);
  }

  int64_t experts() const { return experts_; }        // distinct experts per block and step, summed
  int64_t parameters() const { return parameters_; }  // in the matrices of the experts() experts
  // Returns the multiply-adds of all rows with the matrices of their selected experts.
  int64_t products() const { return products_; }
  // Returns the number of query heads that routed attention computed in a layer: for each row, one
  // per selected expert and kv head.
  int64_t attention_heads(int layer) const;

 private:
  const ModelSpec& spec_;
  int64_t experts_ = 0;
  int64_t parameters_ = 0;
  int64_t products_ = 0;
  std::vector<int64_t> heads_ = std::vector<int64_t>(spec_.layers.size(), 0);
};

// Returns the number of parameters in the matrices of one expert.
int64_t ExpertParameters(const ModelSpec& spec, int layer, BlockKind block, int expert);

// Returns the multiply-adds per token with the matrices that every token uses: all matrices except
// routed experts, embeddings and the LM head.
int64_t FixedProducts(const ModelSpec& spec);
// Returns the multiply-adds per token with the LM head.
int64_t HeadProducts(const ModelSpec& spec);

// Returns the bytes of keys and values that one token adds to the KV caches of all layers.
int64_t CacheBytesPerToken(const ModelSpec& spec, KvCacheType cache);

// Returns the operations that `tokens` tokens need in the whole model without the LM head. `work`
// must contain the routes of exactly these tokens. Each token attends to `visible` cached positions
// on average. A multiply-add counts as two operations.
double Operations(const ModelSpec& spec, const RoutedWork& work, int64_t tokens, double visible);

}  // namespace moeserve::server
