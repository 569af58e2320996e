#include "engine/statistics/expert_recorder.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/spec/weights.h"
#include "kernels/base/routing.h"

namespace moeserve {
namespace {

// Shortest time between two refreshes while requests run; a refresh waits for the device.
constexpr std::chrono::seconds kRefreshInterval{1};
constexpr uint64_t kStepsPerClock = 8;  // the clock is read every 8 steps

bool AnySplit(const RouteLayout& layout) {
  return std::any_of(layout.blocks.begin(), layout.blocks.end(),
                     [](const RoutedBlock& b) { return b.sub_tokens > 1; });
}

constexpr int64_t kFewestRows = 16;  // a table of fewer frequent tokens is not kept

// Sets the shape of the token x expert table.
void ChooseTable(const ModelSpec& spec, const RouteLayout& layout, const RecorderOptions& options,
                 CountSettings& settings) {
  if (layout.num_experts == 0) return;
  const int64_t rows =
      options.token_counts_bytes / TokenExpertCounts::BytesFor(1, layout.num_experts);
  const int vocabulary = LargestVocabulary(spec);
  if (rows >= vocabulary) {
    settings.vocabulary = vocabulary;
  } else if (options.frequent_tokens && rows >= kFewestRows) {
    settings.vocabulary = vocabulary;
    settings.own_rows = rows - 1;
  }
}

// `name` is that of a tensor behind the prefix of its stack.
bool IsEmbeddingOrHead(std::string_view name) {
  return name.starts_with("embed") || name.starts_with("head.");
}

// Returns a stack's tensors but tables of ids, embeddings and the LM head. RequiredTensors() of a
// decoder include those of the encoder beside it, and of its prediction layers.
std::vector<TensorRequirement> CountedTensors(const ModelSpec& spec) {
  std::vector<TensorRequirement> tensors = RequiredTensors(spec);
  std::erase_if(tensors, [&](const TensorRequirement& t) {
    std::string_view name = t.name;
    if (spec.stack == Stack::kDecoder && name.starts_with(TensorPrefix(Stack::kEncoder))) {
      return true;
    }
    if (IsOfPrediction(name)) return true;
    const std::string_view prefix = TensorPrefix(spec.stack);
    if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
    return t.ids || IsEmbeddingOrHead(name);
  });
  return tensors;
}

// Returns the expert's index: "blocks.3.attention.experts.7.q.weight" -> 7; -1 if the tensor
// belongs to no routed expert of the block.
int ExpertOf(const std::string& name, const std::string& block_prefix) {
  const std::string prefix = block_prefix + ".experts.";
  if (!name.starts_with(prefix)) return -1;
  int expert = -1;
  std::from_chars(name.data() + prefix.size(), name.data() + name.size(), expert);
  return expert;
}

BlockExpertStats EmptyBlock(const BlockSpec& owner, const RoutedBlock& block, bool any_selection) {
  const RoutedLayerSpec& spec = *owner.routing();
  const size_t experts = static_cast<size_t>(spec.num_experts);
  BlockExpertStats b;
  b.layer = block.layer;
  b.block = block.block;
  b.num_experts = spec.num_experts;
  b.split_heads = spec.split.heads;
  b.select = spec.select.kind;
  b.max_selected = spec.select.MaxSelected();
  for (auto* counts : {&b.selections, &b.decode_selections, &b.touching_tokens, &b.visits,
                       &b.recomputed_selections, &b.rejected_selections, &b.router.selections}) {
    counts->resize(experts);
  }
  b.weight_sums.resize(experts);
  b.router.probability_sums.resize(experts);
  b.expert_parameters.resize(experts);
  if (!spec.widths.empty()) b.expert_widths = spec.PlaceWidths();
  b.expert_widths.resize(experts);  // experts without matrices have the width 0
  const AttentionSpec* const a =
      owner.attention() != nullptr ? owner.attention() : owner.cross_attention();
  if (a != nullptr) {
    b.expert_widths.assign(experts, a->routed() ? a->num_kv_heads * a->head_dim : a->value_width());
  }
  const int distinct =
      any_selection ? spec.num_experts : std::min(spec.num_experts, b.split_heads * b.max_selected);
  b.distinct_histogram.resize(static_cast<size_t>(distinct) + 1);
  return b;
}

// Adds `from` to `to` and clears `from`.
void AddAndClear(RouterStats& to, RouterStats& from) {
  const auto add = [](auto& sum, auto& value) { sum += std::exchange(value, 0); };
  add(to.rows, from.rows);
  add(to.entropy_sum, from.entropy_sum);
  add(to.squared_logsumexp_sum, from.squared_logsumexp_sum);
  for (size_t e = 0; e < to.selections.size(); ++e) {
    add(to.probability_sums[e], from.probability_sums[e]);
    add(to.selections[e], from.selections[e]);
  }
}

// Copies `counts` to the counters of `stats`, which must be 0 before.
void AddCounts(const CountsSnapshot& counts, ExpertStats& stats) {
  const ModelCounts& model = counts.model;
  const uint64_t recomputed = model.tokens[kTokenRecompute];
  const uint64_t rejected = model.tokens[kTokenRejected];
  stats.steps = model.steps;
  stats.tokens = model.tokens[kTokenPrefill] + model.tokens[kTokenDecode];
  stats.recomputed_tokens = recomputed;
  stats.rejected_tokens = rejected;
  stats.diversity_histogram = counts.diversity_histogram;
  for (int p = 0; p < kNumPhases; ++p) {
    stats.expert_rows[p] = model.expert_rows[p];
    stats.active_experts[p] = model.active_experts[p];
  }
  for (size_t i = 0; i < counts.blocks.size(); ++i) {
    const BlockCounts& from = counts.blocks[i];
    BlockExpertStats& to = stats.blocks[i];
    const uint64_t heads = static_cast<uint64_t>(to.split_heads);
    for (int p = 0; p < kNumPhases; ++p) {
      to.tokens[p] = model.tokens[p];
      to.rows[p] = model.tokens[p] * heads;
    }
    to.recomputed_tokens = recomputed;
    to.recomputed_rows = recomputed * heads;
    to.rejected_tokens = rejected;
    to.rejected_rows = rejected * heads;
    to.nonfinite_rows = from.nonfinite_rows;
    to.distinct_histogram = from.distinct_histogram;
    for (size_t e = 0; e < from.experts.size(); ++e) {
      const ExpertCount& x = from.experts[e];
      to.selections[e] = x.selections;
      to.decode_selections[e] = x.decode_selections;
      to.recomputed_selections[e] = x.recomputed_selections;
      to.rejected_selections[e] = x.rejected_selections;
      to.touching_tokens[e] = x.touching_tokens;
      to.weight_sums[e] = x.weight_sum;
      to.visits[e] = x.visits;
    }
  }
}

// Returns the options without an observer of another stack.
RecorderOptions OptionsOf(const ModelSpec& spec, RecorderOptions options) {
  if ((spec.stack == Stack::kEncoder) != options.observes_encoder) options.observer = nullptr;
  return options;
}

}  // namespace

ExpertStats EmptyExpertStats(const ModelSpec& spec, bool any_selection) {
  ExpertStats stats;
  stats.stack = spec.stack;
  const RouteLayout layout(spec);
  std::vector<std::string> names;  // of the routed blocks
  bool split = false;
  for (const RoutedBlock& block : layout.blocks) {
    const BlockSpec& owner = spec.blocks[static_cast<size_t>(block.slot)];
    names.push_back(owner.name());
    stats.blocks.push_back(EmptyBlock(owner, block, any_selection));
    stats.blocks.back().stack = spec.stack;
    split = split || block.sub_tokens > 1;
  }
  size_t most_distinct = 0;
  for (const BlockExpertStats& b : stats.blocks) {
    if (split && b.split_heads == 1) continue;
    ++stats.diversity_blocks;
    most_distinct += b.distinct_histogram.size() - 1;
  }
  stats.diversity_histogram.resize(most_distinct + 1);
  for (const TensorRequirement& t : CountedTensors(spec)) {
    int64_t size = 1;
    for (int64_t s : t.shape) size *= s;
    bool expert = false;
    for (size_t i = 0; i < names.size(); ++i) {
      const int e = ExpertOf(t.name, names[i]);
      if (e < 0) continue;
      stats.blocks[i].expert_parameters[e] += size;
      expert = true;
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
        {.slot = block.slot,
         .num_experts = block.num_experts,
         .sub_tokens = block.sub_tokens,
         .most_distinct = static_cast<int>(facts.distinct_histogram.size()) - 1,
         .in_diversity = !split || block.sub_tokens > 1,
         .expert_parameters = std::move(facts.expert_parameters)});
  }
  ChooseTable(spec, layout, options, settings);
  return settings;
}

ReportContents RecorderReportContents(const RecorderOptions& options) {
  const bool samples = options.router_stats_interval > 0;
  ReportContents contents{.scores = samples, .inputs = samples && options.hidden_samples > 0};
  if (options.observer != nullptr) contents = contents | options.observer->contents();
  return contents;
}

ExpertRecorder::ExpertRecorder(const ModelSpec& spec, const RecorderOptions& options, RouteLog* log,
                               std::unique_ptr<RouteCounters> counters)
    : layout_(spec),
      options_(OptionsOf(spec, options)),
      log_(log),
      counters_(std::move(counters)),
      empty_(EmptyExpertStats(spec, options.any_selection)) {
  int widest = 0;
  for (const RoutedBlock& block : layout_.blocks) {
    gates_.push_back(RoutingOf(spec, block).gate);
    widest = std::max(widest, block.num_experts);
    if (options.hidden_samples > 0) {
      reservoirs_.emplace_back(options.hidden_samples, spec.hidden_size / block.sub_tokens,
                               reservoirs_.size());
    }
  }
  for (const BlockExpertStats& block : empty_.blocks) router_.push_back(block.router);
  partial_ = router_;
  probability_.resize(static_cast<size_t>(widest));
  CountSettings table;
  ChooseTable(spec, layout_, options, table);
  table_rows_ = table.table_rows();
  if (table.own_rows > 0) rows_.emplace(table.vocabulary, table.own_rows);
}

StepOptions ExpertRecorder::BeginStep(std::span<const int32_t> tokens) {
  if (rows_ && counters_ != nullptr) {
    if (const auto changes = rows_->Assign(tokens); !changes.empty()) {
      counters_->AssignTokenRows(changes);
    }
  }
  const int interval = options_.router_stats_interval;
  sampling_ = interval > 0 && steps_ % static_cast<uint64_t>(interval) == 0;
  log_routes_ = log_ != nullptr && log_->keeps_routes();
  ++steps_;
  StepOptions step;
  step.report = {.plans = log_routes_, .scores = sampling_, .inputs = samples_inputs()};
  if (options_.observer != nullptr) step.report = step.report | options_.observer->contents();
  step.counters = counters_.get();
  if (std::exchange(has_samples_, false)) {
    step.meanwhile = [this] {
      const MutexLock lock(router_mutex_);
      SumSamples();
    };
  }
  return step;
}

void ExpertRecorder::EndStep(const Batch& batch, const StepReport& report) {
  fresh_ = false;
  has_samples_ = sampling_;
  for (const BlockReport& block : report.blocks) {
    if (log_routes_) LogRoutes(batch, block);
    if (sampling_) SampleScores(batch, block);
    if (samples_inputs()) SampleInputs(batch, block);
  }
  if (options_.observer != nullptr) options_.observer->OnStep(batch, report);
  if (log_ != nullptr) {
    for (size_t t = 0; t < report.routes.size(); ++t) {
      if (batch.phase[t] == Phase::kRejected) continue;  // the token is not part of its sequence
      log_->AddTotals(batch.RoutePageOf(t), report.routes[t]);
    }
  }
  if (steps_ % kStepsPerClock == 0 &&
      std::chrono::steady_clock::now() - refreshed_at_ >= kRefreshInterval) {
    Refresh();
  }
}

void ExpertRecorder::Refresh() {
  if (fresh_ || counters_ == nullptr) return;
  MOESERVE_CHECK(counters_->Refresh().ok(), "the counters of the device are read");
  if (rows_) rows_->Publish();
  fresh_ = true;
  refreshed_at_ = std::chrono::steady_clock::now();
}

void ExpertRecorder::LogRoutes(const Batch& batch, const BlockReport& report) {
  const RoutingPlan& plan = report.plan;
  const RoutedBlock& block = layout_.blocks[static_cast<size_t>(report.index)];
  for (int r = 0; r < plan.rows; ++r) {
    const auto t = static_cast<size_t>(r / block.sub_tokens);
    if (batch.phase[t] == Phase::kRejected) continue;  // the token is not part of its sequence
    const int row = block.first_row + r % block.sub_tokens;
    const int32_t page = batch.RoutePageOf(t);
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int32_t a = plan.assignments_of_row[i];
      log_->Add(page, batch.positions[t] % kPageTokens, row, plan.expert_of_assignment[a],
                plan.weight_of_assignment[a]);
    }
  }
}

