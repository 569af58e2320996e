#include "tests/reference/router_contract.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "kernels/base/exp.h"

namespace moeserve::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Adds 32 partial sums as a tree. Partial sum l contains the groups of 8 elements l, l + 32, l +
// 64, ...
float Reduce(std::vector<float> partial) {
  for (int distance : {16, 8, 4, 2, 1}) {
    std::vector<float> next(32);
    for (int l = 0; l < 32; ++l) next[l] = partial[l] + partial[l ^ distance];
    partial = next;
  }
  return partial[0];
}

float Dot(const float* a, const float* b, int n) {
  std::vector<float> partial(32, 0.0f);
  for (int l = 0; l < 32; ++l) {
    for (int group = l; group * 8 < n; group += 32) {
      for (int i = group * 8; i < std::min(n, group * 8 + 8); ++i) {
        partial[l] = std::fma(a[i], b[i], partial[l]);
      }
    }
  }
  return Reduce(partial);
}

float Sum(const std::vector<float>& v) {
  std::vector<float> partial(32, 0.0f);
  const int n = static_cast<int>(v.size());
  for (int l = 0; l < 32; ++l) {
    for (int group = l; group * 8 < n; group += 32) {
      for (int i = group * 8; i < std::min(n, group * 8 + 8); ++i) partial[l] += v[i];
    }
  }
  return Reduce(partial);
}

std::vector<float> Normalised(std::vector<float> v, float eps) {
  const float norm = std::sqrt(Dot(v.data(), v.data(), static_cast<int>(v.size())));
  for (float& f : v) f = f / std::max(norm, eps);
  return v;
}

// Returns the row from which the scores are computed.
std::vector<float> RouterRow(const RouteSettings& s, const RouterWeights& w,
                             std::vector<float> row) {
  const int c = s.input_width;
  float factor = 1.0f;
  if (s.row_norm != RowNorm::kNone) {
    factor = 1.0f / std::sqrt(Dot(row.data(), row.data(), c) / static_cast<float>(c) + s.norm_eps);
  }
  for (int i = 0; i < c; ++i) {
    if (s.row_norm != RowNorm::kNone) row[i] = row[i] * factor;
    if (s.row_norm == RowNorm::kRmsWeight) row[i] = row[i] * w.row_weight[i];
    row[i] = row[i] * s.row_scale;
  }
  return row;
}

std::vector<float> Scores(const RouteSettings& s, const RouterWeights& w,
                          const std::vector<float>& unchanged) {
  const std::vector<float> row = RouterRow(s, w, unchanged);
  std::vector<float> scores;
  const int c = s.input_width;
  if (s.score == ScoreKind::kDot) {
    for (int e = 0; e < s.num_experts; ++e) {
      float v = Dot(row.data(), w.weight.data() + e * c, c);
      if (!w.bias.empty()) v = v + w.bias[e];
      scores.push_back(v);
    }
    return scores;
  }
  std::vector<float> u;
  for (int i = 0; i < s.dim; ++i) {
    float v = Dot(row.data(), w.projection.data() + i * c, c);
    if (!w.bias.empty()) v = v + w.bias[i];
    u.push_back(v);
  }
  if (s.normalize_row) u = Normalised(u, s.eps);
  for (int e = 0; e < s.num_experts; ++e) {
    std::vector<float> expert(w.weight.begin() + e * s.dim, w.weight.begin() + (e + 1) * s.dim);
    if (s.normalize_expert) expert = Normalised(expert, s.eps);
    float v = Dot(expert.data(), u.data(), s.dim);
    if (s.temperature == TemperatureKind::kDivide) {
      v = v / std::max(w.temperature, 1e-4f);
    } else if (s.temperature == TemperatureKind::kLogScale) {
      v = v * ContractExp(std::min(w.temperature, std::log(100.0f)));
    }
    scores.push_back(v);
  }
  return scores;
}

// Returns the experts by descending score; ties by ascending index; NaN last.
template <typename Real>
std::vector<int> Ranking(const std::vector<Real>& scores) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const bool nan_a = std::isnan(scores[a]), nan_b = std::isnan(scores[b]);
    if (nan_a != nan_b) return nan_b;
    if (!nan_a && scores[a] != scores[b]) return scores[a] > scores[b];
    return a < b;
  });
  return order;
}

