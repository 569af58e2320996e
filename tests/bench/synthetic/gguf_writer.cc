#include "tests/bench/synthetic/gguf_writer.h"

#include <bit>
#include <fstream>
#include <type_traits>
#include <utility>

#include "base/status.h"

namespace moeserve::testing {
namespace {

static_assert(std::endian::native == std::endian::little, "values are written as they lie");

constexpr uint64_t kAlignment = 32;  // the default of the file format

// Types of metadata values.
constexpr uint32_t kU32 = 4, kI32 = 5, kFloat = 6, kBool = 7, kText = 8, kArray = 9;

template <typename T>
void Append(std::string& out, T value) {
  static_assert(std::is_arithmetic_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AppendText(std::string& out, std::string_view text) {
  Append<uint64_t>(out, text.size());
  out.append(text);
}

uint64_t Bytes(const GgufTensor& tensor) {
  uint64_t bytes = tensor.type == GgufType::kF32 ? 4 : 2;
  for (const int64_t d : tensor.shape) bytes *= static_cast<uint64_t>(d);
  return bytes;
}

uint64_t Aligned(uint64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void GgufWriter::AddKey(std::string_view key, uint32_t type) {
  AppendText(metadata_, key);
  Append(metadata_, type);
  ++metadata_count_;
}

void GgufWriter::AddU32(std::string_view key, uint32_t value) {
  AddKey(key, kU32);
  Append(metadata_, value);
}

void GgufWriter::AddF32(std::string_view key, float value) {
  AddKey(key, kFloat);
  Append(metadata_, value);
}

void GgufWriter::AddBool(std::string_view key, bool value) {
  AddKey(key, kBool);
  Append<uint8_t>(metadata_, value ? 1 : 0);
}

void GgufWriter::AddString(std::string_view key, std::string_view value) {
  AddKey(key, kText);
  AppendText(metadata_, value);
}

void GgufWriter::AddStrings(std::string_view key, const std::vector<std::string>& values) {
  AddKey(key, kArray);
  Append(metadata_, kText);
  Append<uint64_t>(metadata_, values.size());
  for (const std::string& value : values) AppendText(metadata_, value);
}

void GgufWriter::AddI32s(std::string_view key, const std::vector<int32_t>& values) {
  AddKey(key, kArray);
  Append(metadata_, kI32);
  Append<uint64_t>(metadata_, values.size());
  for (const int32_t value : values) Append(metadata_, value);
}

void GgufWriter::AddTensor(GgufTensor tensor) { tensors_.push_back(std::move(tensor)); }

absl::Status GgufWriter::Write(const std::filesystem::path& path, WeightSource& weights) const {
  std::string head = "GGUF";
  Append<uint32_t>(head, 3);
  Append<uint64_t>(head, tensors_.size());
  Append<uint64_t>(head, metadata_count_);
  head += metadata_;
  uint64_t offset = 0;
  for (const GgufTensor& tensor : tensors_) {
    AppendText(head, tensor.name);
    Append(head, static_cast<uint32_t>(tensor.shape.size()));
    for (auto d = tensor.shape.rbegin(); d != tensor.shape.rend(); ++d) {
      Append(head, static_cast<uint64_t>(*d));
    }
    Append(head, static_cast<uint32_t>(tensor.type));
    Append(head, offset);
    offset = Aligned(offset + Bytes(tensor));
  }
  head.resize(Aligned(head.size()), '\0');

  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(head.data(), static_cast<std::streamsize>(head.size()));
  for (const GgufTensor& tensor : tensors_) {
    std::vector<int64_t> shape = tensor.shape;
    if (tensor.sources.size() > 1) shape.erase(shape.begin());
    uint64_t written = 0;
    for (const std::string& source : tensor.sources) {
      MOESERVE_ASSIGN_OR_RETURN(const HostTensor values, weights.Get(source, shape));
      if (values.dtype != (tensor.type == GgufType::kF32 ? DType::kF32 : DType::kBF16)) {
        return absl::InternalError(source + ": another type than " + tensor.name);
      }
      const uint64_t bytes = static_cast<uint64_t>(values.size()) * SizeOf(values.dtype);
      file.write(static_cast<const char*>(values.data), static_cast<std::streamsize>(bytes));
      written += bytes;
    }
    if (written != Bytes(tensor)) return absl::InternalError(tensor.name + ": another size");
    const std::string padding(Aligned(written) - written, '\0');
    file.write(padding.data(), static_cast<std::streamsize>(padding.size()));
  }
  file.close();
  return file.good() ? absl::OkStatus() : absl::UnavailableError("cannot write " + path.string());
}

}  // namespace moeserve::testing
