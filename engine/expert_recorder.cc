#include "engine/expert_recorder.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

#include "engine/expert_counters.h"
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

BlockExpertStats EmptyBlock(const LayerSpec& layer, const RoutedBlock& block, bool any_selection) {
  const bool attention = block.block == BlockKind::kAttention;
  const RoutedLayerSpec& spec = attention ? *layer.attention.routing : *layer.feed_forward.routing;
  const size_t experts = static_cast<size_t>(spec.num_experts);
  BlockExpertStats b;
  b.layer = block.layer;
  b.block = block.block;
  b.num_experts = spec.num_experts;
  b.split_heads = spec.split.heads;
  b.select = spec.select.kind;
  b.max_selected = spec.select.MaxSelected();
  for (auto* counts : {&b.selections, &b.decode_selections, &b.touching_tokens, &b.visits,
                       &b.recomputed_selections, &b.router.selections}) {
    counts->resize(experts);
  }
  b.weight_sums.resize(experts);
  b.router.probability_sums.resize(experts);
  b.expert_parameters.resize(experts);
  b.expert_widths = spec.widths;
  if (attention) {
    b.expert_widths.assign(experts, layer.attention.num_kv_heads * layer.attention.head_dim);
  }
  const int distinct =
      any_selection ? spec.num_experts : std::min(spec.num_experts, b.split_heads * b.max_selected);
  b.distinct_histogram.resize(static_cast<size_t>(distinct) + 1);
  return b;
}

}  // namespace

ExpertStats EmptyExpertStats(const ModelSpec& spec, bool any_selection) {
  ExpertStats stats;
  const RouteLayout layout(spec);
  bool split = false;
  for (const RoutedBlock& block : layout.blocks) {
    stats.blocks.push_back(EmptyBlock(spec.layers[block.layer], block, any_selection));
    split = split || block.sub_tokens > 1;
  }
  size_t most_distinct = 0;
  for (const BlockExpertStats& b : stats.blocks) {
    if (split && b.split_heads == 1) continue;
    ++stats.diversity_blocks;
    most_distinct += b.distinct_histogram.size() - 1;
  }
  stats.diversity_histogram.resize(most_distinct + 1);
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    if (IsEmbeddingOrHead(t.name)) continue;
    int64_t size = 1;
    for (int64_t s : t.shape) size *= s;
    bool expert = false;
    for (BlockExpertStats& b : stats.blocks) {
      const int e = ExpertOf(t.name, "blocks." + std::to_string(b.layer) + "." + Name(b.block));
      if (e < 0) continue;
      b.expert_parameters[e] += size;
      expert = true;
      break;
    }
    if (!expert) stats.always_active_parameters += size;
  }
  return stats;
}

std::vector<int64_t> ExpertParameters(const ExpertStats& stats) {
  std::vector<int64_t> out;
  for (const BlockExpertStats& b : stats.blocks) {
    out.insert(out.end(), b.expert_parameters.begin(), b.expert_parameters.end());
  }
  return out;
}

ExpertRecorder::ExpertRecorder(const ModelSpec& spec, const RecorderOptions& options, RouteLog* log)
    : layout_(spec),
      options_(options),
      log_(log),
      pending_(EmptyExpertStats(spec, options.any_selection)),
      touched_(layout_.blocks.size()),
      total_(pending_) {
  const bool split = std::any_of(layout_.blocks.begin(), layout_.blocks.end(),
                                 [](const RoutedBlock& b) { return b.sub_tokens > 1; });
  int widest = 0;
  for (const RoutedBlock& block : layout_.blocks) {
    const LayerSpec& layer = spec.layers[block.layer];
    const RoutedLayerSpec& routing = block.block == BlockKind::kAttention
                                         ? *layer.attention.routing
                                         : *layer.feed_forward.routing;
    sigmoid_.push_back(routing.gate == GateKind::kSigmoid);
    diverse_.push_back(!split || block.sub_tokens > 1);
    widest = std::max(widest, block.num_experts);
    if (options.hidden_samples > 0) {
      reservoirs_.emplace_back(options.hidden_samples, spec.hidden_size / block.sub_tokens,
                               reservoirs_.size());
    }
  }
  probability_.resize(static_cast<size_t>(widest));
  const int64_t bytes = TokenExpertCounts::BytesFor(spec.vocab_size, layout_.num_experts);
  if (layout_.num_experts > 0 && bytes <= options.token_counts_bytes) {
    token_counts_ = std::make_unique<TokenExpertCounts>(spec.vocab_size, layout_.num_experts);
  }
}

