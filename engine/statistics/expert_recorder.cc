#include "engine/statistics/expert_recorder.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

#include "base/check.h"
#include "engine/spec/weights.h"
#include "engine/statistics/stats_fields.h"

namespace moeserve {
namespace {

// Between two looks at the counters of a device.
constexpr std::chrono::seconds kMergeInterval{1};

static_assert(static_cast<uint8_t>(Phase::kPrefill) == kTokenPrefill &&
              static_cast<uint8_t>(Phase::kDecode) == kTokenDecode &&
              static_cast<uint8_t>(Phase::kRecompute) == kTokenRecompute);

bool AnySplit(const RouteLayout& layout) {
  return std::any_of(layout.blocks.begin(), layout.blocks.end(),
                     [](const RoutedBlock& b) { return b.sub_tokens > 1; });
}

bool KeepsTokenCounts(const ModelSpec& spec, const RouteLayout& layout,
                      const RecorderOptions& options) {
  const int64_t bytes = TokenExpertCounts::BytesFor(spec.vocab_size, layout.num_experts);
  return layout.num_experts > 0 && bytes <= options.token_counts_bytes;
}

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

CountSettings RecorderCounts(const ModelSpec& spec, const RecorderOptions& options) {
  const RouteLayout layout(spec);
  ExpertStats stats = EmptyExpertStats(spec, options.any_selection);
  const bool split = AnySplit(layout);
  CountSettings settings;
  for (size_t i = 0; i < layout.blocks.size(); ++i) {
    const RoutedBlock& block = layout.blocks[i];
    BlockExpertStats& facts = stats.blocks[i];
    settings.blocks.push_back(
        {.slot = PlanSlot(block.layer, block.block),
         .num_experts = block.num_experts,
         .sub_tokens = block.sub_tokens,
         .most_distinct = static_cast<int>(facts.distinct_histogram.size()) - 1,
         .diverse = !split || block.sub_tokens > 1,
         .expert_parameters = std::move(facts.expert_parameters)});
  }
  if (KeepsTokenCounts(spec, layout, options)) settings.vocabulary = spec.vocab_size;
  return settings;
}

StepLooks RecorderLooks(const RecorderOptions& options) {
  const bool samples = options.router_stats_interval > 0;
  StepLooks looks{samples, samples && options.hidden_samples > 0};
  if (options.observer != nullptr) {
    looks.scores = looks.scores || options.observer->WantsScores();
    looks.inputs = looks.inputs || options.observer->WantsInputs();
  }
  return looks;
}

ExpertRecorder::ExpertRecorder(const ModelSpec& spec, const RecorderOptions& options, RouteLog* log,
                               std::unique_ptr<RouteCounters> device)
    : layout_(spec),
      options_(options),
      log_(log),
      device_(std::move(device)),
      total_(EmptyExpertStats(spec, options.any_selection)) {
  for (const BlockExpertStats& block : total_.blocks) {
    pending_.emplace_back().distinct_histogram.resize(block.distinct_histogram.size());
    pending_router_.push_back(block.router);
    counters_.emplace_back(static_cast<size_t>(block.num_experts));
  }
  const bool split = AnySplit(layout_);
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
  working_.resize(static_cast<size_t>(widest));
  if (KeepsTokenCounts(spec, layout_, options)) {
    token_counts_ = std::make_unique<TokenExpertCounts>(spec.vocab_size, layout_.num_experts);
  }
}

void ExpertRecorder::BeginStep(const Batch& batch) {
  batch_ = &batch;
  keep_routes_ = log_ != nullptr && log_->keeps_routes();
  const size_t tokens = static_cast<size_t>(batch.num_tokens());
  failed_.assign(tokens, false);
  diversity_.assign(tokens, 0);
  token_totals_.assign(tokens, {});
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

void ExpertRecorder::OnOutcome(const StepOutcome& outcome) {
  if (device_ == nullptr) return;  // OnPlan() saw the same
  for (size_t t = 0; t < failed_.size(); ++t) {
    failed_[t] = outcome.failed[t] != 0;
    token_totals_[t] = {outcome.routes[t].routes, outcome.routes[t].parameters};
  }
}

void ExpertRecorder::LogRoutes(const RoutedBlock& block, const RoutingPlan& plan) {
  for (int r = 0; r < plan.rows; ++r) {
    const int t = r / block.sub_tokens, row = block.first_row + r % block.sub_tokens;
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int32_t a = plan.assignments_of_row[i];
      log_->Add(cache_block_[t], batch_->positions[t] % kKvBlockTokens, row,
                plan.expert_of_assignment[a], plan.weight_of_assignment[a]);
    }
  }
}

void ExpertRecorder::OnPlan(int layer, BlockKind block, const RoutingPlan& plan) {
  if (options_.observer != nullptr) options_.observer->OnPlan(layer, block, plan);
  const int index = layout_.IndexOf(layer, block);
  if (device_ != nullptr) {
    if (keep_routes_) LogRoutes(layout_.blocks[index], plan);
    return;
  }
  const RoutedBlock& where = layout_.blocks[index];
  const BlockExpertStats& facts = total_.blocks[index];  // of it, what never changes
  const int heads = where.sub_tokens;
  const int tokens = plan.rows / heads;
  PendingBlock& pending = pending_[index];
  touched_.clear();
  for (int t = 0; t < tokens; ++t) {
    const Phase phase = batch_->phase[t];
    const bool recomputed = phase == Phase::kRecompute;
    const uint32_t decoded = phase == Phase::kDecode;
    const size_t first_count = token_counts_ == nullptr
                                   ? 0
                                   : token_counts_->IndexOf(batch_->tokens[t], where.first_expert);
    RouteLog::Totals totals;
    uint32_t distinct = 0;
    ++mark_;
    for (int r = t * heads; r < (t + 1) * heads; ++r) {
      for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
        const int32_t a = plan.assignments_of_row[i];
        const int e = plan.expert_of_assignment[a];
        const float weight = plan.weight_of_assignment[a];
        Working& expert = working_[e];
        if (expert.rows++ == 0) touched_.push_back(e);
        ++totals.routes;
        totals.parameters += static_cast<uint64_t>(facts.expert_parameters[e]);
        if (keep_routes_) {
          log_->Add(cache_block_[t], batch_->positions[t] % kKvBlockTokens,
                    where.first_row + (r - t * heads), e, weight);
        }
        if (recomputed) {
          ++expert.recomputed;
          continue;
        }
        const uint32_t first = expert.mark != mark_;
        expert.mark = mark_;
        expert.tokens += first;
        distinct += first;
        expert.decoded += decoded;
        expert.weights += weight;
        if (token_counts_ != nullptr) {
          counted_.push_back(first_count + static_cast<size_t>(e));
        }
      }
      if (plan.row_nonfinite[r] != 0) {
        pending.nonfinite_rows += !recomputed;
        if (plan.row_nonfinite[r] == 2) failed_[static_cast<size_t>(t)] = true;
      }
    }
    token_totals_[t].routes += totals.routes;
    token_totals_[t].parameters += totals.parameters;
    if (recomputed) continue;
    ++pending.distinct_histogram[distinct];
    if (diverse_[index]) diversity_[t] += static_cast<int32_t>(distinct);
  }
  pending.active = static_cast<uint32_t>(touched_.size());
  for (const int e : touched_) {
    Working& expert = working_[e];
    active_.push_back({.block = index,
                       .expert = e,
                       .rows = std::exchange(expert.rows, 0),
                       .recomputed = std::exchange(expert.recomputed, 0),
                       .decoded = std::exchange(expert.decoded, 0),
                       .tokens = std::exchange(expert.tokens, 0),
                       .weights = std::exchange(expert.weights, 0.0)});
  }
}

void ExpertRecorder::OnScores(int layer, BlockKind block, const RoutingPlan& plan,
                              std::span<const float> scores) {
  if (options_.observer != nullptr && options_.observer->WantsScores()) {
    options_.observer->OnScores(layer, block, plan, scores);
  }
  if (!sampling_) return;
  const int index = layout_.IndexOf(layer, block);
  const int heads = layout_.blocks[index].sub_tokens;
  const size_t experts = static_cast<size_t>(plan.num_experts);
  // Of many tokens only some are looked at, whole ones since sub-tokens differ by their place, and
  // others each time.
  const int interval = options_.router_stats_interval;
  const int tokens = plan.rows / heads;
  const int wanted = interval > 1 ? std::max(1, options_.router_stats_rows / heads) : tokens;
  const uint64_t stride = static_cast<uint64_t>((tokens + wanted - 1) / wanted);
  const uint64_t sample = (steps_ - 1) / static_cast<uint64_t>(interval);
  for (int r = 0; r < plan.rows; ++r) {
    const int t = r / heads;
    if (static_cast<uint64_t>(t) % stride != sample % stride) continue;
    if (batch_->phase[t] == Phase::kRecompute || plan.row_nonfinite[r] != 0) continue;
    const std::span<const float> row = scores.subspan(static_cast<size_t>(r) * experts, experts);
    chosen_.clear();
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      chosen_.push_back(plan.expert_of_assignment[plan.assignments_of_row[i]]);
    }
    if (device_ == nullptr) {
      AddLook(index, row, chosen_);
      continue;
    }
    looks_.rows.push_back({.block = index, .chosen = chosen_.size()});
    looks_.scores.insert(looks_.scores.end(), row.begin(), row.end());
    looks_.chosen.insert(looks_.chosen.end(), chosen_.begin(), chosen_.end());
  }
}