void ExpertRecorder::SampleScores(const Batch& batch, const BlockReport& report) {
  const RoutingPlan& plan = report.plan;
  const int index = report.index;
  const int heads = layout_.blocks[static_cast<size_t>(index)].sub_tokens;
  const size_t experts = static_cast<size_t>(plan.num_experts);
  // Samples whole tokens, because the sub-tokens of a token differ systematically, and different
  // tokens each time.
  const int interval = options_.router_stats_interval;
  const int tokens = plan.rows / heads;
  const int wanted = interval > 1 ? std::max(1, options_.router_stats_rows / heads) : tokens;
  const uint64_t stride = static_cast<uint64_t>((tokens + wanted - 1) / wanted);
  const uint64_t sample = (steps_ - 1) / static_cast<uint64_t>(interval);
  const MutexLock lock(router_mutex_);
  for (int r = 0; r < plan.rows; ++r) {
    const int t = r / heads;
    if (static_cast<uint64_t>(t) % stride != sample % stride) continue;
    if (IsCountedApart(batch.phase[t]) || plan.row_nonfinite[r] != 0) continue;
    const auto row = report.scores.subspan(static_cast<size_t>(r) * experts, experts);
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      samples_.chosen.push_back(plan.expert_of_assignment[plan.assignments_of_row[i]]);
    }
    const auto chosen = static_cast<size_t>(plan.row_offsets[r + 1] - plan.row_offsets[r]);
    samples_.rows.push_back({.block = index, .chosen = chosen});
    samples_.scores.insert(samples_.scores.end(), row.begin(), row.end());
  }
}

