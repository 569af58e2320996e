// The list of statistics: names must be unique, values must have the shape that the list states,
// and the documentation must contain every entry.
#include "engine/statistics/statistic_list.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "engine/statistics/expert_recorder.h"

namespace moeserve {
namespace {

std::string Cell(std::string_view text, bool code) {
  if (text.empty()) return "";
  return code ? "`" + std::string(text) + "`" : std::string(text);
}

// Returns the rows of the table in engine/statistics/README.md.
template <typename Stats>
std::string Table(std::span<const Statistic<Stats>> list) {
  std::ostringstream out;
  out << "| JSON | gRPC | Prometheus | unit | meaning | source |\n|---|---|---|---|---|---|\n";
  for (const Statistic<Stats>& s : list) {
    std::string metric = s.metric.family == nullptr ? "" : s.metric.family;
    if (s.metric.phase != nullptr) metric += std::string("{phase=\"") + s.metric.phase + "\"}";
    out << "| " << Cell(s.name, true) << " | " << Cell(s.proto, true) << " | " << Cell(metric, true)
        << " | " << s.unit << " | " << s.meaning << " | " << s.source << " |\n";
  }
  return out.str();
}

std::string Documentation() {
  std::ifstream file(std::string(MOESERVE_SOURCE_DIR) + "/engine/statistics/README.md");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

template <typename Stats>
void ExpectUniqueNames(std::span<const Statistic<Stats>> list) {
  std::set<std::string_view> json, proto;
  for (const Statistic<Stats>& s : list) {
    EXPECT_TRUE(s.name.empty() || json.insert(s.name).second) << s.name;
    EXPECT_TRUE(s.proto.empty() || proto.insert(s.proto).second) << s.proto;
    EXPECT_FALSE(s.meaning.empty()) << s.name;
  }
}

TEST(StatisticList, NamesAreUnique) {
  ExpectUniqueNames(BlockStatistics());
  ExpectUniqueNames(ModelStatistics());
}

TEST(StatisticList, ReadmeHasEveryEntry) {
  const std::string readme = Documentation();
  for (const std::string& table : {Table(BlockStatistics()), Table(ModelStatistics())}) {
    EXPECT_NE(readme.find(table), std::string::npos)
        << "engine/statistics/README.md lacks this table:\n"
        << table;
  }
}

constexpr size_t kExperts = 5;

// Returns a model with one routed block of kExperts experts.
ModelSpec OneBlock() {
  ModelSpec spec;
  spec.vocab_size = 8;
  spec.hidden_size = 8;
  spec.AddLayers(1);
  RoutedLayerSpec& routing = spec.feed_forward(0).routing.emplace();
  routing.num_experts = kExperts;
  routing.widths.assign(kExperts, 4);
  return spec;
}

TEST(StatisticList, ValuesPerExpertHaveOneForEveryExpert) {
  const ExpertStats stats = EmptyExpertStats(OneBlock());
  ASSERT_EQ(stats.blocks.size(), 1u);
  for (const BlockStatistic& s : BlockStatistics()) {
    const bool by_expert = s.unit.ends_with("[E]");
    const size_t size = std::visit(
        [](const auto& value) -> size_t {
          if constexpr (requires {
                          value.begin();
                          value.back() + 0;
                        }) {
            return value.size();
          } else {
            return 1;
          }
        },
        s.value(stats.blocks[0], {}));
    EXPECT_TRUE(!by_expert || size == kExperts) << s.name << s.proto << ": " << size;
  }
}

// Prometheus families have one sample per block, or one per expert.
TEST(StatisticList, ExportedValuesAreNumbers) {
  const ExpertStats stats = EmptyExpertStats(OneBlock());
  for (const BlockStatistic& s : BlockStatistics()) {
    if (s.metric.family == nullptr) continue;
    const StatisticValue value = s.value(stats.blocks[0], {});
    EXPECT_FALSE(std::holds_alternative<std::string>(value)) << s.metric.family;
    const bool number = std::holds_alternative<uint64_t>(value) ||
                        std::holds_alternative<int64_t>(value) ||
                        std::holds_alternative<double>(value);
    EXPECT_NE(number, s.unit.ends_with("[E]")) << s.metric.family;
    const std::string_view type = s.metric.type;
    EXPECT_TRUE(type == "counter" || type == "gauge") << s.metric.family << ": " << type;
  }
}

}  // namespace
}  // namespace moeserve
