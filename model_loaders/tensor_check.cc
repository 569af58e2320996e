#include "model_loaders/tensor_check.h"

#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "model_loaders/leftover.h"
#include "model_loaders/message.h"

namespace moeserve {

std::optional<DType> WeightType(ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return DType::kF32;
    case ElementType::kF16:
      return DType::kF16;
    case ElementType::kBF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

absl::Status CheckTensors(const NativeConfig& config, const WeightFiles& weights) {
  const std::vector<TensorRequirement> required = RequiredTensors(config.spec);
  Problems problems;
  std::unordered_set<std::string_view> known;
  known.reserve(required.size());
  for (const TensorRequirement& tensor : required) {
    known.insert(tensor.name);
    const WeightFiles::Location* found = weights.Find(tensor.name);
    // Most tensors are right; the text for one that is not is made only then.
    const auto follows = [&] {
      return Concat(" (config.json: ", config.AsInFile(tensor.follows_from), ')');
    };
    if (found == nullptr) {
      problems.Add(Concat(weights.name(), ": tensor ", Quoted(tensor.name),
                          " is missing: expected shape ", ShapeText(tensor.shape), follows(),
                          ", found no such tensor"));
      continue;
    }
    const std::string_view file = found->file->file_name();
    if (found->entry->shape != tensor.shape) {
      problems.Add(Concat(file, ": tensor ", Quoted(tensor.name), ": expected shape ",
                          ShapeText(tensor.shape), follows(), ", found ",
                          ShapeText(found->entry->shape)));
    }
    if (!WeightType(found->entry->type).has_value()) {
      problems.Add(Concat(file, ": tensor ", Quoted(tensor.name),
                          ": expected dtype F32, F16 or BF16, found ", Name(found->entry->type)));
    }
  }
  for (const WeightFiles::Location& tensor : weights.tensors()) {
    const std::string& name = tensor.entry->name;
    if (known.contains(name)) continue;
    problems.Add(Concat(
        tensor.file->file_name(), ": tensor ", Quoted(name),
        ": expected no such tensor (config.json: ", config.AsInFile(WhyLeftOver(name, config.spec)),
        "), found shape ", ShapeText(tensor.entry->shape)));
  }
  return problems.ToStatus("");
}

}  // namespace moeserve