void ExpertRecorder::AddRow(int block, std::span<const float> scores,
                            std::span<const int32_t> chosen) const {
  RouterStats& stats = partial_[static_cast<size_t>(block)];
  const GateKind gate = gates_[static_cast<size_t>(block)];
  const size_t experts = scores.size();
  const double max = *std::max_element(scores.begin(), scores.end());
  double exp_sum = 0.0, sum = 0.0;
  for (size_t e = 0; e < experts; ++e) {
    exp_sum += std::exp(static_cast<double>(scores[e]) - max);
    probability_[e] = GateValueInDouble(gate, scores[e], max);
    sum += probability_[e];
  }
  if (sum == 0.0) return;  // every gate value underflowed
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
  for (const int32_t e : chosen) ++stats.selections[static_cast<size_t>(e)];
}

void ExpertRecorder::SumSamples() const {
  std::span<const float> scores = samples_.scores;
  std::span<const int32_t> chosen = samples_.chosen;
  for (const SampledRows::Row& row : samples_.rows) {
    const auto experts =
        static_cast<size_t>(layout_.blocks[static_cast<size_t>(row.block)].num_experts);
    AddRow(row.block, scores.first(experts), chosen.first(row.chosen));
    scores = scores.subspan(experts);
    chosen = chosen.subspan(row.chosen);
  }
  if (samples_.rows.empty()) return;
  // Each step's rows are first summed in partial_, which is then added to the totals. So the
  // rounding of the totals depends only on the steps, not on when a snapshot was taken.
  for (size_t i = 0; i < router_.size(); ++i) AddAndClear(router_[i], partial_[i]);
  samples_.rows.clear();
  samples_.scores.clear();
  samples_.chosen.clear();
}

