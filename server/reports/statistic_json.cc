#include "server/reports/statistic_json.h"

#include <string>
#include <utility>
#include <variant>

namespace moeserve::server {
namespace {

template <typename Stats>
void Add(OrderedJson& to, std::span<const Statistic<Stats>> list, const Stats& stats,
         const StatisticOptions& options) {
  for (const Statistic<Stats>& statistic : list) {
    if (statistic.name.empty()) continue;
    OrderedJson value = std::visit([](auto&& v) { return OrderedJson(std::move(v)); },
                                   statistic.value(stats, options));
    const size_t dot = statistic.name.find('.');
    if (dot == std::string_view::npos) {
      to[std::string(statistic.name)] = std::move(value);
    } else {
      const std::string object(statistic.name.substr(0, dot));
      to[object][std::string(statistic.name.substr(dot + 1))] = std::move(value);
    }
  }
}

}  // namespace

void AddStatistics(OrderedJson& to, std::span<const BlockStatistic> list,
                   const BlockExpertStats& block, const StatisticOptions& options) {
  Add(to, list, block, options);
}

void AddStatistics(OrderedJson& to, std::span<const ModelStatistic> list, const ExpertStats& stats,
                   const StatisticOptions& options) {
  Add(to, list, stats, options);
}

}  // namespace moeserve::server
