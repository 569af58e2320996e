#include "server/reports/page/figures.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error_text.h"
#include "engine/statistics/measures/activated.h"
#include "engine/statistics/measures/collapse.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/measures/token_affinity.h"
#include "server/reports/page/principal_plane.h"
#include "server/reports/page/svg.h"

namespace moeserve::server {
namespace {

constexpr double kBlank = std::numeric_limits<double>::quiet_NaN();
constexpr double kWide = 740;      // width of a chart over the whole page
constexpr double kThird = 240;     // and of one of three beside each other
constexpr size_t kBlocks = 4;      // most blocks that figures of single blocks show
constexpr size_t kMostCells = 32;  // experts in a matrix of pairs
constexpr size_t kMarkedTokens = 320;
constexpr size_t kPoints = 700;

const std::vector<BlockExpertStats>& BlocksOf(const ReportPage& page) {
  return page.profile.stats.blocks;
}

bool HasAttention(const ReportPage& page) {
  return std::any_of(BlocksOf(page).begin(), BlocksOf(page).end(),
                     [](const auto& b) { return b.block == BlockKind::kAttention; });
}

// Returns the name of a block in charts: "layer 3", with its kind if the model routes attention.
std::string ShortName(const ReportPage& page, const BlockExpertStats& block) {
  const std::string layer = Concat("layer ", block.layer);
  if (!HasAttention(page)) return layer;
  return layer + (block.block == BlockKind::kAttention ? " att." : " ff.");
}

std::string LongName(const BlockExpertStats& block) {
  return Concat("Layer ", block.layer, ", ",
                block.block == BlockKind::kAttention ? "attention" : "feed-forward");
}

// Returns up to `most` of the routed blocks, evenly spread from the first to the last.
std::vector<size_t> SomeBlocks(const ReportPage& page, size_t most = kBlocks) {
  const size_t count = BlocksOf(page).size();
  const size_t shown = std::min(most, count);
  std::vector<size_t> out;
  for (size_t i = 0; i < shown; ++i) {
    out.push_back(shown == 1 ? 0 : i * (count - 1) / (shown - 1));
  }
  return out;
}

std::vector<std::string> Numbers(size_t count) {
  std::vector<std::string> out;
  for (size_t i = 0; i < count; ++i) out.push_back(std::to_string(i));
  return out;
}

size_t MostExperts(const ReportPage& page) {
  size_t most = 0;
  for (const BlockExpertStats& b : BlocksOf(page)) {
    most = std::max(most, static_cast<size_t>(b.num_experts));
  }
  return most;
}

// Returns whether the experts of the first block differ in size.
bool UnequalExperts(const ReportPage& page) {
  if (BlocksOf(page).empty()) return false;
  const std::vector<int>& widths = BlocksOf(page).front().expert_widths;
  return std::adjacent_find(widths.begin(), widths.end(), std::not_equal_to<>()) != widths.end();
}

// Returns the text of a token with visible white space.
std::string TokenName(const Tokenizer& tokenizer, int32_t id) {
  const TokenId ids[] = {id};
  const auto decoded = tokenizer.Decode(ids, false);
  std::string text = decoded.ok() ? *decoded : std::to_string(id);
  std::string out;
  for (const char c : text) out += c == ' ' ? std::string("\u2423") : std::string(1, c);
  return out;
}

std::string TokenSpreadFigure(const ReportPage& page) {
  const ExpertStats& stats = page.profile.stats;
  const bool words = page.word_experts.has_value();
  BarChart chart;
  chart.width = kWide;
  chart.height = 190;
  chart.percent = true;
  const auto add = [&](const std::string& name, const std::vector<uint64_t>& histogram) {
    const double sum =
        static_cast<double>(std::accumulate(histogram.begin(), histogram.end(), uint64_t{0}));
    BarChart::Series series{.name = name, .values = {}};
    for (const uint64_t n : histogram) {
      series.values.push_back(sum > 0.0 ? static_cast<double>(n) / sum : 0.0);
    }
    chart.series.push_back(std::move(series));
  };
  if (words) {
    add("listed words", page.word_experts->listed.histogram);
    add("other words", page.word_experts->others.histogram);
  } else {
    add("all tokens", stats.diversity_histogram);
  }
  size_t last = 0, first = std::numeric_limits<size_t>::max();
  for (BarChart::Series& series : chart.series) {
    for (size_t n = 0; n < series.values.size(); ++n) {
      if (series.values[n] <= 0.0) continue;
      last = std::max(last, n);
      first = std::min(first, n);
    }
  }
  if (first > last) return "";
  for (size_t n = first; n <= last; ++n) {
    chart.labels.push_back(
        ShowNumber(static_cast<double>(n) / std::max(1, stats.diversity_blocks)));
  }
  for (BarChart::Series& series : chart.series) {
    series.values.resize(last + 1, 0.0);
    series.values.erase(series.values.begin(),
                        series.values.begin() + static_cast<std::ptrdiff_t>(first));
  }
  chart.title = "distinct experts of a token, mean over blocks";
  std::string caption =
      "<b>Diversity.</b> Over how many distinct experts the rows of a token spread, as the share "
      "of "
      "the tokens.";
  if (words) {
    caption +=
        Concat(" Means: ", ShowNumber(page.word_experts->listed.mean), " in the listed words, ",
               ShowNumber(page.word_experts->others.mean), " in all other words.");
  } else {
    caption +=
        Concat(" Mean: ", ShowNumber(MeanDiversity(stats)),
               ". With <code>score\u00a0--words</code>, listed words are compared with others.");
  }
  return Figure(Draw(chart), caption + " <cite>MH-MoE, fig. 7</cite>", true);
}

// Returns how many distinct experts a token chose, as a share of the most that it could choose.
double SpreadOf(const ReportPage& page, size_t token) {
  size_t distinct = 0, most = 0;
  std::vector<uint16_t> chosen;
  for (size_t b = 0; b < BlocksOf(page).size(); ++b) {
    const BlockExpertStats& block = BlocksOf(page)[b];
    const auto heads = static_cast<size_t>(block.split_heads);
    chosen.clear();
    for (size_t row = token * heads; row < (token + 1) * heads; ++row) {
      const auto experts = page.profile.routes->blocks[b].ExpertsOf(row);
      chosen.insert(chosen.end(), experts.begin(), experts.end());
    }
    std::sort(chosen.begin(), chosen.end());
    distinct += static_cast<size_t>(std::unique(chosen.begin(), chosen.end()) - chosen.begin());
    most += std::min(static_cast<size_t>(block.num_experts),
                     heads * static_cast<size_t>(block.max_selected));
  }
  return most > 0 ? static_cast<double>(distinct) / static_cast<double>(most) : 0.0;
}

std::string MarkedText(const ReportPage& page) {
  if (!page.profile.routes || BlocksOf(page).empty()) return "";
  const std::vector<int32_t>& tokens = page.profile.routes->tokens;
  std::vector<double> spread;
  for (size_t t = 0; t < std::min(tokens.size(), kMarkedTokens); ++t) {
    spread.push_back(page.tokenizer.IsSpecial(tokens[t]) ? kBlank : SpreadOf(page, t));
  }
  double low = 1.0, high = 0.0;
  for (const double s : spread) {
    if (!std::isfinite(s)) continue;
    low = std::min(low, s);
    high = std::max(high, s);
  }
  if (high <= low) return "";  // all tokens chose equally many
  std::string text;
  for (size_t t = 0; t < spread.size(); ++t) {
    if (!std::isfinite(spread[t])) continue;
    const TokenId ids[] = {tokens[t]};
    const auto decoded = page.tokenizer.Decode(ids, false);
    const long level = std::lround(7.0 * (spread[t] - low) / (high - low));
    text += Concat("<span class=\"d", level, "\">", EscapeHtml(decoded.ok() ? *decoded : ""),
                   "</span>");
  }
  return Figure(Concat("<p class=\"text\">", text, "</p>"),
                Concat("<b>The beginning of the text.</b> The darker a token, the more distinct "
                       "experts it chose, from ",
                       ShowPercent(low), " to ", ShowPercent(high),
                       " of the most that are possible. <cite>MH-MoE, fig. 8, with tokens in the "
                       "place of patches</cite>"),
                true);
}

// Returns the shares of experts for the tokens that occur most often.
HeatMap FrequentTokens(const ReportPage& page, size_t block) {
  const TokenCounts counts = page.profile.CountsOf(block);
  std::vector<std::pair<double, int64_t>> frequent;
  for (int64_t v = 0; v < counts.rows; ++v) {
    double sum = 0.0;
    for (int64_t e = 0; e < counts.experts; ++e) sum += counts.at(v, e);
    if (sum > 0.0) frequent.emplace_back(-sum, v);
  }
  std::sort(frequent.begin(), frequent.end());
  frequent.resize(std::min<size_t>(frequent.size(), 16));
  HeatMap map;
  for (const auto& [sum, v] : frequent) {
    map.rows.push_back(TokenName(page.tokenizer, counts.token(v)));
    for (int64_t e = 0; e < counts.experts; ++e) map.values.push_back(counts.at(v, e) / -sum);
  }
  return map;
}

HeatMap ListedWords(const ReportPage& page, size_t block) {
  HeatMap map;
  for (size_t w = 0; w < page.words.size() && map.rows.size() < 40; ++w) {
    const std::vector<uint64_t>& counts = page.word_experts->words[w].counts[block];
    const double sum =
        static_cast<double>(std::accumulate(counts.begin(), counts.end(), uint64_t{0}));
    if (sum <= 0.0) continue;
    map.rows.push_back(page.words[w]);
    for (const uint64_t n : counts) map.values.push_back(static_cast<double>(n) / sum);
  }
  return map;
}

// Returns the experts of a block that matrices of pairs show: the most loaded ones, by id.
std::vector<int> ShownExperts(const BlockExpertStats& block) {
  std::vector<int> out = ExpertsByLoad(block);
  out.resize(std::min(out.size(), kMostCells));
  std::sort(out.begin(), out.end());
  return out;
}

std::string PairFigure(const std::vector<double>& matrix, size_t experts,
                       const std::vector<int>& shown, const std::string& caption) {
  HeatMap map;
  map.width = kThird;
  map.square = true;
  map.titles = true;
  for (const int a : shown) {
    map.rows.push_back(std::to_string(a));
    map.columns.push_back(std::to_string(a));
    for (const int b : shown) {
      map.values.push_back(matrix[static_cast<size_t>(a) * experts + static_cast<size_t>(b)]);
    }
  }
  return Figure(Draw(map), caption);
}

}  // namespace

std::string Figure(const std::string& chart, const std::string& caption, bool wide) {
  return Concat("<figure", wide ? " class=\"wide\"" : "", ">\n", chart, "<figcaption>", caption,
                "</figcaption></figure>\n");
}

std::string ActivationFigure(const ReportPage& page) {
  HeatMap map;
  map.width = kWide;
  map.titles = true;
  map.numbers = true;
  map.column_title = "expert";
  const size_t experts = MostExperts(page);
  map.columns = Numbers(experts);
  for (const BlockExpertStats& block : BlocksOf(page)) {
    map.rows.push_back(ShortName(page, block));
    std::vector<double> ratios = SelectionRatios(block);
    ratios.resize(experts, kBlank);
    map.values.insert(map.values.end(), ratios.begin(), ratios.end());
  }
  return Figure(
      Draw(map),
      Concat("<b>Expert activation.</b> How often each expert was selected, divided by the number "
             "of tokens. ",
             ShowPercent(ActivationRatio(page.profile.stats, page.options.threshold)),
             " of the experts are above the threshold ", ShowNumber(page.options.threshold),
             " and count as activated. <cite>MH-MoE, fig. 1 (a) and 5</cite>"),
      true);
}

std::string LoadFigures(const ReportPage& page) {
  std::string out;
  for (const size_t i : SomeBlocks(page, 8)) {
    const BlockExpertStats& block = BlocksOf(page)[i];
    const std::vector<double> shares = LoadShares(block);
    BarChart chart;
    chart.percent = true;
    chart.height = 130;
    chart.title = "expert";
    chart.series.push_back({.name = "", .values = {}});
    for (const int e : ExpertsByLoad(block)) {
      chart.labels.push_back(std::to_string(e));
      chart.series[0].values.push_back(shares[static_cast<size_t>(e)]);
    }
    const LoadShape shape = MeasureLoad({block.selections.begin(), block.selections.end()});
    out += Figure(Draw(chart),
                  Concat("<b>", LongName(block), ".</b> Load by expert; mean over largest load ",
                         ShowNumber(shape.balance), ", ", shape.unused,
                         " unused. <cite>MoA, fig. 3 and 4</cite>"));
  }
  return out;
}

std::string ActivatedParametersFigure(const ReportPage& page) {
  BarChart chart;
  chart.width = kWide;
  chart.height = 160;
  chart.percent = true;
  chart.series = {{.name = "computed", .values = {}}, {.name = "distinct", .values = {}}};
  for (const BlockExpertStats& block : BlocksOf(page)) {
    const ActivatedParameters activated = ActivatedOf(block);
    chart.labels.push_back(ShortName(page, block));
    chart.series[0].values.push_back(activated.compute_ratio());
    chart.series[1].values.push_back(activated.unique_ratio());
  }
  if (chart.labels.empty()) return "";
  return Figure(
      Draw(chart),
      Concat("<b>Activated parameters.</b> The parameters of the experts that a token selects, as "
             "a share of those of all experts of the block: an expert counts once for each row "
             "(computed), or once for each token (distinct). Mean of the first: ",
             ShowPercent(MeanActivatedRatio(page.profile.stats)),
             ". <cite>HMoE, fig. 5 (right) and table 2</cite>"),
      true);
}

std::string ExpertSizeFigures(const ReportPage& page) {
  if (!UnequalExperts(page)) return "";
  const std::vector<int>& widths = BlocksOf(page).front().expert_widths;
  BarChart ratios, parameters;
  ratios.percent = true;
  ratios.title = parameters.title = "width of the expert";
  ratios.series = {{.name = "", .values = {}}};
  parameters.series = {{.name = "", .values = {}}};
  std::vector<size_t> order(widths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return widths[a] < widths[b]; });
  for (const size_t e : order) {
    double share = 0.0, used = 0.0, blocks = 0.0;
    for (const BlockExpertStats& block : BlocksOf(page)) {
      if (block.expert_widths != widths || block.total_tokens() == 0) continue;
      share += LoadShares(block)[e];
      used += static_cast<double>(block.selections[e]) *
              static_cast<double>(block.expert_parameters[e]) /
              static_cast<double>(block.total_tokens());
      blocks += 1.0;
    }
    const std::string label = std::to_string(widths[e]);
    ratios.labels.push_back(label);
    parameters.labels.push_back(label);
    ratios.series[0].values.push_back(blocks > 0.0 ? share / blocks : 0.0);
    parameters.series[0].values.push_back(blocks > 0.0 ? used / blocks : 0.0);
  }
  return Figure(Draw(ratios),
                "<b>Load by expert size.</b> Share of the selections, mean over the blocks. "
                "<cite>HMoE, fig. 3 (right) and 8 (right)</cite>") +
         Figure(Draw(parameters),
                "<b>Activated parameters by expert size.</b> Parameters per token, mean over the "
                "blocks. <cite>HMoE, fig. 6</cite>");
}

