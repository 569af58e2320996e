#include "kernels/cpu/routing.h"

#include <algorithm>
#include <limits>
#include <new>

#include "base/check.h"
#include "kernels/base/routing.h"
#include "kernels/cpu/route_counters.h"

namespace moeserve::cpu {
namespace {

// Removes masked experts from a selection and returns the number of experts left. At most
// RouteOverride::allowed experts are selected, and an expert masked by -Inf ranks behind all finite
// scores. So a selection contains one only if an expert that is not masked has the score -Inf or
// NaN.
int WithoutMasked(const float* bias, int count, int32_t* experts, float* weights) {
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    if (IsMasked(bias[experts[i]])) continue;
    experts[kept] = experts[i];
    weights[kept++] = weights[i];
  }
  return kept;
}

// Converts `rows` [rows, n] to the panel layout that KernelTable::contract_dots reads.
std::vector<float> RouterPanels(const std::vector<float>& rows, int64_t n) {
  const int64_t count = static_cast<int64_t>(rows.size()) / n;
  std::vector<float> panels(static_cast<size_t>((count + kPanel - 1) / kPanel * kPanel * n));
  for (int64_t r = 0; r < count; ++r) {
    float* to = panels.data() + r / kPanel * kPanel * n + r % kPanel;
    for (int64_t i = 0; i < n; ++i) to[i * kPanel] = rows[r * n + i];
  }
  return panels;
}

}  // namespace

CpuRouter::CpuRouter(const RouteSettings& settings, const RouterTensors& tensors)
    : settings_(settings), table_(tensors.table) {
  if (tensors.bias.data != nullptr) bias_ = Widened(tensors.bias);
  if (tensors.choice_bias.data != nullptr) choice_bias_ = Widened(tensors.choice_bias);
  if (tensors.row_weight.data != nullptr) row_weight_ = Widened(tensors.row_weight);
  if (tensors.expert_scale.data != nullptr) expert_scale_ = Widened(tensors.expert_scale);
  switch (settings.score) {
    case ScoreKind::kDot:
      weights_ = RouterPanels(Widened(tensors.weight), settings.input_width);
      break;
    case ScoreKind::kCosine: {
      weights_ = RouterPanels(Widened(tensors.projection), settings.input_width);
      std::vector<float> experts = Widened(tensors.weight);
      NormaliseExperts(settings, experts.data());
      experts_ = RouterPanels(experts, settings.dim);
      temperature_ = ResolvedTemperature(settings.temperature, tensors.temperature);
      break;
    }
  }
}

void CpuRouter::ChangeRow(const float* x, float* out, const KernelTable& table) const {
  const int n = settings_.input_width;
  const float factor = settings_.row_norm == RowNorm::kNone
                           ? 1.0f
                           : RowFactor(table.contract_dot(x, x, n), n, settings_.norm_eps);
  for (int i = 0; i < n; ++i) {
    const float weight = row_weight_.empty() ? 1.0f : row_weight_[i];
    out[i] = ChangedElement(settings_, x[i], factor, weight);
  }
}

void CpuRouter::Scores(std::span<const float* const> x, float* scratch, float* const* scores,
                       const KernelTable& table) const {
  const int rows = static_cast<int>(x.size());
  const int products = ProductsOf(settings_);
  const bool cosine = settings_.score == ScoreKind::kCosine;
  float* u[kMaxRows];
  for (int r = 0; r < rows; ++r) u[r] = cosine ? scratch + int64_t{r} * products : scores[r];
  table.contract_dots(weights_.data(), x.data(), rows, settings_.input_width, products, u);
  for (int r = 0; r < rows; ++r) {
    if (!bias_.empty()) {
      for (int i = 0; i < products; ++i) u[r][i] += bias_[i];
    }
    if (cosine && settings_.normalize_row) {
      const float divisor = NormDivisor(table.contract_dot(u[r], u[r], products), settings_.eps);
      for (int i = 0; i < products; ++i) u[r][i] /= divisor;
    }
  }
  if (!cosine) return;
  table.contract_dots(experts_.data(), u, rows, products, settings_.num_experts, scores);
  for (int r = 0; r < rows; ++r) {
    for (int e = 0; e < settings_.num_experts; ++e) {
      scores[r][e] = WithTemperature(settings_.temperature, scores[r][e], temperature_);
    }
  }
}

void RoutingOps::BeginStep() {
  for (PlanSlot& slot : slots_) slot.routed = false;
  failed_.assign(step_.token_ids.size(), 0);
  routes_.clear();
}

