#include "server/commands/chat/answer_experts.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <numeric>
#include <vector>

#include "base/error_text.h"
#include "server/reports/expert_report.h"

namespace moeserve::server {
namespace {

std::string TopExperts(const BlockExpertStats& block, int top) {
  std::vector<size_t> order(block.selections.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto shown = std::min(order.size(), static_cast<size_t>(std::max(top, 0)));
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(shown), order.end(),
                    [&](size_t a, size_t b) {
                      return block.selections[a] != block.selections[b]
                                 ? block.selections[a] > block.selections[b]
                                 : a < b;
                    });
  const double total = std::accumulate(block.selections.begin(), block.selections.end(), 0.0);
  std::string out;
  for (size_t i = 0; i < shown && block.selections[order[i]] > 0; ++i) {
    char text[64];
    std::snprintf(text, sizeof(text), "%s%zu: %.1f %%", i == 0 ? "" : ", ", order[i],
                  100.0 * static_cast<double>(block.selections[order[i]]) / total);
    out += text;
  }
  return out.empty() ? "none" : out;
}

}  // namespace

std::string AnswerExperts(const ExpertStats& stats, int top) {
  if (stats.blocks.empty()) return "the model has no experts\n";
  std::string out;
  for (const BlockExpertStats& block : stats.blocks) {
    out +=
        Concat("layer ", block.layer, ' ', Name(block.block), ": ", TopExperts(block, top), '\n');
  }
  return Concat(out, '\n', ExpertStatsTable(stats, 0.0));
}

}  // namespace moeserve::server
