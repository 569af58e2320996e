#include "server/reports/statistics_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/statistics/measures/activated.h"
#include "engine/statistics/measures/collapse.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/measures/router_losses.h"
#include "server/reports/expert_report.h"

namespace moeserve::server {
namespace {

constexpr char kGroundMetric[] = "W1, ground metric |u - v| of token ids";

OrderedJson Matrix(const std::vector<double>& values, size_t n) {
  OrderedJson rows = OrderedJson::array();
  for (size_t a = 0; a < n; ++a) {
    OrderedJson row = OrderedJson::array();
    for (size_t b = 0; b < n; ++b) {
      const double v = values[a * n + b];
      row.push_back(std::isfinite(v) ? OrderedJson(v) : OrderedJson(nullptr));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

std::optional<std::string> TokenText(const Tokenizer* tokenizer, int32_t id) {
  if (tokenizer == nullptr) return std::nullopt;
  const TokenId ids[] = {id};
  auto text = tokenizer->Decode(ids, false);
  if (!text.ok()) return std::nullopt;
  return *std::move(text);
}

// Returns the token's text in single quotes, with escaped line breaks; its id if it has no text.
std::string Shown(const Tokenizer* tokenizer, int32_t id) {
  const std::optional<std::string> text = TokenText(tokenizer, id);
  if (!text) return std::to_string(id);
  std::string out = "'";
  for (const char c : *text) {
    if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += '?';
    } else {
      out += c;
    }
  }
  return out + "'";
}

class Lines {
 public:
  template <typename... Arguments>
  void Add(const char* format, Arguments... arguments) {
    char line[256];
    const int length = std::snprintf(line, sizeof(line), format, arguments...);
    text_.append(line, std::min(static_cast<size_t>(std::max(length, 0)), sizeof(line) - 1));
  }
  void AddText(std::string_view text) { text_ += text; }
  std::string Take() && { return std::move(text_); }

 private:
  std::string text_;
};

void AddRouterTable(Lines& lines, const ExpertStats& stats, double threshold) {
  lines.Add("\n%5s  %-12s  %7s  %8s  %8s  %8s  %9s  %9s  %9s  %9s\n", "layer", "block", "active",
            "entropy", "z-loss", "balance", "L_a", "penalty", "compute", "unique");
  for (const BlockExpertStats& block : stats.blocks) {
    const RouterSummary r = SummarizeRouter(block);
    const ActivatedParameters a = ActivatedOf(block);
    lines.Add("%5d  %-12s  %7d  %8.4f  %8.3f  %8.4f  %9.4f  %9.2f  %8.2f%%  %8.2f%%\n", block.layer,
              Name(block.block), ActivatedExperts(block, threshold), r.entropy_mean, r.z_loss,
              r.balance_loss, r.normalized_balance_loss, r.parameter_penalty,
              100.0 * a.compute_ratio(), 100.0 * a.unique_ratio());
  }
  const ActivatedParameters all = ActivatedOf(stats);
  lines.Add(
      "active: experts over the threshold; entropy in nats; balance: E sum T P (X-MoE, MH-MoE, "
      "HMoE); L_a: MoA's;\npenalty: HMoE's, in units of width; compute, unique: activated share "
      "of the block's expert parameters\n");
  lines.Add("activated parameters per token: compute %.0f, unique %.0f of %lld\n", all.compute,
            all.unique, static_cast<long long>(all.total));
  lines.Add("diversity %.4f distinct experts of a token in a block (mean over %d blocks)\n",
            MeanDiversity(stats), stats.diversity_blocks);
}

void AddTokenLines(Lines& lines, const ExpertProfile& profile, const Tokenizer* tokenizer,
                   const ProfileReportOptions& options) {
  for (size_t i = 0; i < profile.stats.blocks.size(); ++i) {
    const BlockExpertStats& block = profile.stats.blocks[i];
    lines.Add("\nlayer %d %s: load %%", block.layer, Name(block.block));
    const std::vector<double> shares = LoadShares(block);
    for (const int e : ExpertsByLoad(block)) {
      lines.Add(" %d:%.1f", e, 100.0 * shares[static_cast<size_t>(e)]);
    }
    lines.Add("\n");
    if (!profile.hidden.empty()) {
      const auto collapse = RepresentationCollapse(profile.hidden[i]);
      if (collapse.ok()) {
        lines.Add("  representation collapse %.4f (%lld rows, %d experts, rank %d)\n",
                  collapse->value, static_cast<long long>(collapse->rows), collapse->classes,
                  collapse->rank);
      }
    }
    if (profile.token_counts.empty()) continue;
    const auto best = TopTokens(profile.CountsOf(i), options.min_count, options.top);
    for (size_t e = 0; e < best.size(); ++e) {
      if (best[e].empty()) continue;
      lines.Add("  expert %zu, PMI:", e);
      for (const TokenAffinity& t : best[e]) {
        lines.AddText(" " + Shown(tokenizer, t.token));
        lines.Add(" %.1f", t.pmi);
      }
      lines.Add("\n");
    }
  }
}

}  // namespace

OrderedJson TopTokensJson(const TokenCounts& counts, const Tokenizer* tokenizer, uint32_t min_count,
                          int top, TokenRank rank) {
  const auto best = TopTokens(counts, min_count, top, rank);
  OrderedJson out = OrderedJson::array();
  for (size_t e = 0; e < best.size(); ++e) {
    OrderedJson tokens = OrderedJson::array();
    for (const TokenAffinity& t : best[e]) {
      const std::optional<std::string> text = TokenText(tokenizer, t.token);
      tokens.push_back({{"id", t.token},
                        {"text", text ? OrderedJson(*text) : OrderedJson(nullptr)},
                        {"count", t.count},
                        {"pmi", t.pmi},
                        {"log_pmi", std::log(t.pmi)},
                        {"g2", t.g2},
                        {"share", t.share}});
    }
    out.push_back({{"expert", e}, {"tokens", std::move(tokens)}});
  }
  return out;
}

OrderedJson SimilarityJson(const TokenCounts& counts, double eps) {
  const size_t experts = static_cast<size_t>(counts.experts);
  return {{"wasserstein",
           {{"metric", kGroundMetric}, {"matrix", Matrix(TokenDistances(counts), experts)}}},
          {"total_variation", {{"matrix", Matrix(TokenVariations(counts), experts)}}},
          {"kl", {{"eps", eps}, {"matrix", Matrix(TokenDivergences(counts, eps), experts)}}}};
}

OrderedJson CollapseJson(const HiddenSample& sample) {
  const auto collapse = RepresentationCollapse(sample);
  OrderedJson out;
  out["value"] = collapse.ok() ? OrderedJson(collapse->value) : OrderedJson(nullptr);
  if (collapse.ok()) {
    out["classes"] = collapse->classes;
    out["rank"] = collapse->rank;
  } else {
    out["reason"] = std::string(collapse.status().message());
  }
  out["rows"] = sample.size();
  out["seen"] = sample.seen;
  return out;
}

OrderedJson MacsJson(const MeasuredMacs& macs) {
  return {{"matrices", macs.matrices},
          {"attention", macs.attention ? OrderedJson(*macs.attention) : OrderedJson(nullptr)}};
}

OrderedJson ProfileJson(const ExpertProfile& profile, const Tokenizer* tokenizer,
                        const ProfileReportOptions& options) {
  OrderedJson out = ExpertStatsJson(profile.stats, profile.model, std::nullopt, options.threshold);
  out["min_count"] = options.min_count;
  for (size_t i = 0; i < profile.stats.blocks.size(); ++i) {
    OrderedJson& layer = out["layers"][i];
    const bool counted = !profile.token_counts.empty();
    layer["top_tokens"] =
        counted ? TopTokensJson(profile.CountsOf(i), tokenizer, options.min_count, options.top)
                : OrderedJson(nullptr);
    layer["similarity"] =
        counted ? SimilarityJson(profile.CountsOf(i), options.eps) : OrderedJson(nullptr);
    layer["collapse"] =
        profile.hidden.empty() ? OrderedJson(nullptr) : CollapseJson(profile.hidden[i]);
  }
  return out;
}

std::string ProfileTable(const ExpertProfile& profile, const Tokenizer* tokenizer,
                         const ProfileReportOptions& options) {
  Lines lines;
  lines.AddText(ExpertStatsTable(profile.stats, options.threshold));
  AddRouterTable(lines, profile.stats, options.threshold);
  AddTokenLines(lines, profile, tokenizer, options);
  return std::move(lines).Take();
}

}  // namespace moeserve::server