void RoutingOps::SelectRows(const RouteArgs& args, int widest,
                            std::vector<uint8_t>& row_nonfinite) {
  const CpuRouter& router = static_cast<const CpuRouter&>(*args.router);
  const RouteSettings& settings = router.settings();
  const int64_t rows = args.input.rows;
  const int experts = settings.num_experts;
  const bool listed = settings.select == SelectKind::kTable;
  const auto tokens = static_cast<int64_t>(step_.token_ids.size());
  MOESERVE_CHECK(!listed || rows == 0 || (tokens > 0 && rows % tokens == 0),
                 "a router with a table routes the tokens of a step");
  const int64_t sub_tokens = listed && rows > 0 ? rows / tokens : 1;
  counts_.resize(static_cast<size_t>(rows));
  chosen_.experts.resize(static_cast<size_t>(rows) * widest);
  chosen_.weights.resize(static_cast<size_t>(rows) * widest);
  const int64_t work =
      int64_t{ProductsOf(settings)} * settings.input_width / 8 + int64_t{experts} * 32;
  constexpr int kMost = CpuRouter::kMaxRows;
  // Rows whose scores are computed together read the router's weights once, but fewer than that for
  // a thread would leave others idle.
  const int64_t unit = rows >= int64_t{kMost} * workers_.threads() ? kMost : 1;
  workers_.ForRows(
      (rows + unit - 1) / unit, work * unit, [&](int64_t begin, int64_t end_unit, int worker) {
        const int64_t end = std::min(end_unit * unit, rows);
        Scratch& scratch = scratch_[worker];
        const auto width = static_cast<size_t>(settings.input_width);
        const auto scored = static_cast<size_t>(experts);
        float* widened = workers_.Floats(
            worker, kMost * (width + scored) + router.scratch_floats() + 2 * scored);
        float* all_scores = widened + kMost * width;
        float* values = all_scores + kMost * scored;  // and gates
        float* router_scratch = values + 2 * scored;
        if (scratch.keys.size() < scored) {
          scratch.keys.resize(scored);
          scratch.orders.resize(scored);
        }
        for (int64_t first = begin * unit; first < end; first += kMost) {
          const int count = static_cast<int>(std::min<int64_t>(kMost, end - first));
          const float* x[kMost];
          float* scores[kMost];
          for (int i = 0; i < count; ++i) {
            scores[i] = all_scores + static_cast<size_t>(i) * scored;
            x[i] = RouterInput(args, router, first + i, widened + static_cast<size_t>(i) * width);
          }
          router.Scores({x, static_cast<size_t>(count)}, router_scratch, scores, table_);
          for (int i = 0; i < count; ++i) {
            const int64_t r = first + i;
            const int32_t token = listed ? step_.token_ids[static_cast<size_t>(r / sub_tokens)] : 0;
            SelectRow(args, router, r, router.TableRow(token), scores[i], values, widest, scratch,
                      &row_nonfinite[r]);
          }
        }
      });
}

const float* RoutingOps::RouterInput(const RouteArgs& args, const CpuRouter& router, int64_t row,
                                     float* changed) const {
  const RouteSettings& settings = router.settings();
  const float* x = reinterpret_cast<const float*>(args.input.row(row));
  if (args.input.dtype == DType::kBF16) {
    table_.widen_bf16(reinterpret_cast<const Bf16*>(args.input.row(row)), changed,
                      settings.input_width);
    x = changed;
  }
  if (!ChangesRow(settings)) return x;
  router.ChangeRow(x, changed, table_);
  return changed;
}

void RoutingOps::SelectRow(const RouteArgs& args, const CpuRouter& router, int64_t row,
                           const int32_t* listed, float* scores, float* values, int widest,
                           Scratch& scratch, uint8_t* nonfinite) {
  const RouteSettings& settings = router.settings();
  const int experts = settings.num_experts;
  if (args.scores != nullptr) {
    std::copy_n(scores, experts, reinterpret_cast<float*>(args.scores->row(row)));
  }
  const RouteOverride* change = args.overrides.empty() ? nullptr : &args.overrides[row];
  const float* bias = change == nullptr ? nullptr : change->bias;
  for (int e = 0; bias != nullptr && e < experts; ++e) scores[e] += bias[e];
  int32_t* row_experts = chosen_.experts.data() + row * widest;
  float* row_weights = chosen_.weights.data() + row * widest;
  int count = table_.route_row(
      {.settings = &settings,
       .selection = change == nullptr ? SelectionOf(settings) : SelectionOf(settings, *change),
       .choice_bias = router.choice_bias(),
       .expert_scale = router.expert_scale(),
       .listed = listed,
       .scores = scores,
       .keys = scratch.keys.data(),
       .orders = scratch.orders.data(),
       .values = values,
       .gates = values + experts,
       .experts = row_experts,
       .weights = row_weights,
       .status = nonfinite});
  if (bias != nullptr) count = WithoutMasked(bias, count, row_experts, row_weights);
  counts_[row] = count;
}

