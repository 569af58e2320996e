#include "model_loaders/checkpoint/tensor_check.h"

#include <map>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/checkpoint/stored_parts.h"

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

namespace {

// Returns an explanation for the message about a tensor of integers, or of small floating-point
// numbers, where floating-point values are expected; "" for other types.
std::string WhyNotFloat(const CheckpointConfig& config, std::string_view name, ElementType found) {
  if (found == ElementType::kF8E4M3 || found == ElementType::kF8E5M2) {
    return Concat(" (FP8 needs scales in ", Printable(name), "_scale_inv, and a ",
                  "quantization_config)");
  }
  if (found != ElementType::kI8 && found != ElementType::kU8) return "";
  return config.quantization == Quantization::kNone ? " (config.json: quantization is absent)"
                                                    : " (no quantization of this tensor)";
}

// Returns why a stored tensor does not belong to the model; nullopt if it may be there. `known`
// contains the tensors that belong to the model.
std::optional<std::string> Reason(std::string_view name, const CheckpointConfig& config,
                                  const std::unordered_set<std::string_view>& known) {
  constexpr std::string_view kScale = "_scale";
  if (name.ends_with(kScale) && known.contains(name.substr(0, name.size() - kScale.size()))) {
    return config.quantization == Quantization::kNone ? "quantization is absent"
                                                      : "quantization leaves this weight as it is";
  }
  return config.LeftOverReason(name);
}

// Returns the messages about stored tensors that should not be there. `ignored`, if set, receives
// the names of those that the family ignores.
std::vector<std::string> UnexpectedTensor(const CheckpointConfig& config,
                                          const WeightFiles& weights,
                                          const std::unordered_set<std::string_view>& known,
                                          std::vector<std::string>* ignored) {
  std::vector<std::string> messages;
  for (const WeightFiles::Location& tensor : weights.tensors()) {
    const std::string& name = tensor.entry->name;
    if (known.contains(name)) continue;
    const std::optional<std::string> reason = Reason(name, config, known);
    if (!reason.has_value()) {
      if (ignored != nullptr) ignored->push_back(name);
      continue;
    }
    messages.push_back(Concat(tensor.file->file_name(), ": tensor ", Quoted(name),
                              ": expected no such tensor (", config.key_place, ": ",
                              config.AsInFile(*reason), "), found shape ",
                              ShapeText(tensor.entry->shape)));
  }
  return messages;
}

}  // namespace

std::vector<std::string> GroupedNames(const std::vector<std::string>& names) {
  std::map<std::string, int> groups;
  for (const std::string& name : names) {
    std::string pattern;
    for (size_t i = 0; i < name.size(); ++i) {
      const bool digit = name[i] >= '0' && name[i] <= '9';
      // Digits inside of a word, as in "w1", belong to the word.
      const bool number = digit && (i == 0 || name[i - 1] == '.' || pattern.ends_with('*'));
      if (!number) {
        pattern.push_back(name[i]);
      } else if (!pattern.ends_with('*')) {
        pattern.push_back('*');
      }
    }
    ++groups[pattern];
  }
  std::vector<std::string> lines;
  for (const auto& [pattern, count] : groups) {
    lines.push_back(count == 1 ? Printable(pattern, 200)
                               : Concat(Printable(pattern, 200), " (", count, " tensors)"));
  }
  return lines;
}

absl::Status CheckTensors(const CheckpointConfig& config, const WeightFiles& weights,
                          std::vector<std::string>* ignored) {
  std::vector<StoredTensor> required;
  for (const TensorRequirement& tensor : RequiredTensors(config.spec)) {
    MOESERVE_ASSIGN_OR_RETURN(std::vector<StoredPart> parts, StoredParts(config, tensor));
    for (StoredPart& part : parts) required.push_back(std::move(part.stored));
  }
  std::unordered_set<std::string_view> known;
  known.reserve(required.size());
  for (const StoredTensor& tensor : required) known.insert(tensor.name);
  const std::vector<std::string> unexpected = UnexpectedTensor(config, weights, known, ignored);
  Problems problems;
  // Where a tensor has another name than expected, the missing ones can be many, so the first
  // unexpected one comes before them.
  if (!unexpected.empty()) problems.Add(unexpected[0]);
  for (const StoredTensor& tensor : required) {
    // checked before, for another part of the tensor
    if (known.erase(tensor.name) == 0) continue;
    const WeightFiles::Location* found = weights.Find(tensor.name);
    // A lambda, because only error messages need this text.
    const auto follows = [&] {
      return Concat(" (", config.key_place, ": ", config.AsInFile(tensor.follows_from), ')');
    };
    if (found == nullptr) {
      problems.Add(Concat(weights.name(), ": tensor ", Quoted(tensor.name),
                          " is missing: expected shape ", ShapeText(tensor.shape), follows(),
                          ", found no such tensor"));
      continue;
    }
    const std::string_view file = found->file->file_name();
    if (!HasShape(tensor, found->entry->shape)) {
      problems.Add(Concat(file, ": tensor ", Quoted(tensor.name), ": expected shape ",
                          ShapeText(tensor.shape), follows(), ", found ",
                          ShapeText(found->entry->shape)));
    }
    const ElementType type = found->entry->type;
    if (tensor.type.has_value() && type != *tensor.type) {
      problems.Add(Concat(file, ": tensor ", Quoted(tensor.name), ": expected dtype ",
                          Name(*tensor.type), follows(), ", found ", Name(type)));
    } else if (tensor.ids) {
      if (type == ElementType::kI32 || type == ElementType::kI64) continue;
      problems.Add(Concat(file, ": tensor ", Quoted(tensor.name),
                          ": expected dtype I32 or I64 (ids of experts), found ", Name(type)));
    } else if (!tensor.type.has_value() && !WeightType(type).has_value()) {
      problems.Add(Concat(file, ": tensor ", Quoted(tensor.name),
                          ": expected dtype F32, F16 or BF16",
                          WhyNotFloat(config, tensor.name, type), ", found ", Name(type)));
    }
  }
  for (size_t i = 1; i < unexpected.size(); ++i) problems.Add(unexpected[i]);
  return problems.ToStatus("");
}

}  // namespace moeserve
