// Routing: every backend must be bit-identical to the scalar model of the contract
// (tests/reference/router_contract.h), that model must agree with double arithmetic, and routing
// plans must keep their invariants.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>

#include "base/kinds.h"
#include "kernels/base/exp.h"
#include "tests/reference/router_contract.h"
#include "tests/support/backends.h"
#include "tests/support/device_rows.h"
#include "tests/support/gate_settings.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

using Gate = GateKind;
using Score = ScoreKind;
using Temperature = TemperatureKind;

struct Case {
  RouteSettings settings;
  bool bias = false;
  float temperature = 0.0f;
  uint64_t seed = 0;
};

// Adds a random choice bias, groups of experts, both or none.
void AddChoice(Case& c, Random& random) {
  RouteSettings& s = c.settings;
  s.choice_bias = random.Below(3) != 0;
  std::vector<int> divisors;
  for (int g = 1; g <= std::min(s.num_experts, kMaxExpertGroups); ++g) {
    if (s.num_experts % g == 0) divisors.push_back(g);
  }
  s.groups = divisors[static_cast<size_t>(random.Below(static_cast<int>(divisors.size())))];
  s.best_groups = 1 + random.Below(s.groups);
  const int size = s.num_experts / s.groups;
  s.group_score =
      size > 1 && random.Below(2) == 1 ? GroupScoreKind::kSumOfTwo : GroupScoreKind::kMax;
  s.group_mask = random.Below(2) == 1 ? GroupMaskKind::kZero : GroupMaskKind::kMinusInfinity;
  s.k = std::min(s.k, size * s.best_groups);
}

// The number of rows of the tables of routers.
constexpr int kVocabulary = 7;

int32_t TokenOf(int row) { return static_cast<int32_t>(row * 5 % kVocabulary); }

// Adds cases that change the rows before the scores, multiply the weights of experts, or take the
// experts from a table.
void AddRareCases(std::vector<Case>& cases) {
  for (Gate gate : AllKinds<Gate>()) {
    uint64_t seed = 40000 + 100 * static_cast<uint64_t>(gate);
    for (int experts : {1, 3, 10, 33, 300}) {
      for (int width : {4, 32, 250, 300}) {
        Case c;
        RouteSettings& s = c.settings;
        c.seed = ++seed;
        Random random(c.seed);
        s.num_experts = experts;
        s.input_width = width;
        SetGate(s, gate);
        s.row_norm = static_cast<RowNorm>(random.Below(3));
        s.norm_eps = 1e-3f;
        s.row_scale = random.Below(2) == 1 ? 0.37f : 1.0f;
        s.expert_scale = random.Below(3) != 0;
        s.k = 1 + random.Below(random.Below(2) == 1 ? experts : std::min(experts, 8));
        s.select = static_cast<SelectKind>(random.Below(3));
        if (gate == Gate::kSparseMixer && s.select == SelectKind::kTable) {
          s.select = SelectKind::kTopK;
        }
        s.p = static_cast<float>(random.Uniform());
        s.renormalize = random.Below(2) == 1;
        s.scale = random.Below(2) == 1 ? 2.5f : 1.0f;
        c.bias = random.Below(2) == 1;
        if (random.Below(3) == 0) {
          s.score = Score::kCosine;
          s.dim = 4 + random.Below(30);
        }
        cases.push_back(c);
        // A sparse mixer and a table have no choice values.
        if (gate == Gate::kSparseMixer || s.select == SelectKind::kTable) continue;
        if (random.Below(2) == 1) AddChoice(cases.back(), random);
      }
    }
  }
}