void ExpertRecorder::BeginStep(const Batch& batch) {
  batch_ = &batch;
  const size_t tokens = static_cast<size_t>(batch.num_tokens());
  failed_.assign(tokens, false);
  diversity_.assign(tokens, 0);
  cache_block_.resize(tokens);
  bool decoding = true;
  for (size_t t = 0; t < tokens; ++t) {
    cache_block_[t] = batch.block_tables[static_cast<size_t>(batch.sequence[t])]
                                        [static_cast<size_t>(batch.positions[t] / kKvBlockTokens)];
    decoding = decoding && batch.phase[t] == Phase::kDecode;
  }
  step_kind_ = decoding ? 1 : 0;
  sampling_ = options_.router_stats_interval > 0 && steps_ % options_.router_stats_interval == 0;
  ++steps_;
}

void ExpertRecorder::OnPlan(int layer, BlockKind block, const RoutingPlan& plan) {
  if (options_.observer != nullptr) options_.observer->OnPlan(layer, block, plan);
  const int index = layout_.IndexOf(layer, block);
  const RoutedBlock& where = layout_.blocks[index];
  BlockExpertStats& b = pending_.blocks[index];
  touched_[index] = 1;
  const int heads = b.split_heads;
  const int tokens = plan.rows / heads;
  distinct_.assign(static_cast<size_t>(tokens), 0);
  uint64_t active = 0;
  for (int e = 0; e < plan.num_experts; ++e) {
    const int32_t begin = plan.expert_offsets[e], end = plan.expert_offsets[e + 1];
    if (begin == end) continue;
    ++active;
    ++b.visits[e];
    pending_.expert_rows[step_kind_].Observe(static_cast<uint64_t>(end - begin));
    const uint32_t expert = where.first_expert + static_cast<uint32_t>(e);
    // Rows ascend within an expert, so those of one token are adjacent.
    int last_token = -1;
    uint64_t recomputed = 0, decoded = 0, touching = 0;
    double weights = 0.0;
    for (int32_t a = begin; a < end; ++a) {
      const int32_t row = plan.row_of_assignment[a];
      const int t = row / heads;
      const float weight = plan.weight_of_assignment[a];
      const Phase phase = batch_->phase[t];
      const bool first = t != last_token;
      last_token = t;
      if (log_ != nullptr) {
        log_->Add(cache_block_[t], batch_->positions[t] % kKvBlockTokens,
                  where.first_row + (row - t * heads), e, weight);
      }
      if (phase == Phase::kRecompute) {
        ++recomputed;
        continue;
      }
      decoded += phase == Phase::kDecode;
      weights += weight;
      if (first) {
        ++touching;
        ++distinct_[t];
      }
      if (token_counts_ != nullptr) token_counts_->Add(batch_->tokens[t], expert);
    }
    b.selections[e] += static_cast<uint64_t>(end - begin) - recomputed;
    b.decode_selections[e] += decoded;
    b.recomputed_selections[e] += recomputed;
    b.touching_tokens[e] += touching;
    b.weight_sums[e] += weights;
  }
  pending_.active_experts[step_kind_].Observe(active);
  for (int t = 0; t < tokens; ++t) {
    for (int r = t * heads; r < (t + 1) * heads; ++r) {
      if (plan.row_nonfinite[r] != 0) ++b.nonfinite_rows;
      if (plan.row_nonfinite[r] == 2) failed_[t] = true;
    }
    const Phase phase = batch_->phase[t];
    if (phase == Phase::kRecompute) {
      ++b.recomputed_tokens;
      b.recomputed_rows += static_cast<uint64_t>(heads);
      continue;
    }
    ++b.tokens[static_cast<int>(phase)];
    b.rows[static_cast<int>(phase)] += static_cast<uint64_t>(heads);
    ++b.distinct_histogram[distinct_[t]];
    if (diverse_[index]) diversity_[t] += distinct_[t];
  }
}