std::string DiversityFigures(const ReportPage& page) {
  return TokenSpreadFigure(page) + MarkedText(page);
}

std::string WordFigures(const ReportPage& page) {
  const bool listed = page.word_experts.has_value();
  if (!listed && page.profile.token_counts.empty()) return "";
  std::string out;
  for (const size_t i : SomeBlocks(page)) {
    const BlockExpertStats& block = BlocksOf(page)[i];
    HeatMap map = listed ? ListedWords(page, i) : FrequentTokens(page, i);
    if (map.rows.empty()) continue;
    const bool wide = block.num_experts > 24;
    map.width = wide ? kWide : map.width;
    map.percent = true;
    map.numbers = true;
    map.titles = true;
    const bool widths = block.expert_widths.size() <= 16 && UnequalExperts(page);
    map.column_title = widths ? "width of the expert" : "expert";
    for (size_t e = 0; e < block.expert_widths.size(); ++e) {
      map.columns.push_back(std::to_string(widths ? block.expert_widths[e] : static_cast<int>(e)));
    }
    out +=
        Figure(Draw(map),
               Concat("<b>", LongName(block), ".</b> Share of each expert in the selections of ",
                      listed ? "the tokens of a word" : "a token (the most frequent tokens)",
                      widths ? ", by the experts\u2019 size" : "", ". <cite>HMoE, fig. 10</cite>"),
               wide);
  }
  return out;
}