RoutingPlan RoutingOps::Route(const RouteArgs& args) {
  const CpuRouter& router = static_cast<const CpuRouter&>(*args.router);
  const RouteSettings& settings = router.settings();
  const int rows = static_cast<int>(args.input.rows);
  const int experts = settings.num_experts;
  const int widest = WidestRow(settings, args.overrides);
  const auto index = static_cast<size_t>(args.slot);
  if (slots_.size() <= index) slots_.resize(index + 1);
  PlanSlot& slot = slots_[index];
  slot.row_nonfinite.assign(static_cast<size_t>(rows), 0);
  if (args.given != nullptr) {
    BuildPlan(rows, experts, *args.given, slot);
    return slot.plan;
  }

  SelectRows(args, widest, slot.row_nonfinite);

  chosen_.offsets.resize(static_cast<size_t>(rows) + 1);
  chosen_.offsets[0] = 0;
  int64_t total = 0;
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < counts_[r]; ++i) {
      chosen_.experts[total + i] = chosen_.experts[int64_t{r} * widest + i];
      chosen_.weights[total + i] = chosen_.weights[int64_t{r} * widest + i];
    }
    total += counts_[r];
    // Plans have 32-bit offsets; callers treat a step that is too large as one without memory.
    if (total > std::numeric_limits<int32_t>::max()) throw std::bad_alloc();
    chosen_.offsets[r + 1] = static_cast<int32_t>(total);
  }
  chosen_.experts.resize(static_cast<size_t>(total));
  chosen_.weights.resize(static_cast<size_t>(total));
  BuildPlan(rows, experts, chosen_, slot);
  MarkFailed(slot.row_nonfinite);
  return slot.plan;
}

void RoutingOps::MarkFailed(std::span<const uint8_t> row_nonfinite) {
  constexpr uint8_t kNoLargest = 2;  // RoutingPlan::row_nonfinite: no finite largest score
  // A router called outside of a step has no tokens to mark.
  if (failed_.empty() || row_nonfinite.size() % failed_.size() != 0) return;
  const size_t sub_tokens = row_nonfinite.size() / failed_.size();
  for (size_t r = 0; r < row_nonfinite.size(); ++r) {
    if (row_nonfinite[r] == kNoLargest) failed_[r / sub_tokens] = 1;
  }
}

void RoutingOps::BuildPlan(int rows, int experts, const GivenRoutes& routes, PlanSlot& slot) {
  const size_t total = routes.experts.size();
  slot.expert_offsets.assign(static_cast<size_t>(experts) + 1, 0);
  for (int32_t e : routes.experts) ++slot.expert_offsets[e + 1];
  for (int e = 0; e < experts; ++e) slot.expert_offsets[e + 1] += slot.expert_offsets[e];
  slot.expert_of_assignment.resize(total);
  slot.row_of_assignment.resize(total);
  slot.weight_of_assignment.resize(total);
  slot.assignments_of_row.resize(total);
  slot.row_offsets = routes.offsets;
  // This is a counting sort by expert; within an expert, rows stay in order.
  std::vector<int32_t>& next = counts_;
  next.assign(slot.expert_offsets.begin(), slot.expert_offsets.end() - 1);
  for (int r = 0; r < rows; ++r) {
    for (int32_t i = routes.offsets[r]; i < routes.offsets[r + 1]; ++i) {
      const int32_t a = next[routes.experts[i]]++;
      slot.expert_of_assignment[a] = routes.experts[i];
      slot.row_of_assignment[a] = r;
      slot.weight_of_assignment[a] = routes.weights[i];
      slot.assignments_of_row[i] = a;
    }
  }
  slot.routed = true;
  slot.plan = {.rows = rows,
               .num_experts = experts,
               .num_assignments = static_cast<int>(total),
               .capacity = static_cast<int>(total),
               .expert_offsets = slot.expert_offsets.data(),
               .expert_of_assignment = slot.expert_of_assignment.data(),
               .row_of_assignment = slot.row_of_assignment.data(),
               .weight_of_assignment = slot.weight_of_assignment.data(),
               .row_offsets = slot.row_offsets.data(),
               .assignments_of_row = slot.assignments_of_row.data(),
               .row_nonfinite = slot.row_nonfinite.data()};
}

std::span<const TokenRoutes> RoutingOps::CountRoutes(std::span<const uint8_t> kind) {
  auto& counters = static_cast<CpuRouteCounters&>(*step_.counters);
  counted_plans_.clear();
  for (const CountedBlock& block : counters.settings().blocks) {
    const size_t slot = static_cast<size_t>(block.slot);
    const bool routed = slot < slots_.size() && slots_[slot].routed;
    counted_plans_.push_back(routed ? &slots_[slot].plan : nullptr);
  }
  routes_.resize(step_.token_ids.size());
  counters.Count(kind, step_.token_ids, counted_plans_, routes_);
  return routes_;
}

}  // namespace moeserve::cpu
