#include "engine/expert_recorder.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>

#include "engine/model/weights.h"

namespace moeserve {
namespace {

bool IsEmbeddingOrHead(const std::string& name) {
  return name.starts_with("embed") || name.starts_with("head.");
}

// "blocks.3.attention.experts.7.q.weight" -> 7; -1 where the tensor belongs to no routed expert.
int ExpertOf(const std::string& name, const std::string& block_prefix) {
  const std::string prefix = block_prefix + ".experts.";
  if (!name.starts_with(prefix)) return -1;
  int expert = -1;
  std::from_chars(name.data() + prefix.size(), name.data() + name.size(), expert);
  return expert;
}

BlockExpertStats EmptyBlock(int layer, BlockKind block, const RoutedLayerSpec& spec) {
  BlockExpertStats b;
  b.layer = layer;
  b.block = block;
  b.num_experts = spec.num_experts;
  b.split_heads = spec.split.heads;
  b.select = spec.select.kind;
  b.max_selected = spec.select.MaxSelected();
  b.selections.resize(static_cast<size_t>(spec.num_experts));
  b.weight_sums.resize(static_cast<size_t>(spec.num_experts));
  b.expert_parameters.resize(static_cast<size_t>(spec.num_experts));
  const int distinct = std::min(spec.num_experts, b.split_heads * b.max_selected);
  b.distinct_histogram.resize(static_cast<size_t>(distinct) + 1);
  return b;
}

}  // namespace

ExpertRecorder::ExpertRecorder(const ModelSpec& spec, RouteLog* log) : log_(log) {
  int widest = 0;
  for (int l = 0; l < spec.num_layers(); ++l) {
    const auto& attention = spec.layers[l].attention.routing;
    const auto& feed_forward = spec.layers[l].feed_forward.routing;
    for (const auto* routing : {&attention, &feed_forward}) {
      if (!routing->has_value()) {
        block_of_layer_.push_back(-1);
        continue;
      }
      block_of_layer_.push_back(static_cast<int>(total_.blocks.size()));
      total_.blocks.push_back(EmptyBlock(
          l, routing == &attention ? BlockKind::kAttention : BlockKind::kFeedForward, **routing));
      widest = std::max(widest, (*routing)->num_experts);
      first_bucket_.push_back(num_buckets_);
      num_buckets_ += static_cast<uint32_t>((*routing)->num_experts);
    }
  }
  seen_.resize(static_cast<size_t>(widest));
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    if (IsEmbeddingOrHead(t.name)) continue;
    int64_t size = 1;
    for (int64_t s : t.shape) size *= s;
    bool expert = false;
    for (BlockExpertStats& b : total_.blocks) {
      const int e = ExpertOf(t.name, "blocks." + std::to_string(b.layer) + "." + Name(b.block));
      if (e < 0) continue;
      b.expert_parameters[e] += size;
      expert = true;
      break;
    }
    if (!expert) total_.always_active_parameters += size;
  }
  pending_ = total_;
}

void ExpertRecorder::BeginStep(const Batch& batch) {
  batch_ = &batch;
  failed_.assign(static_cast<size_t>(batch.num_tokens()), false);
}

void ExpertRecorder::OnPlan(int layer, BlockKind block, const RoutingPlan& plan) {
  const int index = block_of_layer_[2 * layer + (block == BlockKind::kAttention ? 0 : 1)];
  BlockExpertStats& b = pending_.blocks[index];
  for (int e = 0; e < plan.num_experts; ++e) {
    b.selections[e] += static_cast<uint64_t>(plan.expert_offsets[e + 1] - plan.expert_offsets[e]);
    double sum = 0.0;
    for (int32_t a = plan.expert_offsets[e]; a < plan.expert_offsets[e + 1]; ++a) {
      sum += plan.weight_of_assignment[a];
    }
    b.weight_sums[e] += sum;
  }
  const int heads = b.split_heads;
  const int tokens = plan.rows / heads;
  if (expert_of_assignment_.size() < static_cast<size_t>(plan.num_assignments)) {
    expert_of_assignment_.resize(static_cast<size_t>(plan.num_assignments));
  }
  for (int e = 0; e < plan.num_experts; ++e) {
    for (int32_t a = plan.expert_offsets[e]; a < plan.expert_offsets[e + 1]; ++a) {
      expert_of_assignment_[a] = e;
    }
  }
  for (int t = 0; t < tokens; ++t) {
    const int phase = static_cast<int>(batch_->phase[t]);
    ++b.tokens[phase];
    b.rows[phase] += static_cast<uint64_t>(heads);
    ++mark_;
    size_t distinct = 0;
    const int32_t cache_block =
        batch_->block_tables[static_cast<size_t>(batch_->sequence[t])]
                            [static_cast<size_t>(batch_->positions[t] / kKvBlockTokens)];
    for (int r = t * heads; r < (t + 1) * heads; ++r) {
      if (plan.row_nonfinite[r] != 0) ++b.nonfinite_rows;
      if (plan.row_nonfinite[r] == 2) failed_[t] = true;
      for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
        const int32_t expert = expert_of_assignment_[plan.assignments_of_row[i]];
        if (log_ != nullptr) {
          log_->Add(cache_block, first_bucket_[index] + static_cast<uint32_t>(expert));
        }
        uint64_t& seen = seen_[expert];
        distinct += seen != mark_;
        seen = mark_;
      }
    }
    ++b.distinct_histogram[std::min(distinct, b.distinct_histogram.size() - 1)];
  }
}

void ExpertRecorder::Publish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  total_.tokens += static_cast<uint64_t>(batch_->num_tokens());
  for (size_t i = 0; i < total_.blocks.size(); ++i) {
    BlockExpertStats& to = total_.blocks[i];
    BlockExpertStats& from = pending_.blocks[i];
    for (int p = 0; p < kNumPhases; ++p) {
      to.tokens[p] += std::exchange(from.tokens[p], 0);
      to.rows[p] += std::exchange(from.rows[p], 0);
    }
    for (int e = 0; e < to.num_experts; ++e) {
      to.selections[e] += std::exchange(from.selections[e], 0);
      to.weight_sums[e] += std::exchange(from.weight_sums[e], 0.0);
    }
    for (size_t n = 0; n < to.distinct_histogram.size(); ++n) {
      to.distinct_histogram[n] += std::exchange(from.distinct_histogram[n], 0);
    }
    to.nonfinite_rows += std::exchange(from.nonfinite_rows, 0);
  }
}

ExpertStats ExpertRecorder::Snapshot() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return total_;
}

}  // namespace moeserve
