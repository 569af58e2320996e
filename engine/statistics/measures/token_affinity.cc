#include "engine/statistics/measures/token_affinity.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace moeserve {
namespace {

std::vector<double> SumsByExpert(const TokenCounts& c) {
  std::vector<double> sums(static_cast<size_t>(c.experts));
  for (int64_t v = 0; v < c.rows; ++v) {
    for (int64_t e = 0; e < c.experts; ++e) sums[static_cast<size_t>(e)] += c.at(v, e);
  }
  return sums;
}

double SumOfRow(const TokenCounts& c, int64_t row) {
  double sum = 0.0;
  for (int64_t e = 0; e < c.experts; ++e) sum += c.at(row, e);
  return sum;
}

// Returns TokenAffinity::g2. `count` of the `of_token` selections of a token and of the `of_expert`
// selections of an expert are those of both; `all` counts all selections.
double LogLikelihoodRatio(double count, double of_token, double of_expert, double all) {
  const auto term = [&](double observed, double row, double column) {
    return observed > 0.0 ? observed * std::log(observed * all / (row * column)) : 0.0;
  };
  const double sum = term(count, of_token, of_expert) +
                     term(of_token - count, of_token, all - of_expert) +
                     term(of_expert - count, all - of_token, of_expert) +
                     term(all - of_token - of_expert + count, all - of_token, all - of_expert);
  // Rounding can make the sum of equal distributions negative.
  const double g2 = 2.0 * std::max(0.0, sum);
  return count * all < of_token * of_expert ? -g2 : g2;
}

// Completes a symmetric matrix of distances between experts of which the lower triangle is set, and
// sets the entries of experts without tokens to NaN.
void Complete(const std::vector<double>& sums, std::vector<double>& matrix) {
  const size_t experts = sums.size();
  const double none = std::numeric_limits<double>::quiet_NaN();
  for (size_t a = 0; a < experts; ++a) {
    for (size_t b = 0; b <= a; ++b) {
      double& value = matrix[a * experts + b];
      if (sums[a] <= 0.0 || sums[b] <= 0.0) value = none;
      matrix[b * experts + a] = value;
    }
  }
}

// Returns what tokens are ranked by.
double RankValue(const TokenAffinity& token, TokenRank rank) {
  switch (rank) {
    case TokenRank::kPmi:
      return token.pmi;
    case TokenRank::kG2:
      return token.g2;
    case TokenRank::kCount:
      return token.count;
  }
  return 0.0;
}

}  // namespace

std::vector<std::vector<TokenAffinity>> TopTokens(const TokenCounts& c, uint32_t min_count, int top,
                                                  TokenRank rank) {
  min_count = std::max<uint32_t>(min_count, 1);
  const std::vector<double> of_expert = SumsByExpert(c);
  double all = 0.0;
  for (const double n : of_expert) all += n;
  const auto better = [rank](const TokenAffinity& a, const TokenAffinity& b) {
    const double value_a = RankValue(a, rank);
    const double value_b = RankValue(b, rank);
    if (value_a != value_b) return value_a > value_b;
    if (a.count != b.count) return a.count > b.count;
    return a.token < b.token;
  };
  // One heap per expert; its front is the lowest ranked of the `top` tokens found so far.
  std::vector<std::vector<TokenAffinity>> best(static_cast<size_t>(c.experts));
  for (int64_t v = 0; v < c.rows && top > 0; ++v) {
    if (c.token(v) < 0) continue;
    const double of_token = SumOfRow(c, v);
    for (int64_t e = 0; e < c.experts; ++e) {
      const uint32_t count = c.at(v, e);
      if (count < min_count) continue;
      const double expert_sum = of_expert[static_cast<size_t>(e)];
      const TokenAffinity candidate{
          .token = c.token(v),
          .count = count,
          .pmi = count * all / (of_token * expert_sum),
          .share = count / of_token,
          .g2 = LogLikelihoodRatio(count, of_token, expert_sum, all),
      };
      std::vector<TokenAffinity>& heap = best[static_cast<size_t>(e)];
      if (heap.size() == static_cast<size_t>(top)) {
        if (!better(candidate, heap.front())) continue;
        std::pop_heap(heap.begin(), heap.end(), better);
        heap.pop_back();
      }
      heap.push_back(candidate);
      std::push_heap(heap.begin(), heap.end(), better);
    }
  }
  for (auto& heap : best) std::sort_heap(heap.begin(), heap.end(), better);
  return best;
}

std::vector<double> TokenDistances(const TokenCounts& c) {
  const size_t experts = static_cast<size_t>(c.experts);
  const std::vector<double> sums = SumsByExpert(c);
  // Counts of the tokens up to v; exact, unlike running sums of quotients.
  std::vector<double> below(experts);
  std::vector<double> cdf(experts);
  std::vector<double> out(experts * experts);
  for (int64_t v = 0; v < c.rows; ++v) {
    for (size_t e = 0; e < experts; ++e) {
      below[e] += c.at(v, static_cast<int64_t>(e));
      cdf[e] = sums[e] > 0.0 ? below[e] / sums[e] : 0.0;
    }
    for (size_t a = 0; a < experts; ++a) {
      for (size_t b = 0; b < a; ++b) out[a * experts + b] += std::abs(cdf[a] - cdf[b]);
    }
  }
  Complete(sums, out);
  return out;
}

std::vector<double> TokenVariations(const TokenCounts& c) {
  const size_t experts = static_cast<size_t>(c.experts);
  const std::vector<double> sums = SumsByExpert(c);
  std::vector<double> density(experts);
  std::vector<double> out(experts * experts);
  for (int64_t v = 0; v < c.rows; ++v) {
    for (size_t e = 0; e < experts; ++e) {
      density[e] = sums[e] > 0.0 ? c.at(v, static_cast<int64_t>(e)) / sums[e] : 0.0;
    }
    for (size_t a = 0; a < experts; ++a) {
      for (size_t b = 0; b < a; ++b) {
        out[a * experts + b] += 0.5 * std::abs(density[a] - density[b]);
      }
    }
  }
  Complete(sums, out);
  return out;
}

std::vector<double> TokenDivergences(const TokenCounts& c, double eps) {
  MOESERVE_CHECK(eps > 0.0, "smoothing");
  const size_t experts = static_cast<size_t>(c.experts);
  const std::vector<double> sums = SumsByExpert(c);
  std::vector<double> density(experts), logarithm(experts);
  std::vector<double> out(experts * experts);
  for (int64_t v = 0; v < c.rows; ++v) {
    for (size_t e = 0; e < experts; ++e) {
      density[e] =
          (c.at(v, static_cast<int64_t>(e)) + eps) / (sums[e] + eps * static_cast<double>(c.rows));
      logarithm[e] = std::log(density[e]);
    }
    for (size_t a = 0; a < experts; ++a) {
      for (size_t b = 0; b < experts; ++b) {
        out[a * experts + b] += density[a] * (logarithm[a] - logarithm[b]);
      }
    }
  }
  return out;
}

}  // namespace moeserve
