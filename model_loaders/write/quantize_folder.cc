#include "model_loaders/write/quantize_folder.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/control_group.h"
#include "base/error_text.h"
#include "model_loaders/architectures/native/config_json.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/checkpoint/model_path.h"
#include "model_loaders/checkpoint/quantized_tensors.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/safetensors_writer.h"
#include "model_loaders/files/weight_files.h"
#include "model_loaders/write/new_folder.h"
#include "model_loaders/write/tokenizer_copy.h"
#include "nlohmann/json.hpp"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

constexpr char kQuantizeConfig[] = "config.json";
constexpr char kWeights[] = "model.safetensors";
constexpr size_t kQuantizePieceBytes = size_t{1}
                                       << 20;  // bytes of a tensor that are in memory at once

absl::Status WriteConfig(const fs::path& source, const fs::path& to, Quantization type,
                         const std::vector<std::string>& ignored_keys) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string text,
                            ReadTextFile(source / kQuantizeConfig, kMaxConfigFileBytes));
  MOESERVE_ASSIGN_OR_RETURN(nlohmann::json known, ParseConfigJson(text));
  RemoveKeys(ignored_keys, &known);
  if (const absl::Status native = ParseNativeConfig(known.dump()).status(); !native.ok()) {
    const auto type_found = known.is_object() ? known.find("model_type") : known.end();
    const bool other = known.is_object() && type_found != known.end() && type_found->is_string() &&
                       !type_found->get_ref<const std::string&>().starts_with("routed_");
    if (!other) return native;
    return absl::InvalidArgumentError(
        Concat("expected a folder of the native format, which \"moeserve convert\" writes: ",
               std::string(native.message())));
  }
  auto config = nlohmann::ordered_json::parse(text);  // this type keeps the order of the keys
  RemoveKeys(ignored_keys, &config);
  config["quantization"] = {{"type", Name(type)}, {"group_size", StatedGroupSize(type)}};
  return WriteNewFile(to / kQuantizeConfig, config.dump(2) + "\n");
}

// The largest magnitude of a value that QuantizeRow() accepts: the largest finite f16.
constexpr float kLargest = 65504.0f;

// Returns the error about a value that cannot be stored. If `bounded`, the error says that the
// largest magnitude is kLargest.
absl::Status ValueFault(std::string_view tensor, int64_t row, int64_t column, float value,
                        bool bounded) {
  const std::string found = std::isnan(value)   ? "NaN"
                            : std::isinf(value) ? "an infinite value"
                                                : std::to_string(value);
  return absl::InvalidArgumentError(Concat(
      "tensor ", Quoted(tensor), ": row ", row, ", column ", column, ": expected a finite number",
      bounded ? Concat(" of magnitude at most ", static_cast<int>(kLargest)) : "", ", found ",
      found));
}

ElementType QuantizedTypeOf(DType type) {
  return type == DType::kF32   ? ElementType::kF32
         : type == DType::kF16 ? ElementType::kF16
                               : ElementType::kBF16;
}

// One required tensor and its position in the new file.
struct QuantizeTask {
  TensorRequirement tensor;
  Quantization type = Quantization::kNone;
  size_t first = 0;   // index of its values or integers in the writer's list of tensors
  size_t scales = 0;  // index of its scales in that list; only for integers
};

// Quantizes rows of one matrix. Each thread has its own object.
class RowRounder {
 public:
  RowRounder(Quantization type, const HostTensor& matrix)
      : type_(type),
        matrix_(&matrix),
        row_(static_cast<size_t>(matrix.shape[1])),
        values_(static_cast<size_t>(QuantRowValues(type, matrix.shape[1]))) {}

  // Quantizes rows [begin, end). `integers` and `scales` are buffers whose first row is row `first`
  // of the matrix. Stops at a row with a value that cannot be stored. Allocates no memory.
  void Run(int64_t begin, int64_t end, int64_t first, std::string& integers,
           std::vector<F16>& scales) {
    const int64_t columns = matrix_->shape[1];
    const int64_t row_bytes = QuantRowBytes(type_, columns);
    const int64_t scales_of_row = QuantScales(type_, columns);
    for (int64_t r = begin; r < end; ++r) {
      bool held = true;
      for (int64_t c = 0; c < columns; ++c) {
        const float v = ElementAsF32(*matrix_, r * columns + c);
        row_[static_cast<size_t>(c)] = v;
        held = held && std::fabs(v) <= kLargest;
      }
      if (!held) {
        bad_row_ = r;
        return;
      }
      QuantizeRow(type_, row_, values_.data(), scales.data() + (r - first) * scales_of_row);
      PackQuantizedRow(type_, columns, values_.data(),
                       reinterpret_cast<uint8_t*>(integers.data()) + (r - first) * row_bytes);
    }
  }

  // Returns the row at which Run() stopped, -1 if it did not stop.
  int64_t bad_row() const { return bad_row_; }

 private:
  Quantization type_;
  const HostTensor* matrix_;
  std::vector<float> row_;
  std::vector<int8_t> values_;
  int64_t bad_row_ = -1;
};