void ExpertRecorder::SampleInputs(const Batch& batch, const BlockReport& report) {
  const RoutingPlan& plan = report.plan;
  const auto index = static_cast<size_t>(report.index);
  const int heads = layout_.blocks[index].sub_tokens;
  const MutexLock lock(reservoir_mutex_);
  HiddenReservoir& reservoir = reservoirs_[index];
  const size_t width = static_cast<size_t>(reservoir.sample().width);
  for (int r = 0; r < plan.rows; ++r) {
    if (IsCountedApart(batch.phase[r / heads])) continue;
    // Rows with non-finite values are left out, because profile files can hold only finite numbers.
    if (plan.row_nonfinite[r] != 0) continue;
    if (plan.row_offsets[r] == plan.row_offsets[r + 1]) continue;
    int32_t best = -1;
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int32_t a = plan.assignments_of_row[i];
      if (best < 0 || plan.weight_of_assignment[a] > plan.weight_of_assignment[best]) best = a;
    }
    reservoir.Offer(report.inputs.data() + static_cast<size_t>(r) * width,
                    plan.expert_of_assignment[best]);
  }
}

std::optional<TokenExpertCounts> ExpertRecorder::token_counts() const {
  if (counters_ == nullptr || table_rows_ == 0) return std::nullopt;
  TokenExpertCounts::Owners owners;
  if (rows_) owners = [this] { return rows_->Owners(); };
  return TokenExpertCounts(
      table_rows_, layout_.num_experts,
      [this](int64_t first, std::span<uint32_t> part) {
        return counters_->ReadTokenExperts(first, part);
      },
      std::move(owners));
}

ExpertStats ExpertRecorder::Snapshot() const {
  ExpertStats stats = empty_;
  if (counters_ == nullptr) return stats;
  AddCounts(counters_->Read(), stats);
  const MutexLock lock(router_mutex_);
  SumSamples();
  for (size_t i = 0; i < stats.blocks.size(); ++i) stats.blocks[i].router = router_[i];
  return stats;
}

std::vector<HiddenSample> ExpertRecorder::HiddenSamples() const {
  const MutexLock lock(reservoir_mutex_);
  std::vector<HiddenSample> out;
  for (const HiddenReservoir& r : reservoirs_) out.push_back(r.sample());
  return out;
}

}  // namespace moeserve
