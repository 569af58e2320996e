// What a placement of experts on ranks is expected to be like.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "engine/weights/place_experts.h"
#include "server/base/json.h"

namespace moeserve::server {

// Returns the loads of the model's routed blocks that the counters are about; a model with an
// encoder, or with prediction layers, has more. InvalidArgument, with what differs, if the counters
// are of another model.
Result<ExpertLoads> LoadsOf(const ExpertStats& stats, const ModelSpec& model);

// Numbers of rows of the steps for which a report estimates the imbalance.
inline constexpr int kReportedRows[] = {16, 64, 512};

struct PlacementReport {
  struct Block {
    std::string name;                // "blocks.3.feed_forward"
    std::vector<double> imbalances;  // of steps of kReportedRows: Imbalance(), mean over steps
  };
  int ranks = 1;
  int copies_percent = 0;
  std::vector<Block> blocks;           // with known loads
  std::vector<int64_t> bytes_of_rank;  // [ranks] of routed experts
};

// Estimates imbalances with steps in which each row chooses each expert with the share that
// `stats` has, whatever else is chosen. The same arguments yield the same report.
PlacementReport ReportPlacement(const ExpertPlacement& placement, const ModelSpec& model,
                                const ExpertStats& stats, const ExpertSizes& bytes);

OrderedJson PlacementJson(const PlacementReport& report);
std::string PlacementTable(const PlacementReport& report);

}  // namespace moeserve::server
