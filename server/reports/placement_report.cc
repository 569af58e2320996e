#include "server/reports/placement_report.h"

#include <algorithm>
#include <cstdio>
#include <random>

#include "base/check.h"
#include "base/error_text.h"

namespace moeserve::server {
namespace {

// The blocks of a model that counters are about, and the indices of the counters.
struct CountedBlock {
  const ModelSpec* stack;
  int block;
  size_t counters;  // in ExpertStats::blocks
};

Result<std::vector<CountedBlock>> CountedBlocks(const ExpertStats& stats, const ModelSpec& model) {
  std::vector<CountedBlock> out;
  for (size_t i = 0; i < stats.blocks.size(); ++i) {
    const BlockExpertStats& counters = stats.blocks[i];
    const std::string where = Concat("layer ", counters.layer, ", ", Name(counters.block));
    const ModelSpec* of = nullptr;
    for (const ModelSpec* stack : {&model, model.encoder.get()}) {
      if (stack != nullptr && stack->stack == counters.stack) of = stack;
    }
    const int b = of == nullptr ? -1 : of->Find(counters.layer, counters.block);
    const RoutedLayerSpec* const routing =
        b < 0 ? nullptr : of->blocks[static_cast<size_t>(b)].routing();
    if (routing == nullptr) {
      return absl::InvalidArgumentError(Concat("the profile is of another model: ", where,
                                               ": expected a routed block of the model"
                                               ", found none"));
    }
    if (routing->num_experts != counters.num_experts) {
      return absl::InvalidArgumentError(Concat("the profile is of another model: ", where,
                                               ": expected ", routing->num_experts,
                                               " experts, found ", counters.num_experts));
    }
    out.push_back({of, b, i});
  }
  return out;
}

// Draws the numbers of rows of a block's experts in steps.
class StepDrawer {
 public:
  StepDrawer(const BlockExpertStats& counters, size_t places, int rows) {
    const double all = static_cast<double>(std::max<uint64_t>(counters.total_rows(), 1));
    for (size_t e = 0; e < places; ++e) {
      const double share = static_cast<double>(counters.selections[e]) / all;
      rows_.emplace_back(rows, std::clamp(share, 0.0, 1.0));
    }
  }
  std::vector<int32_t> Next() {
    std::vector<int32_t> step;
    for (auto& rows : rows_) step.push_back(rows(random_));
    return step;
  }

 private:
  std::mt19937 random_{1};
  std::vector<std::binomial_distribution<int32_t>> rows_;  // by expert
};

double MeanImbalance(const ExpertPlacement& placement, const CountedBlock& block,
                     const BlockExpertStats& counters, int rows) {
  constexpr int kSteps = 100;
  const std::vector<int64_t> parameters =
      PlaceParameters(block.stack->blocks[static_cast<size_t>(block.block)]);
  const std::vector<HolderSet>& holders = placement.holders(block.stack->stack, block.block);
  StepDrawer steps(counters, parameters.size(), rows);
  double sum = 0.0;
  int counted = 0;
  for (int i = 0; i < kSteps; ++i) {
    const std::vector<int32_t> step = steps.Next();
    const std::vector<int> owners = OwnersOf(step, parameters, holders, placement.ranks());
    const double imbalance = Imbalance(step, parameters, owners, placement.ranks());
    if (imbalance == 0.0) continue;  // no rows
    sum += imbalance;
    ++counted;
  }
  return counted == 0 ? 1.0 : sum / counted;
}

// Returns the means over the blocks; empty if there are none.
std::vector<double> MeanOfBlocks(const PlacementReport& report) {
  std::vector<double> mean;
  for (const PlacementReport::Block& block : report.blocks) {
    mean.resize(block.imbalances.size());
    for (size_t i = 0; i < mean.size(); ++i) {
      mean[i] += block.imbalances[i] / static_cast<double>(report.blocks.size());
    }
  }
  return mean;
}

constexpr size_t kNameColumns = 32;

std::string ImbalanceLine(const std::string& name, const std::vector<double>& values) {
  std::string line = Printable(name);
  line.resize(std::max<size_t>(line.size(), kNameColumns), ' ');
  for (const double v : values) {
    char text[32];
    std::snprintf(text, sizeof(text), " %9.3f", v);
    line += text;
  }
  return line + '\n';
}

}  // namespace

Result<ExpertLoads> LoadsOf(const ExpertStats& stats, const ModelSpec& model) {
  MOESERVE_ASSIGN_OR_RETURN(const auto blocks, CountedBlocks(stats, model));
  ExpertLoads loads;
  for (const CountedBlock& block : blocks) {
    const std::vector<uint64_t>& rows = stats.blocks[block.counters].selections;
    loads[{block.stack->stack, block.block}].assign(rows.begin(), rows.end());
  }
  return loads;
}

PlacementReport ReportPlacement(const ExpertPlacement& placement, const ModelSpec& model,
                                const ExpertStats& stats, const ExpertSizes& bytes) {
  PlacementReport report{
      .ranks = placement.ranks(), .blocks = {}, .bytes_of_rank = SizeOfRanks(placement, bytes)};
  const auto blocks = CountedBlocks(stats, model);
  MOESERVE_CHECK(blocks.ok(), "LoadsOf() was asked before");
  for (const CountedBlock& block : *blocks) {
    PlacementReport::Block& out = report.blocks.emplace_back();
    out.name = block.stack->blocks[static_cast<size_t>(block.block)].name();
    for (const int rows : kReportedRows) {
      out.imbalances.push_back(MeanImbalance(placement, block, stats.blocks[block.counters], rows));
    }
  }
  return report;
}

OrderedJson PlacementJson(const PlacementReport& report) {
  OrderedJson out;
  out["ranks"] = report.ranks;
  out["expert_copies_percent"] = report.copies_percent;
  out["rows_of_steps"] = kReportedRows;
  out["blocks"] = OrderedJson::array();
  for (const PlacementReport::Block& block : report.blocks) {
    out["blocks"].push_back({{"block", block.name}, {"imbalance", block.imbalances}});
  }
  out["mean_imbalance"] = MeanOfBlocks(report);
  out["expert_bytes_of_ranks"] = report.bytes_of_rank;
  return out;
}

std::string PlacementTable(const PlacementReport& report) {
  std::string out = Concat("Expected imbalance (largest / mean cost of a rank), ", report.ranks,
                           " ranks, ", report.copies_percent, " % copies\n");
  char text[64];
  std::snprintf(text, sizeof(text), "%-32s", "rows in a step");
  out += text;
  for (const int rows : kReportedRows) {
    std::snprintf(text, sizeof(text), " %9d", rows);
    out += text;
  }
  out += '\n';
  for (const PlacementReport::Block& block : report.blocks) {
    out += ImbalanceLine(block.name, block.imbalances);
  }
  if (report.blocks.size() > 1) out += ImbalanceLine("mean", MeanOfBlocks(report));
  out += "\nMiB of routed experts, as stored in the checkpoint\n";
  for (size_t r = 0; r < report.bytes_of_rank.size(); ++r) {
    std::snprintf(text, sizeof(text), "rank %-27zu %10.1f\n", r,
                  static_cast<double>(report.bytes_of_rank[r]) / (1 << 20));
    out += text;
  }
  return out;
}

}  // namespace moeserve::server