std::string SimilarityFigures(const ReportPage& page) {
  if (page.profile.token_counts.empty()) return "";
  std::string out;
  for (const size_t i : SomeBlocks(page)) {
    const BlockExpertStats& block = BlocksOf(page)[i];
    const TokenCounts counts = page.profile.CountsOf(i);
    const auto experts = static_cast<size_t>(block.num_experts);
    const std::vector<int> shown = ShownExperts(block);
    const std::string part =
        shown.size() < experts ? Concat(" (the ", shown.size(), " with the largest load)") : "";
    const std::string name = Concat("<b>", LongName(block), part, ".</b> ");
    out += PairFigure(TokenVariations(counts), experts, shown,
                      name +
                          "Total variation between the experts\u2019 tokens; 0: alike. "
                          "<cite>HMoE, fig. 9 (a) and 13</cite>");
    out += PairFigure(TokenDistances(counts), experts, shown,
                      name +
                          "Wasserstein distance, with the distance of token ids as the ground "
                          "metric. <cite>HMoE, fig. 9 (a) and 13</cite>");
    out += PairFigure(TokenDivergences(counts, page.options.eps), experts, shown,
                      Concat(name,
                             "Kullback\u2013Leibler divergence of the row from the column, "
                             "counts smoothed by ",
                             ShowNumber(page.options.eps), ". <cite>HMoE, fig. 9 (b)</cite>"));
  }
  return out;
}

