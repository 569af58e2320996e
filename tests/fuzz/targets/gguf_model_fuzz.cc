// Models in GGUF files. An input has a line for each tensor, "NAME TYPE DIMENSION...", then
// "\n\n\n", the number of keys in two bytes, and the keys as in a file. The target adds offsets and
// data, so that the file stays whole when a tensor changes.

#include <cstring>

#include "engine/spec/weights.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/gguf/gguf_blocks.h"
#include "model_loaders/inspect.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::testing {
namespace {

constexpr uint64_t kMostGgufData = 1 << 20;
constexpr uint64_t kMostGgufTensors = 2000;
constexpr uint64_t kGgufAlignment = 32;

template <typename T>
void AppendNumber(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

uint64_t AlignedTo(uint64_t n) {
  return (n + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment;
}

// Returns the bytes of a tensor of these dimensions; 0 if it is too large, or the type unknown.
uint64_t BytesOf(const GgufType* type, const std::vector<int64_t>& dimensions) {
  if (type == nullptr || type->block_elements == 0) return 0;
  uint64_t elements = 1;
  for (const int64_t d : dimensions) {
    if (d < 1 || d > int64_t{kMostGgufData} || (elements *= d) > kMostGgufData) return 0;
  }
  return (elements + type->block_elements - 1) / type->block_elements * type->block_bytes;
}

// Returns a file, or an empty text if there is none for this input.
std::string FileOf(Input input) {
  std::string_view rows = input.Section();
  std::string table;
  uint64_t tensors = 0, offset = 0;
  while (!rows.empty()) {
    const Row row = TakeRow(rows);
    if (row.numbers.empty() || ++tensors > kMostGgufTensors) return "";
    const std::vector<int64_t> dimensions(row.numbers.begin() + 1, row.numbers.end());
    const auto type = static_cast<uint32_t>(row.numbers[0]);
    const uint64_t bytes = BytesOf(FindGgufType(type), dimensions);
    if (bytes == 0) return "";
    AppendNumber<uint64_t>(table, row.name.size());
    table += row.name;
    AppendNumber(table, static_cast<uint32_t>(dimensions.size()));
    for (const int64_t d : dimensions) AppendNumber(table, d);
    AppendNumber(table, type);
    AppendNumber(table, offset);
    offset = AlignedTo(offset + bytes);
    if (offset > kMostGgufData) return "";
  }
  std::string file = "GGUF";
  AppendNumber<uint32_t>(file, 3);
  AppendNumber(file, tensors);
  const uint64_t low = input.Byte();
  AppendNumber(file, low + 256u * input.Byte());
  file += input.rest();
  file += table;
  const size_t begin = AlignedTo(file.size());
  file.resize(begin);
  // Both as f32 and as bf16, the values are near -1, which is a rate of a decay, too.
  while (file.size() < begin + offset) file += "\x80\xbf";
  return file;
}

void ReadModel(const Input& input) {
  const std::string bytes = FileOf(input);
  if (bytes.empty()) return;
  const InputFile file(bytes, ".gguf");
  const auto checkpoint = LoadCheckpoint(file.path(), {.require_tokenizer = false});
  if (!checkpoint.ok()) return;
  CountAccepted();
  const ModelSpec& spec = checkpoint->spec;
  MOESERVE_CHECK(Validate(spec).ok(), "a valid model");
  MOESERVE_CHECK(!SummaryText(Summarize(spec)).empty(), "a model can be described");
  volatile char last = 0;
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    if (tensor.ids) continue;
    const auto values = checkpoint->weights->Get(tensor.name, tensor.shape);
    if (!values.ok()) continue;
    MOESERVE_CHECK(values->shape == tensor.shape, "the tensor that was asked for");
    const size_t size = static_cast<size_t>(values->size()) * SizeOf(values->dtype);
    last = static_cast<const char*>(values->data)[size - 1];
  }
  (void)last;
}

}  // namespace
}  // namespace moeserve::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moeserve::testing::ReadModel(moeserve::testing::Input(data, size));
  return 0;
}