class FolderWriter {
 public:
  FolderWriter(const ModelSpec& spec, WeightSource& source, Quantization type,
               const WriteProgress& progress)
      : source_(source), type_(type), progress_(progress) {
    for (TensorRequirement& t : RequiredTensors(spec)) {
      const Quantization q = QuantizationOf(t.name, t.shape, type);
      tasks_.push_back({std::move(t), q});
    }
  }

  absl::Status Write(const fs::path& path) {
    MOESERVE_ASSIGN_OR_RETURN(std::vector<TensorEntry> entries, Entries());
    MOESERVE_ASSIGN_OR_RETURN(writer_, SafetensorsWriter::Create(path, std::move(entries)));
    for (const TensorEntry& entry : writer_->tensors()) {
      total_ += static_cast<int64_t>(entry.end - entry.begin);
    }
    for (const QuantizeTask& task : tasks_) {
      if (task.type == Quantization::kNone) {
        MOESERVE_RETURN_IF_ERROR(task.tensor.ids ? CopyIds(task) : CopyNumbers(task));
        continue;
      }
      MOESERVE_ASSIGN_OR_RETURN(
          const std::optional<QuantizedMatrix> integers,
          source_.GetQuantized(task.tensor.name, task.tensor.shape, task.type));
      MOESERVE_RETURN_IF_ERROR(integers.has_value() ? CopyIntegers(task, *integers) : Round(task));
    }
    return writer_->Finish();
  }

 private:
  // Returns the tensors of the new file. Wide element types come first, so that every element is
  // aligned. Sets `first` and `scales` of the tasks.
  Result<std::vector<TensorEntry>> Entries() {
    struct Part {
      TensorEntry entry;
      size_t* place;
    };
    std::vector<Part> parts;
    for (QuantizeTask& task : tasks_) {
      size_t* const places[] = {&task.first, &task.scales};
      int i = 0;
      for (StoredTensor& stored : StoredTensors(task.tensor, type_)) {
        TensorEntry entry{.name = std::move(stored.name), .shape = std::move(stored.shape)};
        if (stored.ids || stored.type.has_value()) {
          entry.type = NewTypeOf(stored, ElementType::kF32);
        } else {
          MOESERVE_ASSIGN_OR_RETURN(const HostTensor t,
                                    source_.Get(task.tensor.name, task.tensor.shape));
          entry.type = QuantizedTypeOf(t.dtype);
        }
        parts.push_back({std::move(entry), places[i++]});
      }
    }
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return SizeOf(a.entry.type) > SizeOf(b.entry.type);
    });
    std::vector<TensorEntry> entries;
    for (Part& part : parts) {
      *part.place = entries.size();
      entries.push_back(std::move(part.entry));
    }
    return entries;
  }

  absl::Status Append(size_t index, std::string_view bytes) {
    MOESERVE_RETURN_IF_ERROR(writer_->Append(index, bytes));
    written_ += static_cast<int64_t>(bytes.size());
    if (progress_) progress_(written_, total_);
    return absl::OkStatus();
  }

  absl::Status CopyIds(const QuantizeTask& task) {
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                              source_.GetIds(task.tensor.name, task.tensor.shape));
    return AppendPieces(task.first, ids.data(), ids.size() * sizeof(int32_t));
  }

  absl::Status CopyNumbers(const QuantizeTask& task) {
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor t, source_.Get(task.tensor.name, task.tensor.shape));
    const int64_t columns = t.shape.back();
    for (int64_t i = 0; i < t.size(); ++i) {
      const float v = ElementAsF32(t, i);
      if (!std::isfinite(v)) {
        return ValueFault(task.tensor.name, i / columns, i % columns, v, false);
      }
    }
    return AppendPieces(task.first, t.data, static_cast<size_t>(t.size()) * SizeOf(t.dtype));
  }

  absl::Status CopyIntegers(const QuantizeTask& task, const QuantizedMatrix& m) {
    MOESERVE_RETURN_IF_ERROR(AppendPieces(
        task.first, m.values, static_cast<size_t>(m.rows * QuantRowBytes(m.type, m.columns))));
    return AppendPieces(task.scales, m.scales,
                        static_cast<size_t>(m.rows * QuantScales(m.type, m.columns)) * sizeof(F16));
  }

  absl::Status AppendPieces(size_t index, const void* data, size_t size) {
    std::string_view bytes(static_cast<const char*>(data), size);
    while (!bytes.empty()) {
      const std::string_view piece = bytes.substr(0, kQuantizePieceBytes);
      MOESERVE_RETURN_IF_ERROR(Append(index, piece));
      bytes.remove_prefix(piece.size());
    }
    return absl::OkStatus();
  }

  absl::Status Round(const QuantizeTask& task) {
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor t, source_.Get(task.tensor.name, task.tensor.shape));
    const int64_t rows = t.shape[0], columns = t.shape[1];
    const int64_t row_bytes = QuantRowBytes(task.type, columns);
    const int64_t at_once = std::clamp<int64_t>(kQuantizePieceBytes / row_bytes, 1, rows);
    std::vector<RowRounder> workers(
        static_cast<size_t>(std::min<int64_t>(AvailableCores(), at_once)),
        RowRounder(task.type, t));
    std::string integers(static_cast<size_t>(at_once * row_bytes), '\0');
    std::vector<F16> scales(static_cast<size_t>(at_once * QuantScales(task.type, columns)));
    for (int64_t begin = 0; begin < rows; begin += at_once) {
      const int64_t end = std::min(rows, begin + at_once);
      const auto size = static_cast<int64_t>(workers.size());
      const auto part = [&](int64_t i) { return begin + (end - begin) * i / size; };
      std::vector<std::jthread> threads;
      threads.reserve(workers.size());
      for (int64_t i = 1; i < size; ++i) {
        threads.emplace_back([&, i] {
          workers[static_cast<size_t>(i)].Run(part(i), part(i + 1), begin, integers, scales);
        });
      }
      workers[0].Run(part(0), part(1), begin, integers, scales);
      threads.clear();  // joins the threads
      for (const RowRounder& worker : workers) {
        if (worker.bad_row() < 0) continue;
        int64_t column = 0;
        float value = 0.0f;
        while (std::fabs(value = ElementAsF32(t, worker.bad_row() * columns + column)) <=
               kLargest) {
          ++column;
        }
        return ValueFault(task.tensor.name, worker.bad_row(), column, value, true);
      }
      const auto count = static_cast<size_t>(end - begin);
      MOESERVE_RETURN_IF_ERROR(Append(task.first, std::string_view(integers).substr(
                                                      0, count * static_cast<size_t>(row_bytes))));
      MOESERVE_RETURN_IF_ERROR(
          Append(task.scales,
                 {reinterpret_cast<const char*>(scales.data()),
                  count * static_cast<size_t>(QuantScales(task.type, columns)) * sizeof(F16)}));
    }
    return absl::OkStatus();
  }

  WeightSource& source_;
  const Quantization type_;
  const WriteProgress& progress_;
  std::vector<QuantizeTask> tasks_;
  std::unique_ptr<SafetensorsWriter> writer_;
  int64_t written_ = 0;  // bytes of tensors
  int64_t total_ = 0;
};