template <typename Real>
void SortByExpert(RowRoutes<Real>& r) {
  std::vector<std::pair<int, Real>> pairs;
  for (size_t i = 0; i < r.experts.size(); ++i) pairs.emplace_back(r.experts[i], r.weights[i]);
  std::sort(pairs.begin(), pairs.end());
  for (size_t i = 0; i < pairs.size(); ++i) {
    r.experts[i] = pairs[i].first;
    r.weights[i] = pairs[i].second;
  }
}

float Log1p(float x) { return ContractLog1p(x); }
double Log1p(double x) { return std::log1p(x); }

// Returns the gate value of a score before any division. `exp` is the exponential function to use.
template <typename Real, typename Exp>
Real GateValueOf(GateKind gate, Real score, Real maximum, Exp exp) {
  switch (gate) {
    case GateKind::kSoftmax:
    case GateKind::kSoftmaxSelected:
    case GateKind::kSparseMixer:
      return exp(score - maximum);
    case GateKind::kSigmoid:
      return Real{1} / (Real{1} + exp(-score));
    case GateKind::kSqrtSoftplus:
      return std::sqrt(std::max(score, Real{0}) + Log1p(exp(-std::abs(score))));
  }
  MOESERVE_CHECK(false, "every gate has a value");
}

// Returns whether a gate value is a share only after a division by the sum over all experts.
bool DividesByAll(GateKind gate) {
  switch (gate) {
    case GateKind::kSoftmax:
    case GateKind::kSoftmaxSelected:
    case GateKind::kSparseMixer:
      return true;
    case GateKind::kSigmoid:
    case GateKind::kSqrtSoftplus:
      return false;
  }
  MOESERVE_CHECK(false, "every gate has a divisor");
}

// Returns whether the weights are divided by the sum over the selected experts.
bool DividesBySelected(const RouteSettings& s) {
  switch (s.gate) {
    case GateKind::kSoftmax:
    case GateKind::kSigmoid:
    case GateKind::kSparseMixer:
    case GateKind::kSqrtSoftplus:
      return s.renormalize;
    case GateKind::kSoftmaxSelected:
      return true;
  }
  MOESERVE_CHECK(false, "every gate has a divisor");
}

bool MixesSparsely(const RouteSettings& s) {
  return s.gate == GateKind::kSparseMixer && !s.renormalize;
}

// A softmax with one share for a selected expert.
template <typename Real>
struct Mixer {
  std::vector<Real> terms;  // [E]
  // The smallest distance of a score from the limit up to which it counts.
  Real margin = std::numeric_limits<Real>::infinity();
};

// Returns the softmax from which a selected expert has its weight with the gate kSparseMixer: over
// the experts from it on in `ranking` whose scores are near its own.
template <typename Real, typename Exp>
Mixer<Real> MixerOf(const RouteSettings& s, const std::vector<Real>& scores,
                    const std::vector<int>& ranking, int expert, Exp exp) {
  Mixer<Real> mixer;
  mixer.terms.assign(scores.size(), Real{0});
  const Real score = scores[expert];
  bool reached = false;
  for (const int e : ranking) {
    reached = reached || e == expert;
    if (!reached || std::isnan(scores[e])) continue;
    const Real distance = (score - scores[e]) / std::max(score, std::abs(scores[e]));
    if (!(distance > Real{s.mixer_limit})) mixer.terms[e] = exp(scores[e] - score);
    if (e != expert && std::isfinite(distance)) {
      // Rounding errors of small scores are large in proportion.
      const Real size = std::min(Real{1}, std::max(score, std::abs(scores[e])));
      mixer.margin = std::min(mixer.margin, std::abs(distance - Real{s.mixer_limit}) * size / 10);
    }
  }
  return mixer;
}

// Moves the experts that the table lists for the token to the front of `ranking`, in the order of
// the table, unless their score is NaN or -Inf.
template <typename Real>
void RankByTable(const RouterWeights& w, int token, const std::vector<Real>& scores,
                 std::vector<int>& ranking) {
  std::vector<int> first;
  for (int i = 0; i < w.listed; ++i) {
    const int e = w.table[static_cast<size_t>(token * w.listed + i)];
    if (scores[e] > -std::numeric_limits<Real>::infinity()) first.push_back(e);
  }
  for (const int e : ranking) {
    if (std::find(first.begin(), first.end(), e) == first.end()) first.push_back(e);
  }
  ranking = first;
}

bool HasChoice(const RouteSettings& s) { return s.choice_bias || s.best_groups < s.groups; }

// The values by which experts are ranked, and the smallest change of one that changes which groups
// are best.
template <typename Real>
struct Choice {
  std::vector<Real> values;  // NaN for experts that rank last
  Real group_margin = std::numeric_limits<Real>::infinity();
};

