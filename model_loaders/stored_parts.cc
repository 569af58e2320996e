#include "model_loaders/stored_parts.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/message.h"

namespace moeserve {
namespace {

// Returns the index of the first element of a part with shape `part` in its stored tensor; nullopt
// if the part does not lie inside that tensor.
std::optional<int64_t> FirstElement(const TensorPlace& place, const std::vector<int64_t>& part) {
  std::vector<int64_t> slice = place.shape;
  int64_t first_row = place.first_row;
  int64_t skipped_slices = 0;
  if (place.index.has_value()) {
    if (slice.empty() || *place.index < 0 || *place.index >= slice[0]) return std::nullopt;
    skipped_slices = *place.index;
    slice.erase(slice.begin());
  }
  if (slice.empty() || slice.size() != part.size() ||
      !std::equal(slice.begin() + 1, slice.end(), part.begin() + 1) || first_row < 0 ||
      first_row > slice[0] - part[0]) {
    return std::nullopt;
  }
  int64_t row = 1;
  for (size_t i = 1; i < slice.size(); ++i) row *= slice[i];
  return (skipped_slices * slice[0] + first_row) * row;
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
    return std::vector<StoredPart>{{std::move(stored[0])}, {std::move(stored[1])}};
  }
  if (whole) place->shape = tensor.shape;
  const std::optional<int64_t> first = FirstElement(*place, tensor.shape);
  if (!first.has_value()) {
    return absl::InternalError(Concat("tensor ", Quoted(tensor.name), " ", ShapeText(tensor.shape),
                                      " does not lie in ", Quoted(place->name), " ",
                                      ShapeText(place->shape)));
  }
  StoredTensor stored{
      .name = std::move(place->name),
      .type = std::nullopt,
      .shape = std::move(place->shape),
      .follows_from = place->follows_from.empty() ? tensor.follows_from : place->follows_from};
  return std::vector<StoredPart>{{std::move(stored), *first}};
}

}  // namespace moeserve