void ExpertRecorder::AddLook(int block, std::span<const float> scores,
                             std::span<const int32_t> chosen) {
  RouterStats& stats = pending_router_[block];
  const size_t experts = scores.size();
  const double max = *std::max_element(scores.begin(), scores.end());
  double exp_sum = 0.0, sum = 0.0;
  for (size_t e = 0; e < experts; ++e) {
    probability_[e] = std::exp(static_cast<double>(scores[e]) - max);
    exp_sum += probability_[e];
  }
  sum = exp_sum;
  if (sigmoid_[block]) {
    sum = 0.0;
    for (size_t e = 0; e < experts; ++e) {
      probability_[e] = 1.0 / (1.0 + std::exp(-static_cast<double>(scores[e])));
      sum += probability_[e];
    }
    if (sum == 0.0) return;  // every sigmoid underflowed
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
  for (const int32_t e : chosen) ++stats.selections[e];
}

void ExpertRecorder::AddLooks() {
  std::span<const float> scores = looks_.scores;
  std::span<const int32_t> chosen = looks_.chosen;
  for (const Looks::Row& row : looks_.rows) {
    const size_t experts = static_cast<size_t>(layout_.blocks[row.block].num_experts);
    AddLook(row.block, scores.first(experts), chosen.first(row.chosen));
    scores = scores.subspan(experts);
    chosen = chosen.subspan(row.chosen);
  }
  looks_.rows.clear();
  looks_.scores.clear();
  looks_.chosen.clear();
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
    // A profile with a number that is not finite could not be read again.
    if (plan.row_nonfinite[r] != 0) continue;
    if (plan.row_offsets[r] == plan.row_offsets[r + 1]) continue;
    int32_t best = -1;
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int32_t a = plan.assignments_of_row[i];
      if (best < 0 || plan.weight_of_assignment[a] > plan.weight_of_assignment[best]) best = a;
    }
    reservoir.Offer(inputs.data() + static_cast<size_t>(r) * width,
                    plan.expert_of_assignment[best]);
  }
}