// Returns every combination of gate, selection and score, with sizes that fill vector lanes partly,
// exactly and more than once. A new gate does not change the random values of the others.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (Gate gate : AllKinds<Gate>()) {
    uint64_t seed = 1 + static_cast<uint64_t>(gate);
    for (int experts : {1, 2, 3, 8, 10, 33, 64, 300}) {
      for (int width : {4, 24, 32, 128, 250, 300}) {
        Case c;
        RouteSettings& s = c.settings;
        s.num_experts = experts;
        s.input_width = width;
        SetGate(s, gate);
        c.seed = seed;
        seed += 3;
        Random random(c.seed);
        s.k = 1 + random.Below(experts);
        s.select = random.Below(2) == 1 ? SelectKind::kTopP : SelectKind::kTopK;
        s.p = static_cast<float>(random.Uniform() * 1.2);
        s.compare = random.Below(2) == 1 ? TopPCompare::kGt : TopPCompare::kGe;
        s.renormalize = random.Below(2) == 1;
        s.scale = random.Below(3) == 0 ? 2.5f : 1.0f;
        c.bias = random.Below(2) == 1;
        if (random.Below(2) == 1) {
          s.score = Score::kCosine;
          s.dim = 1 + random.Below(40);
          s.normalize_row = random.Below(3) != 0;
          s.normalize_expert = random.Below(3) != 0;
          s.temperature = static_cast<Temperature>(random.Below(3));
          c.temperature = static_cast<float>(random.Normal());
        }
        cases.push_back(c);
        if (gate == Gate::kSparseMixer) continue;  // ranks experts by their scores alone
        AddChoice(c, random);
        if (c.settings.choice_bias || c.settings.groups > 1) cases.push_back(c);
      }
    }
  }
  AddRareCases(cases);
  return cases;
}

RouterWeights MakeWeights(const Case& c, Random& random) {
  const RouteSettings& s = c.settings;
  RouterWeights w;
  w.temperature = c.temperature;
  if (s.choice_bias) w.choice_bias = random.Normals(s.num_experts, 0.3);
  if (s.score == Score::kDot) {
    w.weight =
        random.Normals(int64_t{s.num_experts} * s.input_width, 2.0 / std::sqrt(s.input_width));
    if (c.bias) w.bias = random.Normals(s.num_experts);
  } else {
    w.weight = random.Normals(int64_t{s.num_experts} * s.dim);
    w.projection = random.Normals(int64_t{s.dim} * s.input_width, 1.0 / std::sqrt(s.input_width));
    if (c.bias) w.bias = random.Normals(s.dim, 0.1);
  }
  if (s.row_norm == RowNorm::kRmsWeight) w.row_weight = random.Normals(s.input_width);
  if (s.expert_scale) w.expert_scale = random.Normals(s.num_experts);
  if (s.select == SelectKind::kTable) w.listed = s.k;
  for (int token = 0; w.listed > 0 && token < kVocabulary; ++token) {
    std::vector<int32_t> listed(static_cast<size_t>(s.num_experts));
    std::iota(listed.begin(), listed.end(), 0);
    for (int i = 0; i < s.k; ++i) std::swap(listed[i], listed[i + random.Below(s.num_experts - i)]);
    w.table.insert(w.table.end(), listed.begin(), listed.begin() + s.k);
  }
  return w;
}

std::unique_ptr<Router> MakeRouter(Backend& backend, const Case& c, const RouterWeights& w) {
  const RouteSettings& s = c.settings;
  RouterTensors t;
  const bool dot = s.score == Score::kDot;
  t.weight = MakeTensor(w.weight, {s.num_experts, dot ? s.input_width : s.dim});
  if (!dot) t.projection = MakeTensor(w.projection, {s.dim, s.input_width});
  if (!w.bias.empty()) t.bias = MakeTensor(w.bias, {dot ? s.num_experts : s.dim});
  if (!w.choice_bias.empty()) t.choice_bias = MakeTensor(w.choice_bias, {s.num_experts});
  if (!w.row_weight.empty()) t.row_weight = MakeTensor(w.row_weight, {s.input_width});
  if (!w.expert_scale.empty()) t.expert_scale = MakeTensor(w.expert_scale, {s.num_experts});
  t.table = w.table;
  t.temperature = w.temperature;
  return std::move(backend.NewRouter(s, t)).value();
}

