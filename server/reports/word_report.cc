#include "server/reports/word_report.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

std::vector<double> SharesOf(const std::vector<uint64_t>& counts) {
  const double sum =
      static_cast<double>(std::accumulate(counts.begin(), counts.end(), uint64_t{0}));
  std::vector<double> out(counts.size());
  for (size_t e = 0; e < counts.size() && sum > 0.0; ++e) {
    out[e] = static_cast<double>(counts[e]) / sum;
  }
  return out;
}

OrderedJson SpreadJson(const TokenSpread& spread) {
  return {{"tokens", spread.tokens}, {"mean", spread.mean}, {"histogram", spread.histogram}};
}

}  // namespace

OrderedJson WordsJson(const std::vector<std::string>& words, const WordStatistics& statistics,
                      const RouteLayout& layout) {
  OrderedJson out;
  out["diversity"] = {{"blocks", statistics.diversity_blocks},
                      {"listed", SpreadJson(statistics.listed)},
                      {"others", SpreadJson(statistics.others)}};
  out["words"] = OrderedJson::array();
  for (size_t w = 0; w < words.size(); ++w) {
    const WordExperts& word = statistics.words[w];
    OrderedJson layers = OrderedJson::array();
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      layers.push_back({{"layer", layout.blocks[b].layer},
                        {"block", Name(layout.blocks[b].block)},
                        {"counts", word.counts[b]},
                        {"shares", SharesOf(word.counts[b])}});
    }
    out["words"].push_back({{"word", words[w]},
                            {"occurrences", word.occurrences},
                            {"tokens", word.tokens},
                            {"layers", std::move(layers)}});
  }
  return out;
}

std::string WordsTable(const std::vector<std::string>& words, const WordStatistics& statistics,
                       const RouteLayout& layout) {
  char line[160];
  std::snprintf(line, sizeof(line),
                "\ndiversity: %.4f distinct experts of a token and block in the listed words (%llu "
                "tokens), %.4f in others (%llu)\n",
                statistics.listed.mean, static_cast<unsigned long long>(statistics.listed.tokens),
                statistics.others.mean, static_cast<unsigned long long>(statistics.others.tokens));
  std::string out = line;
  if (layout.blocks.empty()) return out;
  out += Concat("occurrences and experts of each word in layer ", layout.blocks[0].layer, ' ',
                Name(layout.blocks[0].block), ":\n");
  for (size_t w = 0; w < words.size(); ++w) {
    const WordExperts& word = statistics.words[w];
    out += Concat("  ", Printable(words[w], 64), ' ', word.occurrences);
    const std::vector<double> shares = SharesOf(word.counts[0]);
    std::vector<size_t> order(shares.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return shares[a] > shares[b]; });
    for (const size_t e : order) {
      if (shares[e] <= 0.0) break;
      std::snprintf(line, sizeof(line), " %zu:%.1f%%", e, 100.0 * shares[e]);
      out += line;
    }
    out += '\n';
  }
  return out;
}

}  // namespace moeserve::server
