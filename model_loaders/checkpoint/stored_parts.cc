#include "model_loaders/checkpoint/stored_parts.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/checkpoint/block_scaled.h"

namespace moeserve {
namespace {

int64_t Product(std::span<const int64_t> dims) {
  int64_t product = 1;
  for (const int64_t dim : dims) product *= dim;
  return product;
}

// Returns whether the blocks are those of `count` rows or columns.
bool Divides(const BlockOrder& order, int64_t count) {
  return order.size == 0 ||
         (order.size > 0 && order.outer > 0 && order.inner > 0 && count % order.size == 0 &&
          count / order.size % order.outer == 0 && count / order.size / order.outer == order.inner);
}

// Returns whether the part is a rectangle with rows at regular distances.
bool IsRegular(const TensorPlace& place) {
  return place.row_blocks.size == 0 && place.column_blocks.size == 0;
}

// Sets where the part with shape `shape` lies in its stored tensor. Returns false if it does not
// lie inside that tensor.
bool LocatePart(const TensorPlace& place, const std::vector<int64_t>& shape, StoredPart& part) {
  std::vector<int64_t> slice = place.shape;
  int64_t skipped_slices = 0;
  if (place.index.has_value()) {
    if (slice.empty() || *place.index < 0 || *place.index >= slice[0]) return false;
    skipped_slices = *place.index;
    slice.erase(slice.begin());
  }
  // A matrix of one row may be stored as a vector.
  if (slice.size() == 1 && shape.size() == 2 && shape[0] == 1) slice.insert(slice.begin(), 1);
  // The matrix of a convolution may have a dimension for its only channel.
  if (slice.size() == 3 && shape.size() == 2 && slice[1] == 1) slice.erase(slice.begin() + 1);
  // A vector may be stored as a matrix with its parts as rows.
  if (slice.size() == 2 && shape.size() == 1) slice = {Product(slice)};
  if (slice.empty() || slice.size() != shape.size()) return false;
  const int64_t slice_size = Product(slice);
  part.row_stride = Product(std::span(slice).subspan(1));
  part.column_stride = 1;
  if (place.transposed) {
    if (slice.size() != 2) return false;
    std::swap(slice[0], slice[1]);
    std::swap(part.row_stride, part.column_stride);
  }
  const int64_t group = place.group_rows;
  if (group < 0 || (group > 0 && (place.row_step != 1 || place.paired_rows != 0 ||
                                  place.group_stride < group || shape[0] % group != 0))) {
    return false;
  }
  const int64_t last_row =
      group == 0 ? place.first_row + (shape[0] - 1) * place.row_step
                 : place.first_row + (shape[0] / group - 1) * place.group_stride + group - 1;
  const auto inside = [&](int64_t row) { return row >= 0 && row < slice[0]; };
  if (place.row_step == 0 || !inside(place.first_row) || !inside(last_row)) return false;
  const int64_t first_column = place.first_column.value_or(0);
  if (place.first_column.has_value()) {
    if (slice.size() != 2 || first_column < 0 || first_column + shape[1] > slice[1]) return false;
  } else if (!std::equal(slice.begin() + 1, slice.end(), shape.begin() + 1)) {
    return false;
  }
  const bool paired = place.paired_rows != 0;
  if (paired && (place.paired_rows < 0 || place.paired_rows % 2 != 0 || place.row_step != 1 ||
                 shape[0] % place.paired_rows != 0)) {
    return false;
  }
  const int64_t columns = Product(std::span(shape).subspan(1));
  if (!Divides(place.row_blocks, shape[0]) || !Divides(place.column_blocks, columns) ||
      (!IsRegular(place) && (place.row_step != 1 || paired || (group != 0 && group != shape[0]) ||
                             place.format.kind != BlockFormatKind::kNone))) {
    return false;
  }
  part.first_element = skipped_slices * slice_size + place.first_row * part.row_stride +
                       first_column * part.column_stride;
  part.row_stride *= place.row_step;
  part.row_blocks = place.row_blocks;
  part.column_blocks = place.column_blocks;
  part.function = place.function;
  part.add = place.add;
  part.paired_rows = place.paired_rows;
  part.group_rows = group;
  part.group_stride = place.group_stride;
  const bool one_group = group == 0 || group == shape[0];
  part.contiguous = !place.transposed && place.row_step == 1 && place.add == 0.0f &&
                    place.function.apply == nullptr && IsRegular(place) && !paired && one_group &&
                    !place.first_column.has_value();
  return true;
}

}  // namespace

Result<std::vector<StoredPart>> StoredParts(const CheckpointConfig& config,
                                            const TensorRequirement& tensor) {
  std::optional<TensorPlace> place = config.Place(tensor);
  if (!place.has_value()) {
    return absl::InternalError(Concat("tensor ", Quoted(tensor.name), " ", ShapeText(tensor.shape),
                                      " has no place in folders of this family"));
  }
  const bool whole = place->shape.empty();
  if (QuantizationOf(tensor.name, tensor.shape, config.quantization) != Quantization::kNone) {
    if (!whole) {
      return absl::InternalError(
          Concat("tensor ", Quoted(tensor.name), " of integers is a part of another one"));
    }
    std::vector<StoredTensor> stored = StoredTensors(tensor, config.quantization);
    stored[0].name = place->name;
    stored[1].name = ScaleName(place->name);
    return std::vector<StoredPart>{{.stored = std::move(stored[0])},
                                   {.stored = std::move(stored[1])}};
  }
  if (whole) place->shape = tensor.shape;
  StoredPart part;
  if (!LocatePart(*place, tensor.shape, part)) {
    return absl::InternalError(Concat("tensor ", Quoted(tensor.name), " ", ShapeText(tensor.shape),
                                      " does not lie in ", Quoted(place->name), " ",
                                      ShapeText(place->shape)));
  }
  const std::string& follows_from =
      place->follows_from.empty() ? tensor.follows_from : place->follows_from;
  if (place->format.kind != BlockFormatKind::kNone) {
    MOESERVE_ASSIGN_OR_RETURN(std::vector<StoredTensor> stored,
                              BlockScaledTensors(*place, follows_from));
    part.stored = std::move(stored[0]);
    part.format = std::move(place->format);
    part.contiguous = false;
    return std::vector<StoredPart>{std::move(part), {.stored = std::move(stored[1])}};
  }
  part.stored = {.name = std::move(place->name),
                 .type = std::nullopt,
                 .shape = std::move(place->shape),
                 .follows_from = follows_from,
                 .ids = tensor.ids,
                 .units = place->units};
  if (tensor.ids && !part.contiguous) {
    return absl::InternalError(
        Concat("tensor ", Quoted(tensor.name), " of ids is not stored as it is"));
  }
  return std::vector<StoredPart>{std::move(part)};
}

}  // namespace moeserve