void ExpertRecorder::MergeRouterStats() {
  for (size_t i = 0; i < total_.blocks.size(); ++i) {
    ForEachRouterCounter(total_.blocks[i].router, pending_router_[i],
                         [](auto& sum, auto& value) { sum += std::exchange(value, 0); });
  }
}

void ExpertRecorder::Merge() {
  if (merged_) return;
  AddLooks();
  const Result<CountsSnapshot> read = device_->Read();
  MOESERVE_CHECK(read.ok(), "the counters of the device are read");
  merged_ = true;
  merged_at_ = std::chrono::steady_clock::now();
  const CountsSnapshot& counts = *read;
  const std::lock_guard<std::mutex> lock(mutex_);
  total_.steps = counts.model.steps;
  std::copy(std::begin(counts.model.tokens), std::end(counts.model.tokens), tokens_);
  for (int p = 0; p < kNumPhases; ++p) {
    total_.expert_rows[p] = {counts.model.expert_rows[p].buckets, counts.model.expert_rows[p].sum};
    total_.active_experts[p] = {counts.model.active_experts[p].buckets,
                                counts.model.active_experts[p].sum};
  }
  total_.diversity_histogram = counts.diversity_histogram;
  for (size_t i = 0; i < counts.blocks.size(); ++i) {
    const BlockCounts& from = counts.blocks[i];
    total_.blocks[i].nonfinite_rows = from.nonfinite_rows;
    total_.blocks[i].distinct_histogram = from.distinct_histogram;
    for (size_t e = 0; e < from.experts.size(); ++e) {
      const ExpertCount& x = from.experts[e];
      counters_[i][e] = {.selections = x.selections,
                         .decode_selections = x.decode_selections,
                         .recomputed_selections = x.recomputed_selections,
                         .touching_tokens = x.touching_tokens,
                         .visits = x.visits,
                         .weight_sum = x.weight_sum};
    }
  }
  MergeRouterStats();
}