void ExpectInvariants(const RoutingPlan& plan, const RouteSettings& s) {
  ASSERT_EQ(plan.expert_offsets[0], 0);
  ASSERT_EQ(plan.expert_offsets[plan.num_experts], plan.num_assignments);
  ASSERT_EQ(plan.row_offsets[plan.rows], plan.num_assignments);
  std::set<int> seen;
  for (int r = 0; r < plan.rows; ++r) {
    const int n = plan.row_offsets[r + 1] - plan.row_offsets[r];
    ASSERT_GE(n, 1);
    ASSERT_LE(n, s.k);
    int before = -1;
    for (int i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int a = plan.assignments_of_row[i];
      ASSERT_TRUE(seen.insert(a).second) << "an assignment is used twice";
      ASSERT_EQ(plan.row_of_assignment[a], r);
      int expert = 0;
      while (plan.expert_offsets[expert + 1] <= a) ++expert;
      ASSERT_GT(expert, before) << "experts of a row ascend, each once";
      before = expert;
    }
  }
  for (int e = 0; e < plan.num_experts; ++e) {
    for (int a = plan.expert_offsets[e] + 1; a < plan.expert_offsets[e + 1]; ++a) {
      ASSERT_LT(plan.row_of_assignment[a - 1], plan.row_of_assignment[a]);
    }
  }
}

// Compares a row of the plan with the contract's row, bit by bit.
void ExpectRow(const RoutingPlan& plan, int row, const RowRoutes<float>& expected) {
  const int begin = plan.row_offsets[row];
  ASSERT_EQ(plan.row_offsets[row + 1] - begin, static_cast<int>(expected.experts.size()))
      << "row " << row;
  for (size_t i = 0; i < expected.experts.size(); ++i) {
    const int a = plan.assignments_of_row[begin + static_cast<int>(i)];
    int expert = 0;
    while (plan.expert_offsets[expert + 1] <= a) ++expert;
    ASSERT_EQ(expert, expected.experts[i]) << "row " << row;
    ASSERT_EQ(BitsFromF32(plan.weight_of_assignment[a]), BitsFromF32(expected.weights[i]))
        << "row " << row << ", expert " << expert << ": " << plan.weight_of_assignment[a]
        << " instead of " << expected.weights[i];
  }
  const int status = expected.no_finite_maximum ? 2 : expected.saw_nan ? 1 : 0;
  ASSERT_EQ(plan.row_nonfinite[row], status) << "row " << row;
}

class RouterTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }

  // Begins a step of `rows` tokens, row r being TokenOf(r).
  void BeginStep(int rows) {
    tokens_.clear();
    for (int r = 0; r < rows; ++r) tokens_.push_back(TokenOf(r));
    zeros_.assign(tokens_.size(), 0);
    backend_->BeginStep({.token_ids = tokens_, .position = zeros_, .sequence = zeros_}, nullptr,
                        false);
  }

  RoutingPlan Route(const Case& c, const Router& router, std::vector<float>& rows) {
    const int width = c.settings.input_width;
    BeginStep(static_cast<int>(rows.size()) / width);
    const DeviceRows input = MakeRows(*backend_, rows, width);
    backend_->Route({.router = &router, .input = input.view});
    return backend_->HostPlan(0);
  }

  std::unique_ptr<Backend> backend_;
  std::vector<int32_t> tokens_, zeros_;
};

TEST_P(RouterTest, EqualsTheContractBitForBit) {
  for (const Case& c : Cases()) {
    Random random(c.seed + 1000);
    const RouterWeights weights = MakeWeights(c, random);
    const auto router = MakeRouter(*backend_, c, weights);
    const int width = c.settings.input_width;
    std::vector<float> rows = random.Normals(int64_t{9} * width);
    for (int i = 0; i < width; ++i) rows[i] = 0.0f;  // all scores of row 0 are equal
    const RoutingPlan plan = Route(c, *router, rows);
    ExpectInvariants(plan, c.settings);
    for (int r = 0; r < plan.rows; ++r) {
      const std::vector<float> row(rows.begin() + r * width, rows.begin() + (r + 1) * width);
      ExpectRow(plan, r, ContractRoutes(c.settings, weights, row, TokenOf(r)));
      if (HasFatalFailure()) {
        FAIL() << "case seed " << c.seed << ", experts " << c.settings.num_experts << ", width "
               << width;
      }
    }
  }
}