Result<QuantizedFolder> Quantize(const fs::path& source, const fs::path& destination,
                                 Quantization type, const WriteProgress& progress,
                                 const std::vector<std::string>& ignored_keys) {
  MOESERVE_CHECK(type != Quantization::kNone, "a type of integers");
  MOESERVE_ASSIGN_OR_RETURN(
      Checkpoint checkpoint,
      LoadCheckpoint(
          source, {.require_tokenizer = false, .ignored_keys = ignored_keys, .predictions = true}));
  MOESERVE_ASSIGN_OR_RETURN(const ModelPath model, ResolveModelPath(source));
  if (!WeightFiles::Exist(model.path)) {
    return absl::InvalidArgumentError(Concat(
        Printable(source.string(), PATH_MAX),
        ": expected a folder with safetensors or PyTorch files, found a GGUF file or another "
        "single file; \"moeserve convert\" makes a folder of it"));
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<UnfinishedFolder> folder,
                            UnfinishedFolder::Create(destination));
  MOESERVE_RETURN_IF_ERROR(WriteConfig(model.path, folder->path(), type, ignored_keys));
  MOESERVE_RETURN_IF_ERROR(CopyTokenizer(model.path, folder->path()).status());
  MOESERVE_RETURN_IF_ERROR(CopyTextSettings(model.path, folder->path()).status());
  const absl::Status wrote = FolderWriter(checkpoint.spec, *checkpoint.weights, type, progress)
                                 .Write(folder->path() / kWeights);
  MOESERVE_RETURN_IF_ERROR(checkpoint.weights->Check());  // explains errors of tensors
  MOESERVE_RETURN_IF_ERROR(wrote);

  Result<Checkpoint> written =
      LoadCheckpoint(folder->path(), {.require_tokenizer = false, .predictions = true});
  if (!written.ok()) return Prefixed("reading the new folder back: ", written.status());
  const QuantizedFolder result{.source_bytes = checkpoint.weight_bytes,
                               .bytes = written->weight_bytes,
                               .source_type = checkpoint.weights->StoredQuantization()};
  MOESERVE_RETURN_IF_ERROR(folder->Finish());
  return result;
}

}  // namespace

Result<QuantizedFolder> QuantizeFolder(const fs::path& source, const fs::path& destination,
                                       Quantization type, const WriteProgress& progress,
                                       const std::vector<std::string>& ignored_keys) {
  // Code of this project does not throw; the standard library throws when memory runs out.
  try {
    return Quantize(source, destination, type, progress, ignored_keys);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("not enough memory to write the folder");
  } catch (const std::exception& error) {
    return absl::InternalError(Concat("writing the folder: ", Printable(error.what())));
  }
}

}  // namespace moeserve