void ExpertRecorder::Publish() {
  if (log_ != nullptr) {
    for (size_t t = 0; t < token_totals_.size(); ++t) {
      log_->AddTotals(cache_block_[t], token_totals_[t]);
    }
  }
  if (device_ != nullptr) {
    merged_ = false;
    if (std::chrono::steady_clock::now() - merged_at_ >= kMergeInterval) Merge();
    return;
  }
  if (token_counts_ != nullptr) token_counts_->Add(counted_);
  counted_.clear();
  const std::lock_guard<std::mutex> lock(mutex_);
  ++total_.steps;
  for (int t = 0; t < batch_->num_tokens(); ++t) {
    const Phase phase = batch_->phase[t];
    ++tokens_[static_cast<int>(phase)];
    if (phase != Phase::kRecompute) ++total_.diversity_histogram[diversity_[t]];
  }
  for (const ActiveExpert& a : active_) {
    ExpertCounters& counters = counters_[a.block][a.expert];
    counters.selections += a.rows - a.recomputed;
    counters.decode_selections += a.decoded;
    counters.recomputed_selections += a.recomputed;
    counters.touching_tokens += a.tokens;
    counters.weight_sum += a.weights;
    ++counters.visits;
    total_.expert_rows[step_kind_].Observe(a.rows);
  }
  active_.clear();
  for (size_t i = 0; i < total_.blocks.size(); ++i) {
    BlockExpertStats& to = total_.blocks[i];
    PendingBlock& from = pending_[i];
    to.nonfinite_rows += std::exchange(from.nonfinite_rows, 0);
    for (size_t n = 0; n < to.distinct_histogram.size(); ++n) {
      to.distinct_histogram[n] += std::exchange(from.distinct_histogram[n], 0);
    }
    total_.active_experts[step_kind_].Observe(std::exchange(from.active, 0));
  }
  if (sampling_) MergeRouterStats();
}

const TokenExpertCounts* ExpertRecorder::token_counts() const {
  if (device_ == nullptr || token_counts_ == nullptr) return token_counts_.get();
  const std::lock_guard<std::mutex> lock(refresh_mutex_);
  std::vector<uint32_t> part(size_t{1} << 18);
  for (int64_t first = 0; first < token_counts_->size();) {
    part.resize(static_cast<size_t>(
        std::min<int64_t>(static_cast<int64_t>(part.size()), token_counts_->size() - first)));
    MOESERVE_CHECK(device_->ReadTokenExperts(first, part).ok(), "the device's counters are read");
    token_counts_->Assign(first, part);
    first += static_cast<int64_t>(part.size());
  }
  return token_counts_.get();
}

ExpertStats ExpertRecorder::Snapshot() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ExpertStats stats = total_;
  constexpr int kRecompute = static_cast<int>(Phase::kRecompute);
  stats.tokens = tokens_[0] + tokens_[1];
  stats.recomputed_tokens = tokens_[kRecompute];
  for (size_t i = 0; i < stats.blocks.size(); ++i) {
    BlockExpertStats& b = stats.blocks[i];
    const uint64_t heads = static_cast<uint64_t>(b.split_heads);
    for (int p = 0; p < kNumPhases; ++p) {
      b.tokens[p] = tokens_[p];
      b.rows[p] = tokens_[p] * heads;
    }
    b.recomputed_tokens = tokens_[kRecompute];
    b.recomputed_rows = tokens_[kRecompute] * heads;
    for (size_t e = 0; e < counters_[i].size(); ++e) {
      const ExpertCounters& from = counters_[i][e];
      b.selections[e] = from.selections;
      b.decode_selections[e] = from.decode_selections;
      b.recomputed_selections[e] = from.recomputed_selections;
      b.touching_tokens[e] = from.touching_tokens;
      b.weight_sums[e] = from.weight_sum;
      b.visits[e] = from.visits;
    }
  }
  return stats;
}

std::vector<HiddenSample> ExpertRecorder::HiddenSamples() const {
  const std::lock_guard<std::mutex> lock(reservoir_mutex_);
  std::vector<HiddenSample> out;
  for (const HiddenReservoir& r : reservoirs_) out.push_back(r.sample());
  return out;
}

}  // namespace moeserve