// A norm that comes first, with the sum of a branch or of experts' results, has the bits of the
// operations one by one. The rows are few enough for one launch, or not.
TEST_P(RouterTest, ANormFirstIsItsParts) {
  struct Shape {
    int experts, width, rows;
    DType dtype;
    bool layer, sum;
  };
  for (const Shape& s :
       {Shape{4, 3, 1, DType::kF32, false, false}, Shape{8, 64, 8, DType::kBF16, false, true},
        Shape{8, 64, 9, DType::kBF16, true, true}, Shape{60, 513, 5, DType::kF32, true, true},
        Shape{16, 4100, 3, DType::kBF16, false, false},
        Shape{33, 520, 2, DType::kBF16, true, true}}) {
    Random random(static_cast<uint64_t>(s.width));
    Case c;
    c.settings.num_experts = s.experts;
    c.settings.input_width = s.width;
    c.settings.k = 2;
    const auto router = MakeRouter(*backend_, c, MakeWeights(c, random));
    const HostTensor scale = MakeTensor(random.Normals(s.width), {s.width});
    std::vector<HostTensor> shifts;
    if (s.layer) shifts.push_back(MakeTensor(random.Normals(s.width), {s.width}));
    const auto norm =
        std::move(backend_->NewNormBank({s.layer, 1e-5f}, {&scale, 1}, shifts)).value();
    const auto bias = std::move(backend_->Upload(random.Normals(s.width))).value();
    const int64_t count = int64_t{s.rows} * s.width;
    const std::vector<float> a = random.Normals(count, 2.0), b = random.Normals(count),
                             of_experts = random.Normals(2 * count);
    const auto rows = [&](const std::vector<float>* values, DType dtype, int64_t n) {
      return MakeRows(*backend_, n, s.width, (s.width + 19) / 16 * 16, dtype, values);
    };
    const DeviceRows results = rows(&of_experts, s.dtype, 2 * s.rows);
    BeginStep(s.rows);
    const DeviceRows other = rows(&a, DType::kF32, s.rows);
    const RoutingPlan before =
        backend_->Route({.router = router.get(), .input = other.view, .slot = 1});
    const auto run = [&](bool at_once) {
      const DeviceRows x = rows(&a, DType::kF32, s.rows);
      const DeviceRows branch = rows(s.sum ? nullptr : &b, DType::kF32, s.rows);
      const DeviceRows y = rows(nullptr, s.dtype, s.rows);
      const CombineArgs sum{.plan = &before, .results = results.view, .output = branch.view};
      const AddNormArgs first{.x = x.view,
                              .branch = branch.view,
                              .sum = s.sum && at_once ? &sum : nullptr,
                              .bias = static_cast<const float*>(bias->data()),
                              .scale = 0.6f,
                              .norm = norm.get(),
                              .output = y.view};
      if (!at_once) {
        if (s.sum) backend_->Combine(sum);
        backend_->AddNorm(first);
      }
      backend_->Route(
          {.router = router.get(), .input = y.view, .norm = at_once ? &first : nullptr});
      const RoutingPlan plan = backend_->HostPlan(0);
      const size_t routes = static_cast<size_t>(plan.num_assignments);
      return std::tuple(HostRows(*backend_, x.view), HostRows(*backend_, y.view),
                        std::vector(plan.row_of_assignment, plan.row_of_assignment + routes),
                        std::vector(plan.expert_offsets, plan.expert_offsets + s.experts + 1),
                        std::vector(plan.weight_of_assignment, plan.weight_of_assignment + routes));
    };
    EXPECT_EQ(run(true), run(false)) << "width " << s.width;
  }
}

