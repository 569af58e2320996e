// Which tokens an expert computes, and how similar experts are in that respect. c(v, e) is how
// often token id v was routed to expert e in one block.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moeserve {

// The counts c(v, e) of one block, [rows][experts]. Does not own them. Row v is of token v, or of
// tokens[v] if `tokens` is not empty; a row of token -1 sums up all tokens that have no row of
// their own.
struct TokenCounts {
  int64_t rows = 0;
  int64_t experts = 0;
  std::span<const uint32_t> counts;
  std::span<const int32_t> tokens = {};

  uint32_t at(int64_t row, int64_t expert) const {
    return counts[static_cast<size_t>(row * experts + expert)];
  }
  int32_t token(int64_t row) const {
    return tokens.empty() ? static_cast<int32_t>(row) : tokens[static_cast<size_t>(row)];
  }
};

struct TokenAffinity {
  int32_t token = 0;
  uint32_t count = 0;  // c(v, e)
  double pmi = 0.0;    // p(v, e) / (p(v) p(e)), without a logarithm (MoA, table 4)
  double share = 0.0;  // a(v, e) = c(v, e) / sum_e' c(v, e') (HMoE, fig. 10)
  // The evidence that token and expert are not independent: the log-likelihood ratio
  // G2 = 2 sum_ij O_ij ln(O_ij / E_ij) of the 2 x 2 table of "token v or another" and "expert e or
  // another" (Dunning, 1993), negative if c(v, e) is below its expectation. Unlike pmi, it does not
  // favour rare tokens.
  double g2 = 0.0;
};

// What tokens are ranked by.
enum class TokenRank { kPmi, kG2, kCount };

// Returns for each expert the `top` tokens with the largest pmi, g2 or count among the tokens with
// c(v, e) >= `min_count` (at least 1). Ties: the more frequent token first, then the lower id.
std::vector<std::vector<TokenAffinity>> TopTokens(const TokenCounts& counts, uint32_t min_count,
                                                  int top, TokenRank rank = TokenRank::kPmi);

// Returns an estimate of the time of the three functions below, in units of a few nanoseconds.
inline double SimilarityWork(int64_t rows, int64_t experts) {
  return static_cast<double>(rows) * static_cast<double>(experts) * static_cast<double>(experts);
}

// Returns the matrix [E * E] of Wasserstein-1 distances between the experts' token distributions
// D_e(v) = c(v, e) / sum_v c(v, e), with the distance |u - v| of token ids as the ground metric:
// sum_v |CDF_a(v) - CDF_b(v)| (HMoE, fig. 9a and 13, which name no metric). NaN if an expert has no
// tokens.
std::vector<double> TokenDistances(const TokenCounts& counts);

// Returns the matrix [E * E] of total variation distances 1/2 sum_v |D_a(v) - D_b(v)| between the
// same distributions, in [0, 1]. This is the Wasserstein-1 distance in which all pairs of different
// tokens are equally far from each other, which does not depend on the order of the vocabulary
// (HMoE, fig. 9a and 13). NaN if an expert has no tokens.
std::vector<double> TokenVariations(const TokenCounts& counts);

// Returns the matrix [E * E] with KL(D_a || D_b) = sum_v D_a ln(D_a / D_b), in nats, in row a and
// column b, where D_e(v) = (c(v, e) + eps) / (sum_v c(v, e) + eps V) (HMoE, fig. 9b). `eps` is
// positive.
std::vector<double> TokenDivergences(const TokenCounts& counts, double eps);

}  // namespace moeserve
