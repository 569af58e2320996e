#include "model_loaders/architectures/row_sections.h"

#include <initializer_list>
#include <vector>

namespace moeserve {
namespace {

// Returns the section `part` of `groups` groups that have sections of these sizes.
std::optional<RowSection> InGroups(int64_t groups, std::initializer_list<int64_t> sizes, int part) {
  if (part < 0 || part >= static_cast<int>(sizes.size())) return std::nullopt;
  RowSection section;
  int64_t first = 0, all = 0;
  int i = 0;
  for (const int64_t size : sizes) {
    if (i++ < part) first += size;
    all += size;
  }
  section.stored_rows = groups * all;
  section.first_row = first;
  section.group_rows = sizes.begin()[part];
  section.group_stride = all;
  return section;
}

}  // namespace

bool IsRowSection(RowOrder order) { return order >= RowOrder::kGatedQueries; }

std::optional<RowSection> SectionOf(RowOrder order, int part, const BlockSpec& block) {
  if (order == RowOrder::kGatedQueries) {
    const AttentionSpec* const attention = block.attention();
    if (attention == nullptr) return std::nullopt;
    return InGroups(attention->num_heads, {attention->head_dim, attention->head_dim}, part);
  }
  if (order == RowOrder::kStateSpace) {
    if (block.state_space() == nullptr) return std::nullopt;
    const RecurrentShape shape = block.state_space()->recurrence();
    const int64_t values = shape.value_width(), keys = shape.key_width();
    return InGroups(1, {values, values, keys, keys, shape.heads}, part);
  }
  if (block.delta() == nullptr) return std::nullopt;
  const RecurrentShape shape = block.delta()->recurrence();
  const int64_t shared = shape.heads / shape.key_heads;  // heads of a key head
  const int64_t values = shared * shape.value_dim;
  switch (order) {
    case RowOrder::kDelta:
      return InGroups(1, {shape.key_width(), shape.key_width(), shape.value_width()}, part);
    case RowOrder::kDeltaGroups:
      return InGroups(shape.key_heads, {shape.key_dim, shape.key_dim, values, values}, part);
    case RowOrder::kDeltaPairs:
      return InGroups(shape.key_heads, {shared, shared}, part);
    default:
      return std::nullopt;
  }
}

}  // namespace moeserve
