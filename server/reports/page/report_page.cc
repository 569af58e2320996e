#include "server/reports/page/report_page.h"

#include <cmath>
#include <cstdio>
#include <utility>

#include "base/error_text.h"
#include "engine/statistics/measures/activated.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/measures/router_losses.h"
#include "engine/statistics/measures/token_affinity.h"
#include "server/base/version.h"
#include "server/reports/page/figures.h"
#include "server/reports/page/svg.h"

namespace moeserve::server {
namespace {

// Colours d0 to d7 mark tokens by how many distinct experts they chose.
constexpr char kStyle[] = R"css(
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 48px; max-width: 900px; color: #1d2330; background: #fff;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header { border-bottom: 2px solid #1f4e86; margin-bottom: 8px; padding-bottom: 10px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 34px 0 4px; color: #1f4e86; break-after: avoid; }
p { margin: 4px 0 10px; }
.about { color: #4c5565; margin: 0; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 18px 24px; }
.thirds { grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 18px 16px; }
.grid .wide { grid-column: 1 / -1; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
figcaption { font-size: 13px; line-height: 1.4; color: #4c5565; margin-top: 4px; }
figcaption b { color: #1d2330; }
figcaption code { white-space: nowrap; }
cite { font-style: normal; color: #1f4e86; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 10.5px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: #333b49; }
svg .axis { fill: #4c5565; font-style: italic; }
svg .in, svg .on { font-size: 9.5px; }
svg .on { fill: #fff; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin: 6px 0;
  font-variant-numeric: tabular-nums; break-inside: auto; }
tr { break-inside: avoid; }
th, td { text-align: right; padding: 3px 8px; border-bottom: 1px solid #dde1e6;
  vertical-align: top; }
th { font-weight: 600; border-bottom-color: #9aa3b0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
td.words, th.words { text-align: left; overflow-wrap: anywhere; }
td code { font: 12px ui-monospace, "DejaVu Sans Mono", Consolas, monospace; background: #eef2f7;
  border-radius: 3px; padding: 0 3px; margin-right: 3px; white-space: nowrap; }
.facts { columns: 2; column-gap: 24px; padding: 0; margin: 12px 0 0; list-style: none;
  font-size: 14px; }
.facts li { display: flex; justify-content: space-between; gap: 12px; padding: 3px 0;
  border-bottom: 1px solid #dde1e6; break-inside: avoid; }
.facts cite { white-space: nowrap; }
.facts b { font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { font: 14px/1.75 Georgia, "Times New Roman", serif; margin: 0; overflow-wrap: anywhere; }
.text span { border-radius: 2px; }
.d0 { background: #f7f9fc; } .d1 { background: #e3edf7; } .d2 { background: #cbdff0; }
.d3 { background: #a8c9e6; } .d4 { background: #7fb0d8; } .d5 { background: #5a97c9; color: #fff; }
.d6 { background: #2f6ba6; color: #fff; } .d7 { background: #123a78; color: #fff; }
footer { margin-top: 36px; font-size: 12.5px; color: #4c5565; border-top: 1px solid #dde1e6;
  padding-top: 8px; }
@media (max-width: 640px) { .grid, .thirds { grid-template-columns: minmax(0, 1fr); }
  .facts { columns: 1; } table { display: block; overflow-x: auto; }
  figure.wide { overflow-x: auto; } figure.wide svg { min-width: 600px; } }
@page { size: A4; margin: 15mm 14mm 16mm; }
@media print { body { padding: 0; max-width: none; font-size: 10.5pt;
    -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  h1 { font-size: 19pt; } h2 { font-size: 14pt; margin-top: 20pt; }
  .grid { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12pt 14pt; }
  .thirds { grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 12pt 10pt; }
  figcaption, table { font-size: 8.5pt; } .facts { font-size: 9.5pt; columns: 2; }
  td code { font-size: 8pt; } .text { font-size: 10pt; } footer { font-size: 8pt; } }
)css";

std::string PageSection(const std::string& title, const std::string& about,
                        const std::string& content, const char* grid = "grid") {
  if (content.empty()) return "";
  return Concat("<section>\n<h2>", title, "</h2>\n", about.empty() ? "" : "<p>" + about + "</p>\n",
                "<div class=\"", grid, "\">\n", content, "</div>\n</section>\n");
}

std::string FixedNumber(const char* format, double value) {
  if (!std::isfinite(value)) return "\u2013";
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string BlockName(const BlockExpertStats& block) {
  const char* const kind = block.block == BlockKind::kAttention        ? " attention"
                           : block.block == BlockKind::kCrossAttention ? " cross-attention"
                                                                       : " feed-forward";
  const std::string_view stack = block.stack == Stack::kOnly ? "" : KindName(block.stack);
  return Concat(stack, stack.empty() ? "" : " ", block.layer, kind);
}

// Returns a row of a table; the first cell is its head.
std::string TableRow(const std::vector<std::string>& cells, const char* tag = "td") {
  std::string out = "<tr>";
  for (const std::string& cell : cells) out += Concat('<', tag, '>', cell, "</", tag, '>');
  return out + "</tr>\n";
}

std::string SummaryList(const ReportPage& page) {
  std::vector<std::pair<std::string, std::string>> facts;
  if (!std::isnan(page.perplexity)) {
    facts.emplace_back(page.pseudo ? "Pseudo-perplexity" : "Perplexity",
                       FixedNumber("%.3f", page.perplexity));
    if (!page.pseudo) facts.emplace_back("Bits per byte", FixedNumber("%.4f", page.bits_per_byte));
  }
  facts.emplace_back("Parameters", ShowNumber(static_cast<double>(page.parameters)));
  const ExpertStats& stats = page.profile.stats;
  const ActivatedParameters activated = ActivatedOf(stats);
  facts.emplace_back("Activated parameters per token <cite>HMoE, table 2</cite>",
                     ShowNumber(activated.compute));
  facts.emplace_back("MACs per token, matrices <cite>MoA, eq. 18</cite>",
                     ShowNumber(page.macs.matrices));
  if (page.macs.attention) {
    facts.emplace_back("MACs per token, keys and values", ShowNumber(*page.macs.attention));
  }
  if (!stats.blocks.empty()) {
    facts.emplace_back("Activated experts <cite>MH-MoE, fig. 1</cite>",
                       ShowPercent(ActivationRatio(stats, page.options.threshold)));
    facts.emplace_back("Activated share of expert parameters <cite>HMoE, table 2</cite>",
                       ShowPercent(MeanActivatedRatio(stats)));
    facts.emplace_back("Distinct experts per token and block <cite>MH-MoE, fig. 7</cite>",
                       FixedNumber("%.3f", MeanDiversity(stats)));
  }
  std::string out = "<ul class=\"facts\">\n";
  for (const auto& [name, value] : facts) {
    out += Concat("<li><span>", name, "</span><b>", value, "</b></li>\n");
  }
  return out + "</ul>\n";
}

std::string RouterTable(const ReportPage& page) {
  if (page.profile.stats.blocks.empty()) return "";
  std::string rows =
      TableRow({"Layer", "Entropy (nats)", "Balance loss", "with \u03c4<sub>0</sub>",
                "L<sub>a</sub>", "z-loss", "P-penalty", "Activated", "Mean/max load"},
               "th");
  for (size_t i = 0; i < page.profile.stats.blocks.size(); ++i) {
    const BlockExpertStats& block = page.profile.stats.blocks[i];
    const RouterSummary r = SummarizeRouter(block);
    const LoadShape shape = MeasureLoad({block.selections.begin(), block.selections.end()});
    const bool learned = i < page.initial_balance.size() && page.initial_balance[i].has_value();
    rows += TableRow(
        {BlockName(block), FixedNumber("%.3f", r.entropy_mean), FixedNumber("%.3f", r.balance_loss),
         learned ? FixedNumber("%.3f", page.initial_balance[i]->loss) : "\u2013",
         FixedNumber("%.3f", r.normalized_balance_loss), FixedNumber("%.2f", r.z_loss),
         FixedNumber("%.1f", r.parameter_penalty),
         Concat(ActivatedExperts(block, page.options.threshold), " of ", block.num_experts),
         FixedNumber("%.3f", shape.balance)});
  }
  std::string tau;
  for (const std::optional<InitialBalance>& balance : page.initial_balance) {
    if (balance) tau = Concat("; \u03c4<sub>0</sub> = ", ShowNumber(balance->initial));
  }
  return Figure(
      "<table>\n" + rows + "</table>\n",
      Concat("<b>Terms of the training losses</b>, computed from this text. Entropy of the "
             "router <cite>HMoE, eq. 5</cite>; balance loss E\u00a0\u03a3\u00a0T P <cite>X-MoE, "
             "eq. 9; MH-MoE, eq. 10; HMoE, eq. 3</cite>, also with X-MoE\u2019s initial "
             "temperature",
             tau,
             "; L<sub>a</sub>, 1 for even load <cite>MoA, eq. 13</cite>; z-loss <cite>MoA, "
             "eq. 16</cite>; penalty in units of the width <cite>HMoE, eq. 4</cite>."),
      true);
}

std::string CapacityTable(const ReportPage& page) {
  if (page.dropped.empty()) return "";
  std::string rows =
      TableRow({"Layer", "Limit (rows)", "Choices", "Dropped", "Rows without expert"}, "th");
  for (size_t i = 0; i < page.dropped.size(); ++i) {
    const DroppedRows& d = page.dropped[i];
    const auto share = [](uint64_t part, uint64_t whole) {
      return whole > 0 ? ShowPercent(static_cast<double>(part) / static_cast<double>(whole)) : "0";
    };
    rows +=
        TableRow({BlockName(page.profile.stats.blocks[i]),
                  d.least_limit == d.most_limit ? Concat(d.most_limit)
                                                : Concat(d.least_limit, " to ", d.most_limit),
                  Concat(d.choices), share(d.dropped, d.choices), share(d.rows_without, d.rows)});
  }
  return Figure(
      "<table>\n" + rows + "</table>\n",
      Concat(
          "<b>Rows over the capacity ", EscapeHtml(page.capacity),
          "</b> of an expert were dropped, as training code does. Without that, the perplexity is ",
          FixedNumber("%.3f", page.perplexity_without), "; with it, ",
          FixedNumber("%.3f", page.perplexity),
          ". All other numbers of this page are of the run with the capacity."),
      true);
}

// Returns the texts of tokens, each in its own box.
std::string TokenCells(const ReportPage& page, const std::vector<TokenAffinity>& tokens) {
  std::string out;
  for (const TokenAffinity& t : tokens) {
    const TokenId ids[] = {t.token};
    const auto text = page.tokenizer.Decode(ids, false);
    std::string shown;
    for (const char c : text.ok() ? *text : std::to_string(t.token)) {
      shown += c == ' ' ? std::string("\u2423") : std::string(1, c);
    }
    out += Concat("<code>", EscapeHtml(shown), "</code> ");
  }
  return out;
}

std::string TokenTables(const ReportPage& page) {
  if (page.profile.token_counts.empty()) return "";
  constexpr size_t kTables = 2, kExperts = 12;
  constexpr int kTokens = 8;
  std::string out;
  const size_t count = page.profile.stats.blocks.size();
  for (size_t i = 0; i < std::min(count, kTables); ++i) {
    const size_t b = i == 0 ? 0 : count - 1;
    const BlockExpertStats& block = page.profile.stats.blocks[b];
    const auto by_pmi = TopTokens(page.profile.CountsOf(b), page.options.min_count, kTokens);
    const auto by_count =
        TopTokens(page.profile.CountsOf(b), page.options.min_count, kTokens, TokenRank::kCount);
    const std::vector<int> order = ExpertsByLoad(block);
    const std::vector<double> shares = LoadShares(block);
    std::string rows =
        "<tr><th>Expert</th><th>Load</th><th class=\"words\">By PMI</th>"
        "<th class=\"words\">Most frequent</th></tr>\n";
    for (size_t k = 0; k < std::min(order.size(), kExperts); ++k) {
      const auto e = static_cast<size_t>(order[k]);
      rows += Concat("<tr><td>", e, "</td><td>", ShowPercent(shares[e]),
                     "</td><td class=\"words\">", TokenCells(page, by_pmi[e]),
                     "</td><td class=\"words\">", TokenCells(page, by_count[e]), "</td></tr>\n");
    }
    out += Figure("<table>\n" + rows + "</table>\n",
                  Concat("<b>Layer ", EscapeHtml(BlockName(block)),
                         ".</b> Tokens that were routed to "
                         "an expert at least ",
                         page.options.min_count,
                         " times, the most loaded experts first. <cite>MoA, table 4; HMoE, table "
                         "3</cite>"),
                  true);
  }
  return out;
}

std::string PageHeader(const ReportPage& page) {
  std::string names;
  for (const std::string& text : page.texts) names += (names.empty() ? "" : ", ") + text;
  return Concat("<header>\n<h1>Experts of ", EscapeHtml(page.profile.model),
                "</h1>\n<p class=\"about\">Text: ", EscapeHtml(names), " (", page.tokens,
                " tokens in windows of ", page.window, ")</p>\n</header>\n");
}

}  // namespace

std::string ReportHtml(const ReportPage& page) {
  const bool routed = !page.profile.stats.blocks.empty();
  std::string out = Concat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'\">\n<title>Experts of ",
      EscapeHtml(page.profile.model), "</title>\n<style>", kStyle, "</style>\n</head>\n<body>\n",
      PageHeader(page), SummaryList(page));
  if (!routed) out += "<p>This model routes nothing: all parameters compute every token.</p>\n";
  if (routed) {
    out += PageSection("Which experts are active", "", ActivationFigure(page));
    out += PageSection("Capacity", "", CapacityTable(page));
    out += PageSection("Load of the experts", "", LoadFigures(page));
    out += PageSection("Parameters that a token activates", "",
                       ActivatedParametersFigure(page) + ExpertSizeFigures(page));
    out += PageSection("How tokens spread over experts", "", DiversityFigures(page));
    out += PageSection(page.word_experts ? "Words and their experts" : "Tokens and their experts",
                       "", WordFigures(page));
    out += PageSection("Experts and their tokens", "", TokenTables(page));
    out += PageSection("Similarity and synergy of the experts", "", SimilarityFigures(page),
                       "grid thirds");
    out += PageSection("Routers", "", RouterTable(page) + RepresentationFigures(page));
  }
  out +=
      Concat("<footer>moeserve ", kVersion,
             ". Papers: <b>X-MoE</b>, On the Representation Collapse of Sparse Mixture of Experts "
             "(2022); <b>MH-MoE</b>, Multi-Head Mixture-of-Experts (2024); <b>MoA</b>, Mixture of "
             "Attention Heads (2022); <b>HMoE</b>, Heterogeneous Mixture of Experts for Language "
             "Modeling (2024). Figures over several checkpoints come from <code>moeserve experts "
             "curves</code>, tables of several models from <code>moeserve experts "
             "compare</code>.</footer>\n</body>\n</html>\n");
  return out;
}

}  // namespace moeserve::server
