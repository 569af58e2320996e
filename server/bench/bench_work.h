// What a step has to read and to compute at least: the other side of a measured time.
#pragma once

#include <cstdint>

#include "engine/model/step_report.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"
#include "kernels/kv_cache_type.h"

namespace moeserve::server {

// Counts what the routes of steps really touched.
class RoutedWork {
 public:
  // `spec` must outlive this.
  explicit RoutedWork(const ModelSpec& spec) : spec_(spec) {}

  void Add(int layer, BlockKind block, const RoutingPlan& plan);
  void Add(const StepReport& report) {  // which has plans
    for (const BlockReport& b : report.blocks) Add(b.layer, b.block, b.plan);
  }

  int64_t experts() const { return experts_; }        // touched, summed over blocks and steps
  int64_t parameters() const { return parameters_; }  // of their matrices
  // Multiply-adds of all rows with the matrices of their experts.
  int64_t products() const { return products_; }
  // Query rows times kv heads of routed attention: each attends with one head.
  int64_t attention_heads(int layer) const;

 private:
  const ModelSpec& spec_;
  int64_t experts_ = 0;
  int64_t parameters_ = 0;
  int64_t products_ = 0;
  std::vector<int64_t> heads_ = std::vector<int64_t>(spec_.layers.size(), 0);
};

// Parameters of the matrices of one expert.
int64_t ExpertParameters(const ModelSpec& spec, int layer, BlockKind block, int expert);

// Multiply-adds of one token with every matrix that all tokens pass: neither routed experts nor
// embeddings nor the head.
int64_t FixedProducts(const ModelSpec& spec);
// The head's, of one token.
int64_t HeadProducts(const ModelSpec& spec);

// Bytes of keys and values that a token leaves in the caches of all layers.
int64_t CacheBytesPerToken(const ModelSpec& spec, KvCacheType cache);

// Operations of `tokens` tokens that pass the whole model but the head, with the routes counted in
// `work` (of exactly these tokens) and `visible` cached positions for each on average. A
// multiplication and an addition are two.
double Operations(const ModelSpec& spec, const RoutedWork& work, int64_t tokens, double visible);

}  // namespace moeserve::server