std::string RepresentationFigures(const ReportPage& page) {
  if (page.profile.hidden.empty()) return "";
  BarChart chart;
  chart.width = kWide;
  chart.series.push_back({.name = "", .values = {}});
  for (size_t i = 0; i < BlocksOf(page).size(); ++i) {
    const Result<Collapse> collapse = RepresentationCollapse(page.profile.hidden[i]);
    chart.labels.push_back(ShortName(page, BlocksOf(page)[i]));
    chart.series[0].values.push_back(collapse.ok() ? collapse->value : kBlank);
  }
  std::string out = Figure(
      Draw(chart),
      "<b>Representation collapse.</b> Tr(\u03a3<sub>W</sub> \u03a3<sub>B</sub><sup>+</sup>) of "
      "the "
      "routers\u2019 inputs, with the first expert of a row as its class. Smaller values mean more "
      "collapse. <cite>X-MoE, eq. 11 and fig. 2 (c), over layers in the place of "
      "checkpoints</cite>",
      true);
  for (const size_t i : SomeBlocks(page, 2)) {
    ScatterPlot plot;
    const HiddenSample& sample = page.profile.hidden[i];
    const PrincipalPlane plane = PlaneOf(sample, kPoints);
    plot.x = plane.x;
    plot.y = plane.y;
    plot.category = plane.experts;
    if (plot.x.empty()) continue;
    out += Figure(
        Draw(plot),
        Concat("<b>", LongName(BlocksOf(page)[i]), ".</b> ", plot.x.size(),
               " inputs of the router on their first two principal components (",
               ShowPercent(plane.explained),
               " of the variance); the colour is the first expert. <cite>X-MoE, fig. 2 (a, b), "
               "which uses UMAP</cite>"));
  }
  return out;
}

}  // namespace moeserve::server