// Returns the choice values from the gate values; `total` is the sum of the gate values.
template <typename Real>
Choice<Real> ChoiceOf(const RouteSettings& s, const RouterWeights& w,
                      const std::vector<Real>& scores, const std::vector<Real>& values,
                      Real total) {
  constexpr Real kNone = -std::numeric_limits<Real>::infinity();
  Choice<Real> choice;
  for (int e = 0; e < s.num_experts; ++e) {
    const Real share = DividesByAll(s.gate) ? values[e] / total : values[e];
    const Real bias = w.choice_bias.empty() ? Real{0} : Real{w.choice_bias[e]};
    const bool last = std::isnan(scores[e]) || scores[e] == kNone;
    choice.values.push_back(last ? std::numeric_limits<Real>::quiet_NaN() : share + bias);
  }
  if (s.best_groups == s.groups) return choice;
  const int size = s.num_experts / s.groups;
  std::vector<Real> group_scores;
  for (int g = 0; g < s.groups; ++g) {
    std::vector<Real> own(choice.values.begin() + g * size, choice.values.begin() + (g + 1) * size);
    for (Real& v : own) v = std::isnan(v) ? kNone : v;
    std::sort(own.begin(), own.end(), std::greater<>());
    group_scores.push_back(s.group_score == GroupScoreKind::kMax ? own[0] : own[0] + own[1]);
  }
  const std::vector<int> order = Ranking(group_scores);
  choice.group_margin = group_scores[order[s.best_groups - 1]] - group_scores[order[s.best_groups]];
  for (int i = s.best_groups; i < s.groups; ++i) {
    for (int e = order[i] * size; e < (order[i] + 1) * size; ++e) {
      if (std::isnan(choice.values[e])) continue;
      choice.values[e] = s.group_mask == GroupMaskKind::kZero ? Real{0} : kNone;
    }
  }
  return choice;
}

}  // namespace

RowRoutes<float> ContractRoutes(const RouteSettings& s, const RouterWeights& w,
                                const std::vector<float>& row, int token) {
  const bool top_p = s.select == SelectKind::kTopP;
  const bool strict = s.compare == TopPCompare::kGt;
  RowRoutes<float> r;
  r.scores = Scores(s, w, row);
  r.ranking = Ranking(r.scores);
  float maximum = -kInfinity;
  std::vector<float> counted = r.scores;
  for (float& v : counted) {
    if (std::isnan(v)) {
      r.saw_nan = true;
      v = -kInfinity;
    }
    maximum = std::max(maximum, v);
  }
  r.no_finite_maximum = !std::isfinite(maximum);
  if (r.no_finite_maximum) {
    r.experts.assign(r.ranking.begin(), r.ranking.begin() + (top_p ? 1 : s.k));
    r.weights.assign(r.experts.size(), 0.0f);
    SortByExpert(r);
    return r;
  }
  std::vector<float> value;
  for (float v : counted) {
    value.push_back(GateValueOf(s.gate, v, maximum, [](float x) { return ContractExp(x); }));
  }
  const float z = DividesByAll(s.gate) ? Sum(value) : 1.0f;
  if (HasChoice(s)) r.ranking = Ranking(ChoiceOf(s, w, r.scores, value, z).values);
  if (s.select == SelectKind::kTable) RankByTable(w, token, r.scores, r.ranking);
  const float threshold = s.p * z;
  float cumulative = 0.0f;
  for (int e : r.ranking) {
    if (static_cast<int>(r.experts.size()) == s.k) break;
    r.experts.push_back(e);
    cumulative = cumulative + value[e];
    if (top_p && (strict ? cumulative > threshold : cumulative >= threshold)) break;
  }
  for (int e : r.experts) {
    float gate;
    if (MixesSparsely(s)) {
      const auto mixer = MixerOf(s, counted, r.ranking, e, [](float x) { return ContractExp(x); });
      gate = counted[e] == -kInfinity ? 0.0f : 1.0f / Sum(mixer.terms);
    } else if (DividesBySelected(s)) {
      gate = cumulative == 0.0f ? 0.0f : value[e] / cumulative;
    } else {
      gate = value[e] / z;
    }
    gate = gate * s.scale;
    if (s.expert_scale) gate = gate * w.expert_scale[e];
    r.weights.push_back(gate);
  }
  SortByExpert(r);
  return r;
}