// A row with a routing override must be routed as by a router with those settings, and its
// neighbours as without the override. The scores that the router reports exclude the override's
// bias.
TEST_P(RouterTest, OverridesAreRoutersOfTheirOwn) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Case& c : Cases()) {
    const int experts = c.settings.num_experts;
    const int width = c.settings.input_width;
    // a router with this gate has no top-p
    if (c.settings.gate == Gate::kSoftmaxSelected) continue;
    Random random(c.seed + 5000);
    const RouterWeights weights = MakeWeights(c, random);
    const auto router = MakeRouter(*backend_, c, weights);
    std::vector<float> rows = random.Normals(int64_t{6} * width);
    std::vector<float> bias(static_cast<size_t>(experts));
    int allowed = experts;
    for (int e = 1; e < experts; ++e) {
      bias[e] = random.Below(3) == 0 ? -inf : static_cast<float>(random.Normal());
      allowed -= std::isinf(bias[e]);
    }
    std::vector<RouteOverride> overrides(6);
    overrides[1].k = 1 + random.Below(experts);
    overrides[2].p = 0.4f;
    overrides[3] = {.bias = bias.data(), .allowed = allowed};
    overrides[4] = {.k = 1 + random.Below(experts), .bias = bias.data(), .allowed = allowed};
    BeginStep(6);
    const DeviceRows input = MakeRows(*backend_, rows, width);
    const DeviceRows kept = MakeRows(*backend_, 6, experts, experts, DType::kF32, nullptr);
    backend_->Route({.router = router.get(),
                     .input = input.view,
                     .scores = &kept.view,
                     .overrides = overrides});
    const RoutingPlan plan = backend_->HostPlan(0);
    const std::vector<float> scores = HostRows(*backend_, kept.view);
    for (int r = 0; r < 6; ++r) {
      const std::vector<float> row(rows.begin() + r * width, rows.begin() + (r + 1) * width);
      const RowRoutes<float> plain = ContractRoutes(c.settings, weights, row, TokenOf(r));
      for (int e = 0; e < experts; ++e) {
        ASSERT_EQ(BitsFromF32(scores[r * experts + e]), BitsFromF32(plain.scores[e]));
      }
      RouteSettings changed = c.settings;
      if (overrides[r].k > 0) {
        changed.select = SelectKind::kTopK;
        changed.k = overrides[r].k;
      } else if (overrides[r].p > 0) {
        changed.k = changed.select == SelectKind::kTopP ? changed.k : experts;
        changed.select = SelectKind::kTopP;
        changed.p = overrides[r].p;
      }
      if (overrides[r].bias == nullptr) {
        ExpectRow(plan, r, ContractRoutes(changed, weights, row, TokenOf(r)));
      } else {
        // Only a router of dot scores has a bias on the scores to compare with. For other routers,
        // check that no masked expert is selected and that as many experts as possible are.
        changed.k = std::min(changed.k, allowed);
        const int count = plan.row_offsets[r + 1] - plan.row_offsets[r];
        ASSERT_GE(count, 1);
        ASSERT_LE(count, changed.k);
        if (changed.select != SelectKind::kTopP) {
          ASSERT_EQ(count, changed.k);
        }
        for (int i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
          int expert = 0;
          while (plan.expert_offsets[expert + 1] <= plan.assignments_of_row[i]) ++expert;
          ASSERT_FALSE(std::isinf(bias[expert]));
        }
        if (c.settings.score == Score::kDot) {
          RouterWeights biased = weights;
          if (biased.bias.empty()) {
            biased.bias = bias;
            ExpectRow(plan, r, ContractRoutes(changed, biased, row, TokenOf(r)));
          }
        }
      }
      if (HasFatalFailure()) {
        FAIL() << "case seed " << c.seed << ", row " << r << ", experts " << experts;
      }
    }
  }
}

// Duplicated experts have exactly equal scores; every backend must select the lower index.
TEST_P(RouterTest, TiesGoToTheLowerIndex) {
  Case c;
  c.settings.num_experts = 6;
  c.settings.input_width = 16;
  c.settings.k = 2;
  Random random(7);
  RouterWeights weights = MakeWeights(c, random);
  for (int i = 0; i < 16; ++i) {
    weights.weight[4 * 16 + i] = weights.weight[1 * 16 + i];
    weights.weight[5 * 16 + i] = weights.weight[1 * 16 + i];
  }
  const auto router = MakeRouter(*backend_, c, weights);
  std::vector<float> rows(weights.weight.begin() + 16, weights.weight.begin() + 32);
  for (float& v : rows) v *= 10;
  const RoutingPlan plan = Route(c, *router, rows);
  ASSERT_EQ(plan.num_assignments, 2);
  EXPECT_EQ(plan.expert_offsets[2] - plan.expert_offsets[1], 1);
  EXPECT_EQ(plan.expert_offsets[5] - plan.expert_offsets[4], 1);
}

