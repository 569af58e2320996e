// Checks of tables with the experts of each token id.
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"

namespace moeserve {

absl::Status CheckExpertIds(std::string_view name, const std::vector<int32_t>& ids, int k,
                            int experts) {
  // The last row that lists each expert, counted from 1.
  std::vector<size_t> listed_in(static_cast<size_t>(experts), 0);
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t row = i / static_cast<size_t>(k) + 1;
    const size_t column = i % static_cast<size_t>(k);
    const auto fail = [&](const std::string& expected) {
      return absl::InvalidArgumentError(Concat("tensor ", Quoted(name), ": row ", row - 1,
                                               ", column ", column, ": expected ", expected,
                                               ", found ", ids[i]));
    };
    if (ids[i] < 0 || ids[i] >= experts) {
      return fail(Concat("an expert in [0, ", experts - 1, "]"));
    }
    size_t& last = listed_in[static_cast<size_t>(ids[i])];
    if (last == row) return fail("experts that are distinct in a row");
    last = row;
  }
  return absl::OkStatus();
}

absl::Status CheckTables(const ModelSpec& spec, WeightSource& weights) {
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    if (routing == nullptr || routing->select.kind != SelectKind::kTable) continue;
    const std::string name = block.name() + ".router.table";
    const int k = routing->select.k;
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                              weights.GetIds(name, {spec.vocab_size, k}));
    MOESERVE_RETURN_IF_ERROR(CheckExpertIds(name, ids, k, routing->num_experts));
  }
  return absl::OkStatus();
}

}  // namespace moeserve