void ExpertRecorder::OnScores(int layer, BlockKind block, const RoutingPlan& plan,
                              std::span<const float> scores) {
  if (options_.observer != nullptr && options_.observer->WantsScores()) {
    options_.observer->OnScores(layer, block, plan, scores);
  }
  if (!sampling_) return;
  const int index = layout_.IndexOf(layer, block);
  BlockExpertStats& b = pending_.blocks[index];
  RouterStats& stats = b.router;
  const size_t experts = static_cast<size_t>(plan.num_experts);
  for (int r = 0; r < plan.rows; ++r) {
    const int t = r / b.split_heads;
    if (batch_->phase[t] == Phase::kRecompute || plan.row_nonfinite[r] != 0) continue;
    const float* s = scores.data() + static_cast<size_t>(r) * experts;
    const double max = *std::max_element(s, s + experts);
    double exp_sum = 0.0, sum = 0.0;
    for (size_t e = 0; e < experts; ++e) {
      probability_[e] = std::exp(static_cast<double>(s[e]) - max);
      exp_sum += probability_[e];
    }
    sum = exp_sum;
    if (sigmoid_[index]) {
      sum = 0.0;
      for (size_t e = 0; e < experts; ++e) {
        probability_[e] = 1.0 / (1.0 + std::exp(-static_cast<double>(s[e])));
        sum += probability_[e];
      }
      if (sum == 0.0) continue;  // every sigmoid underflowed
    }
    double entropy = 0.0;
    for (size_t e = 0; e < experts; ++e) {
      const double p = probability_[e] / sum;
      stats.probability_sums[e] += p;
      if (p > 0.0) entropy -= p * std::log(p);
    }
    const double logsumexp = max + std::log(exp_sum);
    ++stats.rows;
    stats.entropy_sum += entropy;
    stats.squared_logsumexp_sum += logsumexp * logsumexp;
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int32_t a = plan.assignments_of_row[i];
      const auto* const end = plan.expert_offsets + plan.num_experts + 1;
      ++stats.selections[std::upper_bound(plan.expert_offsets, end, a) - plan.expert_offsets - 1];
    }
  }
}

void ExpertRecorder::OnInputs(int layer, BlockKind block, const RoutingPlan& plan,
                              std::span<const float> inputs) {
  if (options_.observer != nullptr && options_.observer->WantsInputs()) {
    options_.observer->OnInputs(layer, block, plan, inputs);
  }
  if (!WantsInputsItself()) return;
  const int index = layout_.IndexOf(layer, block);
  const int heads = layout_.blocks[index].sub_tokens;
  const std::lock_guard<std::mutex> lock(reservoir_mutex_);
  HiddenReservoir& reservoir = reservoirs_[index];
  const size_t width = static_cast<size_t>(reservoir.sample().width);
  for (int r = 0; r < plan.rows; ++r) {
    if (batch_->phase[r / heads] == Phase::kRecompute) continue;
    if (plan.row_offsets[r] == plan.row_offsets[r + 1]) continue;
    int32_t best = -1;
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int32_t a = plan.assignments_of_row[i];
      if (best < 0 || plan.weight_of_assignment[a] > plan.weight_of_assignment[best]) best = a;
    }
    const auto* const end = plan.expert_offsets + plan.num_experts + 1;
    const auto expert = std::upper_bound(plan.expert_offsets, end, best) - plan.expert_offsets - 1;
    reservoir.Offer(inputs.data() + static_cast<size_t>(r) * width, static_cast<int32_t>(expert));
  }
}

void ExpertRecorder::Publish() {
  const auto move = [](auto& to, auto& from) { to += std::exchange(from, 0); };
  for (int t = 0; t < batch_->num_tokens(); ++t) {
    if (batch_->phase[t] == Phase::kRecompute) {
      ++pending_.recomputed_tokens;
    } else {
      ++pending_.tokens;
      ++pending_.diversity_histogram[diversity_[t]];
    }
  }
  ++pending_.steps;
  const std::lock_guard<std::mutex> lock(mutex_);
  ForEachModelCounter(total_, pending_, move);
  for (size_t i = 0; i < total_.blocks.size(); ++i) {
    if (!std::exchange(touched_[i], 0)) continue;
    ForEachCounter(total_.blocks[i], pending_.blocks[i], move);
    if (sampling_) ForEachRouterCounter(total_.blocks[i].router, pending_.blocks[i].router, move);
  }
}

ExpertStats ExpertRecorder::Snapshot() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return total_;
}

std::vector<HiddenSample> ExpertRecorder::HiddenSamples() const {
  const std::lock_guard<std::mutex> lock(reservoir_mutex_);
  std::vector<HiddenSample> out;
  for (const HiddenReservoir& r : reservoirs_) out.push_back(r.sample());
  return out;
}

}  // namespace moeserve
