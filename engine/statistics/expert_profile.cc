#include "engine/statistics/expert_profile.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace moeserve {
namespace {

std::string BlockName(const BlockExpertStats& b) {
  const std::string layer = "layer " + std::to_string(b.layer) + ", " + Name(b.block);
  return b.stack == Stack::kOnly ? layer : std::string(KindName(b.stack)) + " " + layer;
}

const std::string kDiffer = "the profiles are not of the same architecture: ";

template <typename T>
absl::Status Differ(const std::string& what, T x, T y) {
  return absl::InvalidArgumentError(kDiffer + what + " " + std::to_string(x) + " and " +
                                    std::to_string(y));
}

// Returns the indices of `count` of `size` rows; every subset is equally likely.
std::vector<int64_t> Draw(int64_t size, int64_t count, std::mt19937_64& random) {
  std::vector<int64_t> rows(static_cast<size_t>(size));
  std::iota(rows.begin(), rows.end(), int64_t{0});
  for (int64_t i = 0; i < count; ++i) {
    const int64_t j = std::uniform_int_distribution<int64_t>(i, size - 1)(random);
    std::swap(rows[static_cast<size_t>(i)], rows[static_cast<size_t>(j)]);
  }
  rows.resize(static_cast<size_t>(count));
  std::sort(rows.begin(), rows.end());
  return rows;
}

void AppendRows(HiddenSample& to, const HiddenSample& from, const std::vector<int64_t>& rows) {
  for (const int64_t r : rows) {
    const auto begin = from.rows.begin() + r * from.width;
    to.rows.insert(to.rows.end(), begin, begin + from.width);
    to.experts.push_back(from.experts[static_cast<size_t>(r)]);
  }
}

// Merges two samples into a uniform sample of all rows that either of them has seen; its capacity
// is the smaller one. How many of its rows come from `a` is found by drawing that many of all rows
// seen without replacement and counting those that `a` has seen.
HiddenSample MergedSample(const HiddenSample& a, const HiddenSample& b, uint64_t seed) {
  HiddenSample out;
  out.width = a.width;
  out.capacity = std::min(a.capacity, b.capacity);
  out.seen = a.seen + b.seen;
  std::mt19937_64 random(seed ^ out.seen);
  uint64_t left_a = a.seen, left_b = b.seen;
  int64_t from_a = 0, from_b = 0;
  while (from_a + from_b < out.capacity && left_a + left_b > 0) {
    const uint64_t ticket = std::uniform_int_distribution<uint64_t>(0, left_a + left_b - 1)(random);
    if (ticket < left_a) {
      ++from_a, --left_a;
    } else {
      ++from_b, --left_b;
    }
  }
  AppendRows(out, a, Draw(a.size(), from_a, random));
  AppendRows(out, b, Draw(b.size(), from_b, random));
  return out;
}

void Append(BlockRoutes& to, const BlockRoutes& from) {
  const uint64_t base = to.offsets.back();
  for (size_t r = 1; r < from.offsets.size(); ++r) to.offsets.push_back(base + from.offsets[r]);
  to.top1.insert(to.top1.end(), from.top1.begin(), from.top1.end());
  to.experts.insert(to.experts.end(), from.experts.begin(), from.experts.end());
}

}  // namespace

std::vector<std::vector<uint32_t>> CountsByBlock(const TokenExpertCounts& table,
                                                 const ExpertStats& stats) {
  std::vector<int64_t> experts;
  for (const BlockExpertStats& b : stats.blocks) experts.push_back(b.num_experts);
  return table.ColumnGroups(experts);
}

absl::Status CheckComparable(const ExpertProfile& a, const ExpertProfile& b) {
  if (a.stats.blocks.size() != b.stats.blocks.size()) {
    return Differ("numbers of routed blocks", a.stats.blocks.size(), b.stats.blocks.size());
  }
  for (size_t i = 0; i < a.stats.blocks.size(); ++i) {
    const BlockExpertStats& x = a.stats.blocks[i];
    const BlockExpertStats& y = b.stats.blocks[i];
    if (x.stack != y.stack || x.layer != y.layer || x.block != y.block) {
      return absl::InvalidArgumentError(kDiffer + "routed block " + std::to_string(i) + " is " +
                                        BlockName(x) + " and " + BlockName(y));
    }
    if (x.num_experts != y.num_experts) {
      return Differ(BlockName(x) + ": experts", x.num_experts, y.num_experts);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSameShape(const ExpertProfile& a, const ExpertProfile& b) {
  if (absl::Status comparable = CheckComparable(a, b); !comparable.ok()) return comparable;
  if (a.vocabulary != b.vocabulary) return Differ("vocabularies of", a.vocabulary, b.vocabulary);
  for (size_t i = 0; i < a.stats.blocks.size(); ++i) {
    const BlockExpertStats& x = a.stats.blocks[i];
    const BlockExpertStats& y = b.stats.blocks[i];
    if (x.split_heads != y.split_heads) {
      return Differ(BlockName(x) + ": rows of a token", x.split_heads, y.split_heads);
    }
    if (x.expert_widths != y.expert_widths || x.expert_parameters != y.expert_parameters) {
      return absl::InvalidArgumentError(kDiffer + BlockName(x) + ": experts of different sizes");
    }
  }
  return absl::OkStatus();
}

absl::Status Merge(ExpertProfile& to, const ExpertProfile& from) {
  if (absl::Status same = CheckSameShape(to, from); !same.ok()) return same;
  bool keep_hidden = !to.hidden.empty() && !from.hidden.empty();
  for (size_t i = 0; keep_hidden && i < to.hidden.size(); ++i) {
    if (to.hidden[i].width != from.hidden[i].width) {
      return absl::InvalidArgumentError(kDiffer + "router inputs of width " +
                                        std::to_string(to.hidden[i].width) + " and " +
                                        std::to_string(from.hidden[i].width));
    }
  }
  // The histograms of a server that let requests override the number of experts have more entries,
  // so the shorter histogram is extended by zeros.
  ExpertStats added = from.stats;
  const auto even = [](std::vector<uint64_t>& a, std::vector<uint64_t>& b) {
    const size_t size = std::max(a.size(), b.size());
    a.resize(size);
    b.resize(size);
  };
  even(to.stats.diversity_histogram, added.diversity_histogram);
  for (size_t i = 0; i < added.blocks.size(); ++i) {
    even(to.stats.blocks[i].distinct_histogram, added.blocks[i].distinct_histogram);
  }
  Accumulate(to.stats, added);
  if (to.model != from.model) to.model += "+" + from.model;

  if (from.token_counts.empty()) to.token_counts.clear();
  for (size_t i = 0; i < to.token_counts.size(); ++i) {
    for (size_t j = 0; j < to.token_counts[i].size(); ++j) {
      uint32_t& sum = to.token_counts[i][j];
      sum += std::min(from.token_counts[i][j], UINT32_MAX - sum);
    }
  }

  if (!keep_hidden) to.hidden.clear();
  for (size_t i = 0; i < to.hidden.size(); ++i) {
    to.hidden[i] = MergedSample(to.hidden[i], from.hidden[i], i);
  }

  if (!to.routes || !from.routes) {
    to.routes.reset();
    return absl::OkStatus();
  }
  to.routes->tokens.insert(to.routes->tokens.end(), from.routes->tokens.begin(),
                           from.routes->tokens.end());
  for (size_t i = 0; i < to.routes->blocks.size(); ++i) {
    Append(to.routes->blocks[i], from.routes->blocks[i]);
  }
  return absl::OkStatus();
}

}  // namespace moeserve