RowRoutes<double> OracleRoutes(const RouteSettings& s, const RouterWeights& w,
                               const std::vector<float>& input, int token) {
  const bool top_p = s.select == SelectKind::kTopP;
  const bool strict = s.compare == TopPCompare::kGt;
  RowRoutes<double> r;
  const int c = s.input_width;
  const auto dot = [](auto a, auto b, int n) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
  };
  std::vector<double> row(input.begin(), input.end());
  const double squares = dot(row.data(), row.data(), c);
  for (int i = 0; i < c; ++i) {
    if (s.row_norm != RowNorm::kNone) row[i] /= std::sqrt(squares / c + double{s.norm_eps});
    if (s.row_norm == RowNorm::kRmsWeight) row[i] *= w.row_weight[i];
    row[i] *= s.row_scale;
  }
  const auto normalise = [&](std::vector<double> v) {
    const double norm = std::sqrt(dot(v.data(), v.data(), static_cast<int>(v.size())));
    for (double& x : v) x /= std::max(norm, static_cast<double>(s.eps));
    return v;
  };
  if (s.score == ScoreKind::kDot) {
    for (int e = 0; e < s.num_experts; ++e) {
      r.scores.push_back(dot(row.data(), w.weight.data() + e * c, c) +
                         (w.bias.empty() ? 0.0 : w.bias[e]));
    }
  } else {
    std::vector<double> u;
    for (int i = 0; i < s.dim; ++i) {
      u.push_back(dot(row.data(), w.projection.data() + i * c, c) +
                  (w.bias.empty() ? 0.0 : w.bias[i]));
    }
    if (s.normalize_row) u = normalise(u);
    for (int e = 0; e < s.num_experts; ++e) {
      std::vector<double> expert(w.weight.begin() + e * s.dim, w.weight.begin() + (e + 1) * s.dim);
      if (s.normalize_expert) expert = normalise(expert);
      double v = dot(expert.data(), u.data(), s.dim);
      if (s.temperature == TemperatureKind::kDivide) {
        v /= std::max(static_cast<double>(w.temperature), 1e-4);
      } else if (s.temperature == TemperatureKind::kLogScale) {
        v *= std::exp(std::min(static_cast<double>(w.temperature), std::log(100.0)));
      }
      r.scores.push_back(v);
    }
  }
  r.ranking = Ranking(r.scores);
  double maximum = -std::numeric_limits<double>::infinity();
  for (double v : r.scores) maximum = std::max(maximum, v);
  std::vector<double> value;
  double z = 0;
  for (double v : r.scores) {
    value.push_back(GateValueOf(s.gate, v, maximum, [](double x) { return std::exp(x); }));
    z += value.back();
  }
  if (!DividesByAll(s.gate)) z = 1.0;
  double cumulative = 0;
  r.margin = std::numeric_limits<double>::infinity();
  std::vector<double> ranked = r.scores;
  if (HasChoice(s)) {
    const Choice<double> choice = ChoiceOf(s, w, r.scores, value, z);
    ranked = choice.values;
    r.ranking = Ranking(ranked);
    r.margin = choice.group_margin;
  }
  const bool listed = s.select == SelectKind::kTable;
  if (listed) RankByTable(w, token, r.scores, r.ranking);
  for (int e : r.ranking) {
    if (static_cast<int>(r.experts.size()) == s.k) break;
    r.experts.push_back(e);
    cumulative += value[e];
    if (!top_p) continue;
    // If the running sum is close to the threshold, one rounding decides.
    r.margin = std::min(r.margin, std::abs(cumulative - s.p * z) / z);
    if (strict ? cumulative > s.p * z : cumulative >= s.p * z) break;
  }
  const size_t n = r.experts.size();
  if (n < r.scores.size() && !listed) {
    r.margin = std::min(r.margin, ranked[r.ranking[n - 1]] - ranked[r.ranking[n]]);
  }
  for (int e : r.experts) {
    double gate = DividesBySelected(s) ? value[e] / cumulative : value[e] / z;
    if (MixesSparsely(s)) {
      const auto mixer = MixerOf(s, r.scores, r.ranking, e, [](double x) { return std::exp(x); });
      gate = 1.0 / std::accumulate(mixer.terms.begin(), mixer.terms.end(), 0.0);
      r.margin = std::min(r.margin, mixer.margin);
    }
    r.weights.push_back(gate * s.scale * (s.expert_scale ? double{w.expert_scale[e]} : 1.0));
  }
  SortByExpert(r);
  return r;
}

}  // namespace moeserve::testing