// NaN, infinities, signed zeros and overflow in one row must not change another row.
TEST_P(RouterTest, NonFiniteRowsStayAmongThemselves) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const bool top_p : {false, true}) {
    for (Gate gate : AllKinds<Gate>()) {
      Case c;
      c.settings.num_experts = 5;
      c.settings.input_width = 12;
      c.settings.k = 3;
      c.settings.select = top_p ? SelectKind::kTopP : SelectKind::kTopK;
      c.settings.p = 0.7f;
      SetGate(c.settings, gate);
      Random random(11);
      RouterWeights weights = MakeWeights(c, random);
      // Expert 2 ignores column 0: only its score becomes 0 * inf = NaN.
      weights.weight[2 * 12] = 0.0f;
      const auto router = MakeRouter(*backend_, c, weights);
      std::vector<float> rows = random.Normals(8 * 12);
      rows[1 * 12] = nan;
      rows[2 * 12] = inf;
      rows[3 * 12] = -inf;
      for (int i = 0; i < 12; ++i) rows[4 * 12 + i] = -0.0f;
      for (int i = 0; i < 12; ++i) rows[5 * 12 + i] = 3e38f;
      for (int i = 0; i < 12; ++i) rows[6 * 12 + i] = 1e-42f;
      const RoutingPlan plan = Route(c, *router, rows);
      ExpectInvariants(plan, c.settings);
      for (int r = 0; r < plan.rows; ++r) {
        const std::vector<float> row(rows.begin() + r * 12, rows.begin() + (r + 1) * 12);
        ExpectRow(plan, r, ContractRoutes(c.settings, weights, row, TokenOf(r)));
      }
    }
  }
}

