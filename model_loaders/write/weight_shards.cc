#include "model_loaders/write/weight_shards.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/error_text.h"
#include "model_loaders/checkpoint/quantized_tensors.h"
#include "model_loaders/files/safetensors_writer.h"
#include "model_loaders/write/new_folder.h"
#include "nlohmann/json.hpp"

namespace moeserve {
namespace {

constexpr char kWhole[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr size_t kShardPieceBytes = size_t{1} << 20;  // bytes of rounded numbers in memory at once

// Shards count from 0 here and from 1 in their names.
std::string ShardName(size_t shard, size_t shards) {
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", shard + 1, shards);
  return shards == 1 ? kWhole : name;
}

ElementType ElementTypeOf(DType type) {
  switch (type) {
    case DType::kF32:
      return ElementType::kF32;
    case DType::kF16:
      return ElementType::kF16;
    case DType::kBF16:
      return ElementType::kBF16;
  }
  return ElementType::kF32;
}

// Returns whether a tensor may be rounded.
bool IsRounded(const TensorRequirement& tensor) {
  return tensor.shape.size() == 2 && tensor.name.find(".router.") == std::string::npos;
}

// One tensor of the model and the one or two tensors that store it.
struct ShardTask {
  TensorRequirement tensor;
  Quantization quantization = Quantization::kNone;
  DType dtype = DType::kF32;  // of numbers
  std::vector<TensorEntry> entries = {};
  std::vector<size_t> places = {};  // [entry]: index in the shard's list of tensors
  int64_t bytes = 0;
};

class ShardWriter {
 public:
  ShardWriter(WeightSource& source, ConvertType type, const std::filesystem::path& folder,
              const WriteProgress& progress)
      : source_(source), type_(type), folder_(folder), progress_(progress) {}

  absl::Status Plan(const ModelSpec& spec, int64_t shard_bytes) {
    const Quantization kept =
        type_ == ConvertType::kStored ? source_.StoredQuantization() : Quantization::kNone;
    int64_t bytes_of_shard = 0;
    for (TensorRequirement& tensor : RequiredTensors(spec)) {
      MOESERVE_ASSIGN_OR_RETURN(ShardTask task, TaskOf(std::move(tensor), kept));
      if (shards_.empty() || bytes_of_shard + task.bytes > shard_bytes) {
        shards_.emplace_back();
        bytes_of_shard = 0;
      }
      bytes_of_shard += task.bytes;
      total_ += task.bytes;
      shards_.back().push_back(std::move(task));
    }
    return absl::OkStatus();
  }

  Result<WrittenWeights> Write() {
    nlohmann::ordered_json files = nlohmann::ordered_json::object();
    WrittenWeights written{.files = shards_.size()};
    std::map<ElementType, int64_t> types;
    for (size_t i = 0; i < shards_.size(); ++i) {
      const std::string name = ShardName(i, shards_.size());
      MOESERVE_RETURN_IF_ERROR(WriteShard(shards_[i], name));
      for (const ShardTask& task : shards_[i]) {
        written.bytes += task.bytes;
        for (const TensorEntry& entry : task.entries) {
          files[entry.name] = name;
          types[entry.type] += *ByteCount(entry.shape, entry.type);
        }
        written.tensors += task.entries.size();
      }
    }
    written.types.assign(types.begin(), types.end());
    if (shards_.size() == 1) return written;
    nlohmann::ordered_json index = nlohmann::ordered_json::object();
    index["metadata"]["total_size"] = written.bytes;
    index["weight_map"] = std::move(files);
    MOESERVE_RETURN_IF_ERROR(WriteNewFile(folder_ / kIndex, index.dump(2) + "\n"));
    return written;
  }

 private:
  Result<ShardTask> TaskOf(TensorRequirement tensor, Quantization kept) {
    ShardTask task{.tensor = std::move(tensor)};
    const TensorRequirement& wanted = task.tensor;
    task.quantization = QuantizationOf(wanted.name, wanted.shape, kept);
    for (StoredTensor& stored : StoredTensors(wanted, kept)) {
      TensorEntry entry{.name = std::move(stored.name), .shape = std::move(stored.shape)};
      if (stored.ids || stored.type.has_value()) {
        entry.type = NewTypeOf(stored, ElementType::kF32);
      } else {
        MOESERVE_ASSIGN_OR_RETURN(task.dtype, NewType(wanted));
        entry.type = ElementTypeOf(task.dtype);
      }
      const std::optional<int64_t> bytes = ByteCount(entry.shape, entry.type);
      MOESERVE_CHECK(bytes.has_value(), "a valid spec bounds the number of parameters");
      task.bytes += *bytes;
      task.entries.push_back(std::move(entry));
    }
    task.places.resize(task.entries.size());
    return task;
  }

  // Returns the type in which to store the numbers of a tensor.
  Result<DType> NewType(const TensorRequirement& tensor) {
    const std::optional<DType> asked = Traits(type_).dtype;
    if (asked.has_value() && (*asked == DType::kF32 || IsRounded(tensor))) return *asked;
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor t, source_.Get(tensor.name, tensor.shape));
    return t.dtype;
  }

  absl::Status WriteShard(std::vector<ShardTask>& tasks, const std::string& name) {
    struct Part {
      const TensorEntry* entry;
      size_t* place;
    };
    std::vector<Part> parts;
    for (ShardTask& task : tasks) {
      for (size_t i = 0; i < task.entries.size(); ++i) {
        parts.push_back({&task.entries[i], &task.places[i]});
      }
    }
    // Wide element types come first, so that every element is aligned.
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return SizeOf(a.entry->type) > SizeOf(b.entry->type);
    });
    std::vector<TensorEntry> entries;
    for (const Part& part : parts) {
      *part.place = entries.size();
      entries.push_back(*part.entry);
    }
    MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<SafetensorsWriter> writer,
                              SafetensorsWriter::Create(folder_ / name, std::move(entries)));
    for (const ShardTask& task : tasks) MOESERVE_RETURN_IF_ERROR(WriteTensor(task, *writer));
    return writer->Finish();
  }

  absl::Status WriteTensor(const ShardTask& task, SafetensorsWriter& writer) {
    const TensorRequirement& wanted = task.tensor;
    if (task.quantization != Quantization::kNone) {
      MOESERVE_ASSIGN_OR_RETURN(const std::optional<QuantizedMatrix> m,
                                source_.GetQuantized(wanted.name, wanted.shape, task.quantization));
      MOESERVE_CHECK(m.has_value(), "the source stores this matrix as integers");
      MOESERVE_RETURN_IF_ERROR(
          Append(writer, task.places[0], m->values, m->rows * QuantRowBytes(m->type, m->columns)));
      return Append(writer, task.places[1], m->scales,
                    m->rows * QuantScales(m->type, m->columns) * int64_t{sizeof(F16)});
    }
    if (wanted.ids) {
      MOESERVE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                                source_.GetIds(wanted.name, wanted.shape));
      return Append(writer, task.places[0], ids.data(), task.bytes);
    }
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor t, source_.Get(wanted.name, wanted.shape));
    if (t.dtype == task.dtype) return Append(writer, task.places[0], t.data, task.bytes);
    return AppendConverted(task, t, writer);
  }

  absl::Status Append(SafetensorsWriter& writer, size_t place, const void* data, int64_t size) {
    MOESERVE_RETURN_IF_ERROR(
        writer.Append(place, {static_cast<const char*>(data), static_cast<size_t>(size)}));
    written_ += size;
    if (progress_) progress_(written_, total_);
    return absl::OkStatus();
  }

  absl::Status AppendConverted(const ShardTask& task, const HostTensor& t,
                               SafetensorsWriter& writer) {
    const size_t element = SizeOf(task.dtype);
    const auto at_once = static_cast<int64_t>(kShardPieceBytes / element);
    std::string piece;
    for (int64_t begin = 0; begin < t.size(); begin += at_once) {
      const int64_t count = std::min(at_once, t.size() - begin);
      piece.resize(static_cast<size_t>(count) * element);
      char* out = piece.data();
      for (int64_t i = begin; i < begin + count; ++i, out += element) {
        const float value = ElementAsF32(t, i);
        const float stored = Store(task.dtype, value, out);
        if (std::isinf(stored) && std::isfinite(value)) return TooLarge(task, i, value);
      }
      MOESERVE_RETURN_IF_ERROR(
          Append(writer, task.places[0], piece.data(), static_cast<int64_t>(piece.size())));
    }
    return absl::OkStatus();
  }

  // Writes `value` as `type` and returns the stored value.
  static float Store(DType type, float value, char* out) {
    switch (type) {
      case DType::kF32:
        std::memcpy(out, &value, sizeof(value));
        return value;
      case DType::kF16: {
        const F16 bits = F16FromF32(value);
        std::memcpy(out, &bits, sizeof(bits));
        return F32FromF16(bits);
      }
      case DType::kBF16: {
        const Bf16 bits = Bf16FromF32(value);
        std::memcpy(out, &bits, sizeof(bits));
        return F32FromBf16(bits);
      }
    }
    return value;
  }

  static absl::Status TooLarge(const ShardTask& task, int64_t index, float value) {
    const int64_t columns = task.tensor.shape.back();
    return absl::InvalidArgumentError(Concat("tensor ", Quoted(task.tensor.name), ": row ",
                                             index / columns, ", column ", index % columns,
                                             ": expected a number that ", Name(task.dtype),
                                             " can hold, found ", std::to_string(value)));
  }

  WeightSource& source_;
  const ConvertType type_;
  const std::filesystem::path folder_;
  const WriteProgress& progress_;
  std::vector<std::vector<ShardTask>> shards_;
  int64_t written_ = 0;  // bytes of tensors
  int64_t total_ = 0;
};

}  // namespace

Result<WrittenWeights> WriteWeights(const ModelSpec& spec, WeightSource& source, ConvertType type,
                                    int64_t shard_bytes, const std::filesystem::path& folder,
                                    const WriteProgress& progress) {
  ShardWriter writer(source, type, folder, progress);
  MOESERVE_RETURN_IF_ERROR(writer.Plan(spec, shard_bytes));
  return writer.Write();
}

}  // namespace moeserve
