// Counts the bytes that a step must at least read and the operations that it must at least compute.
// Dividing them by the machine's rates bounds the speed.
#pragma once

#include <cstdint>

#include "engine/spec/spec.h"
#include "engine/statistics/measures/macs.h"
#include "engine/step/step_report.h"
#include "kernels/backend.h"
#include "kernels/base/kv_cache_type.h"

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
  std::vector<int64_t> heads_ = std::vector<int64_t>(static_cast<size_t>(spec_.num_layers()), 0);
};

// Returns the bytes of keys and values that a token reads in all layers, on average.
double CacheBytesRead(const ModelSpec& spec, KvCacheType cache, const VisiblePositions& visible);

// Returns the bytes of states of recurrences that a step reads and writes for each sequence.
double StateBytesMoved(const ModelSpec& spec);

// The operations that `tokens` tokens need in the whole model without the LM head; a multiply-add
// counts as two.
struct StepOperations {
  double matrices = 0;
  double attention = 0;  // scores and weighted values
};
// `work` must contain the routes of exactly these tokens.
StepOperations Operations(const ModelSpec& spec, const RoutedWork& work, int64_t tokens,
                          const VisiblePositions& visible);

}  // namespace moeserve::server