TEST_P(RouterTest, ARowRoutesTheSameAloneAndAmongOthers) {
  for (const Case& c : {Cases()[40], Cases()[77], Cases()[110]}) {
    Random random(c.seed);
    const RouterWeights weights = MakeWeights(c, random);
    const auto router = MakeRouter(*backend_, c, weights);
    const int width = c.settings.input_width;
    std::vector<float> rows = random.Normals(int64_t{700} * width);
    const RoutingPlan plan = Route(c, *router, rows);
    ExpectInvariants(plan, c.settings);
    for (int r : {0, 333, 699}) {
      const std::vector<float> row(rows.begin() + r * width, rows.begin() + (r + 1) * width);
      ExpectRow(plan, r, ContractRoutes(c.settings, weights, row, TokenOf(r)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, RouterTest, ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

// Returns whether settings are typical of trained models. (With hundreds of experts,
// one-dimensional cosine scores or thresholds near 1, nearly every row is close to another
// selection. So it is if choice values are probabilities, which are small.)
bool IsUsual(const RouteSettings& s) {
  const bool by_choice = s.choice_bias || s.best_groups < s.groups;
  if (by_choice && s.gate != Gate::kSigmoid) return false;
  if (s.num_experts > 64 || (s.score == Score::kCosine && s.dim < 4)) return false;
  return s.select == SelectKind::kTopP ? s.p <= 0.8f : s.k <= 8;
}

// Returns whether e^score is 0 in f32 for all selected experts. Then all gate values kSqrtSoftplus
// are 0, and so are the renormalised weights, although in double they have ratios.
bool VanishInF32(const RouteSettings& s, const RowRoutes<double>& routes) {
  const double smallest = std::log(std::numeric_limits<float>::min());
  return s.gate == Gate::kSqrtSoftplus && s.renormalize &&
         std::ranges::all_of(routes.experts,
                             [&](int e) { return routes.scores[e] < smallest - 0.01; });
}

// The contract must compute the papers' formulas: where double arithmetic is not within 1e-5 of
// another selection, both must select the same experts with nearly the same weights.
TEST(RouterContractTest, AgreesWithDoubleArithmetic) {
  int64_t rows = 0, excluded = 0, usual_rows = 0, usual_excluded = 0, vanished = 0;
  double worst = 0.0;
  for (const Case& c : Cases()) {
    Random random(c.seed + 5000);
    const RouterWeights weights = MakeWeights(c, random);
    for (int i = 0; i < 300; ++i) {
      const std::vector<float> row = random.Normals(c.settings.input_width);
      const RowRoutes<double> oracle = OracleRoutes(c.settings, weights, row, TokenOf(i));
      const bool close = !(oracle.margin > 1e-5);
      usual_rows += IsUsual(c.settings);
      usual_excluded += IsUsual(c.settings) && close;
      excluded += close;
      if (close) continue;
      ++rows;
      const RowRoutes<float> contract = ContractRoutes(c.settings, weights, row, TokenOf(i));
      ASSERT_EQ(contract.experts, oracle.experts)
          << "case seed " << c.seed << ", margin " << oracle.margin;
      // Small temperatures make scores so large that f32 rounds their differences coarsely. Only
      // the weights of these two gates depend on close scores far down the ranking.
      double largest = 1000.0;
      if (c.settings.gate == Gate::kSparseMixer || c.settings.gate == Gate::kSqrtSoftplus) {
        for (const double score : oracle.scores) largest = std::max(largest, std::abs(score));
      }
      if (VanishInF32(c.settings, oracle)) {
        EXPECT_EQ(contract.weights, std::vector<float>(contract.weights.size(), 0.0f));
        ++vanished;
        continue;
      }
      for (size_t j = 0; j < oracle.weights.size(); ++j) {
        // The gate kSqrtSoftplus has values above 1.
        const double size = std::max(1.0, std::abs(oracle.weights[j]));
        const double error = std::abs(contract.weights[j] - oracle.weights[j]) / size;
        worst = std::max(worst, error * 1000.0 / largest);
      }
    }
  }
  const double share = static_cast<double>(usual_excluded) / static_cast<double>(usual_rows);
  std::printf("%lld rows agree, worst weight error %.1e; excluded %.4f %% of %lld usual rows\n",
              static_cast<long long>(rows), worst, 100.0 * share,
              static_cast<long long>(usual_rows));
  std::printf("excluded over all settings, degenerate ones included: %.4f %%\n",
              100.0 * static_cast<double>(excluded) / static_cast<double>(rows + excluded));
  EXPECT_LT(share, 1e-3);
  EXPECT_LT(vanished * 1000, rows);
  // A temperature multiplies the rounding error of a score by up to 100.
  EXPECT_LT(worst, 1e-4);
}

TEST(ContractExpTest, IsWithinTwoUlpAndHandlesTheEnds) {
  double worst = 0.0;
  for (double x = -87.3; x < 88.7; x += 0.000917) {
    const float f = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(f));
    const double ulp = std::nextafter(static_cast<float>(exact), INFINITY) -
                       static_cast<double>(static_cast<float>(exact));
    worst = std::max(worst, std::abs(ContractExp(f) - exact) / ulp);
  }
  std::printf("worst error of the exponential: %.2f ulp\n", worst);
  EXPECT_LE(worst, 2.0);
  EXPECT_EQ(ContractExp(0.0f), 1.0f);
  EXPECT_EQ(ContractExp(-0.0f), 1.0f);
  EXPECT_EQ(ContractExp(-88.0f), 0.0f);
  EXPECT_EQ(ContractExp(-INFINITY), 0.0f);
  EXPECT_EQ(ContractExp(89.0f), INFINITY);
  EXPECT_EQ(ContractExp(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(ContractExp(NAN)));
}

TEST(ContractLog1pTest, IsWithinTwoUlpAndHandlesTheEnds) {
  double worst = 0.0;
  const auto compare = [&](float x) {
    const double exact = std::log1p(static_cast<double>(x));
    const double ulp = std::nextafter(static_cast<float>(exact), INFINITY) -
                       static_cast<double>(static_cast<float>(exact));
    worst = std::max(worst, std::abs(ContractLog1p(x) - exact) / ulp);
  };
  for (int i = 1; i <= 400'000; ++i) compare(static_cast<float>(i) / 400'000.0f);
  for (double x = -87.3; x < 0.0; x += 0.000917) compare(static_cast<float>(std::exp(x)));
  std::printf("worst error of the logarithm: %.2f ulp\n", worst);
  EXPECT_LE(worst, 2.0);
  EXPECT_EQ(ContractLog1p(0.0f), 0.0f);
  EXPECT_EQ(ContractLog1p(1.0f), 0x1.62e43p-1f);
  EXPECT_TRUE(std::isnan(ContractLog1p(NAN)));
}

}  // namespace
}  // namespace moeserve::testing
