#include "server/reports/model_comparison.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error_text.h"
#include "engine/statistics/measures/activated.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/measures/router_losses.h"
#include "server/reports/statistics_report.h"

namespace moeserve::server {
namespace {

constexpr const char* kColumns[] = {"model",          "parameters",     "perplexity", "MACs",
                                    "attention MACs", "active experts", "diversity",  "compute",
                                    "unique",         "expert share",   "balance",    "L_a",
                                    "entropy"};

std::string Number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

// Returns the cells of a model's row. A dense model has "-" in the columns about experts.
std::vector<std::string> Row(const ComparedModel& m) {
  const auto routed = [&](std::string text) { return m.experts > 0 ? text : std::string("-"); };
  return {m.model,
          std::to_string(m.parameters),
          Number("%.2f", m.perplexity),
          Number("%.0f", m.macs.matrices),
          m.macs.attention ? Number("%.0f", *m.macs.attention) : "-",
          routed(Number("%.2f %%", 100.0 * m.activation_ratio)),
          routed(Number("%.3f", m.diversity)),
          Number("%.0f", m.compute),
          Number("%.0f", m.unique),
          routed(Number("%.2f %%", 100.0 * m.expert_share)),
          routed(Number("%.3f", m.balance)),
          routed(Number("%.3f", m.balance_loss)),
          routed(Number("%.3f", m.entropy))};
}

std::string Markdown(const std::vector<std::vector<std::string>>& rows) {
  std::string out;
  for (size_t r = 0; r < rows.size(); ++r) {
    out += "|";
    for (const std::string& cell : rows[r]) out += Concat(' ', cell, " |");
    out += "\n";
    if (r > 0) continue;
    out += "|";
    for (size_t c = 0; c < rows[r].size(); ++c) out += "---|";
    out += "\n";
  }
  return out;
}

std::string Plain(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> width(rows.front().size());
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string out;
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string pad(width[c] - row[c].size(), ' ');
      if (c > 0) out += "  ";
      // Names are aligned left, numbers right.
      out += c == 0 ? row[c] + pad : pad + row[c];
    }
    while (out.back() == ' ') out.pop_back();
    out += "\n";
  }
  return out;
}

}  // namespace

ComparedModel Summarize(const ExpertProfile& profile, double perplexity, const MeasuredMacs& macs,
                        double threshold) {
  const ExpertStats& stats = profile.stats;
  ComparedModel out;
  out.model = profile.model;
  out.perplexity = perplexity;
  out.macs = macs;
  out.activation_ratio = ActivationRatio(stats, threshold);
  out.diversity = MeanDiversity(stats);
  const ActivatedParameters activated = ActivatedOf(stats);
  out.parameters = activated.total;
  out.compute = activated.compute;
  out.unique = activated.unique;
  out.expert_share = MeanActivatedRatio(stats);
  const double blocks = static_cast<double>(stats.blocks.size());
  for (const BlockExpertStats& b : stats.blocks) {
    out.experts += b.num_experts;
    const RouterSummary router = SummarizeRouter(b);
    out.balance += MeasureLoad({b.selections.begin(), b.selections.end()}).balance / blocks;
    out.balance_loss += router.normalized_balance_loss / blocks;
    if (b.num_experts > 1) {
      out.entropy += router.entropy_mean / std::log(static_cast<double>(b.num_experts)) / blocks;
    }
  }
  return out;
}

OrderedJson ComparisonJson(const Comparison& comparison) {
  OrderedJson out;
  out["activation_threshold"] = comparison.threshold;
  out["tokens"] = comparison.tokens;
  out["models"] = OrderedJson::array();
  for (const ComparedModel& m : comparison.models) {
    out["models"].push_back({{"model", m.model},
                             {"experts", m.experts},
                             {"parameters", m.parameters},
                             {"perplexity", m.perplexity},
                             {"activation_ratio", m.activation_ratio},
                             {"diversity", m.diversity},
                             {"activated_compute", m.compute},
                             {"activated_unique", m.unique},
                             {"activated_expert_share", m.expert_share},
                             {"macs_per_token", MacsJson(m.macs)},
                             {"load_balance", m.balance},
                             {"normalized_balance_loss", m.balance_loss},
                             {"router_entropy_ratio", m.entropy}});
  }
  return out;
}

std::string ComparisonTable(const Comparison& comparison, bool markdown) {
  std::vector<std::vector<std::string>> rows = {{std::begin(kColumns), std::end(kColumns)}};
  for (const ComparedModel& m : comparison.models) rows.push_back(Row(m));
  return (markdown ? Markdown(rows) : Plain(rows)) +
         "\nPerplexity: of masked language models the pseudo-perplexity. MACs: of a token with all "
         "matrices but the\nLM head; attention MACs: with keys and values (MoA, eq. 18).\nActive "
         "experts: share chosen by more than " +
         Number("%g", comparison.threshold) +
         " of the tokens. Diversity: distinct experts of a token in a\n"
         "block. Compute and unique: parameters that a token activated, counting an expert for "
         "every row or\nonce; parameters without embeddings and head. Expert share: compute over "
         "the block's expert\nparameters. Balance: mean over largest load. L_a: MoA, eq. 13, 1 is "
         "even. Entropy: of the router's\nprobabilities over ln E. Means over blocks.\n";
}

}  // namespace moeserve::server
