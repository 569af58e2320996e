#include "model_loaders/files/gguf/gguf_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "model_loaders/files/file_kind.h"

namespace moeserve {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF data is little-endian");

constexpr std::string_view kMagic = "GGUF";
constexpr std::string_view kAlignmentKey = "general.alignment";
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = 1 << 16;
// Limits of the format.
constexpr uint64_t kMaxKeyBytes = 65'535;
constexpr uint64_t kMaxNameBytes = 64;
constexpr uint32_t kMaxTensorDimensions = 4;
// Far above real files. They bound the memory for the tables.
constexpr uint64_t kMaxKeys = 1 << 16;
constexpr uint64_t kMaxTensors = 1 << 20;

uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Takes values from the front of the bytes. `what` names the value in error messages.
class Cursor {
 public:
  explicit Cursor(std::string_view bytes) : rest_(bytes), size_(bytes.size()) {}

  uint64_t position() const { return size_ - rest_.size(); }

  Result<std::string_view> Bytes(uint64_t count, std::string_view what) {
    if (count > rest_.size()) {
      return absl::InvalidArgumentError(Concat(what, ": expected ", count, " bytes at offset ",
                                               position(), ", found ", rest_.size(),
                                               " to the end of the file"));
    }
    const std::string_view bytes = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return bytes;
  }

  template <typename T>
  Result<T> Number(std::string_view what) {
    MOESERVE_ASSIGN_OR_RETURN(const std::string_view bytes, Bytes(sizeof(T), what));
    T value;
    std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }

  // Takes a text and the number of its bytes before it.
  Result<std::string_view> String(uint64_t max_bytes, std::string_view what) {
    MOESERVE_ASSIGN_OR_RETURN(const uint64_t size, Number<uint64_t>(Concat(what, ": length")));
    if (size > max_bytes) {
      return absl::InvalidArgumentError(
          Concat(what, ": expected a length of at most ", max_bytes, " bytes, found ", size));
    }
    return Bytes(size, what);
  }

  uint64_t remaining() const { return rest_.size(); }

 private:
  std::string_view rest_;
  uint64_t size_;
};

// Returns the bytes of a value of a type with a fixed size; 0 for other types.
uint64_t FixedBytes(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8:
    case GgufValueType::kI8:
    case GgufValueType::kBool:
      return 1;
    case GgufValueType::kU16:
    case GgufValueType::kI16:
      return 2;
    case GgufValueType::kU32:
    case GgufValueType::kI32:
    case GgufValueType::kF32:
      return 4;
    case GgufValueType::kU64:
    case GgufValueType::kI64:
    case GgufValueType::kF64:
      return 8;
    case GgufValueType::kString:
    case GgufValueType::kArray:
      return 0;
  }
  return 0;
}

Result<GgufValueType> TakeType(Cursor& cursor, std::string_view what) {
  MOESERVE_ASSIGN_OR_RETURN(const uint32_t number, cursor.Number<uint32_t>(what));
  constexpr auto kLast = static_cast<uint32_t>(GgufValueType::kF64);
  if (number > kLast) {
    return absl::InvalidArgumentError(
        Concat(what, ": expected a number in [0, ", kLast, "], found ", number));
  }
  return static_cast<GgufValueType>(number);
}

absl::Status CheckBools(std::string_view bytes, std::string_view what) {
  for (const char byte : bytes) {
    if (byte != 0 && byte != 1) {
      return absl::InvalidArgumentError(Concat(what, ": expected 0 or 1 for a bool, found ",
                                               static_cast<int>(static_cast<unsigned char>(byte))));
    }
  }
  return absl::OkStatus();
}

Result<GgufValue> TakeArray(Cursor& cursor, std::string_view what) {
  GgufValue value{.type = GgufValueType::kArray};
  MOESERVE_ASSIGN_OR_RETURN(value.item_type, TakeType(cursor, Concat(what, ": type of the items")));
  MOESERVE_ASSIGN_OR_RETURN(value.count,
                            cursor.Number<uint64_t>(Concat(what, ": number of items")));
  if (value.item_type == GgufValueType::kArray) {
    return absl::InvalidArgumentError(
        Concat(what, ": expected an array of numbers or strings, found one of arrays"));
  }
  const bool strings = value.item_type == GgufValueType::kString;
  const uint64_t least = strings ? sizeof(uint64_t) : FixedBytes(value.item_type);
  if (value.count > cursor.remaining() / least) {
    return absl::InvalidArgumentError(Concat(what, ": number of items: expected at most ",
                                             cursor.remaining() / least,
                                             " (to the end of the file), found ", value.count));
  }
  if (!strings) {
    MOESERVE_ASSIGN_OR_RETURN(value.bytes, cursor.Bytes(value.count * least, what));
    if (value.item_type == GgufValueType::kBool) {
      MOESERVE_RETURN_IF_ERROR(CheckBools(value.bytes, what));
    }
    return value;
  }
  Cursor begin = cursor;
  for (uint64_t i = 0; i < value.count; ++i) {
    const Result<std::string_view> item = cursor.String(cursor.remaining(), "item");
    if (!item.ok()) return Prefixed(Concat(what, '[', i, "]: "), item.status());
  }
  MOESERVE_ASSIGN_OR_RETURN(value.bytes, begin.Bytes(cursor.position() - begin.position(), what));
  return value;
}

Result<GgufValue> TakeValue(Cursor& cursor, std::string_view what) {
  MOESERVE_ASSIGN_OR_RETURN(const GgufValueType type, TakeType(cursor, Concat(what, ": type")));
  if (type == GgufValueType::kArray) return TakeArray(cursor, what);
  GgufValue value{.type = type};
  if (type == GgufValueType::kString) {
    MOESERVE_ASSIGN_OR_RETURN(value.bytes, cursor.String(cursor.remaining(), what));
    return value;
  }
  MOESERVE_ASSIGN_OR_RETURN(value.bytes, cursor.Bytes(FixedBytes(type), what));
  if (type == GgufValueType::kBool) MOESERVE_RETURN_IF_ERROR(CheckBools(value.bytes, what));
  return value;
}

absl::Status TakeMetadata(Cursor& cursor, uint64_t count, GgufHeader* header) {
  for (uint64_t i = 0; i < count; ++i) {
    MOESERVE_ASSIGN_OR_RETURN(const std::string_view key,
                              cursor.String(kMaxKeyBytes, Concat("metadata: key ", i)));
    if (key.empty()) {
      return absl::InvalidArgumentError(
          Concat("metadata: key ", i, ": expected at least one character, found none"));
    }
    const std::string what = Concat("metadata: ", Quoted(key));
    MOESERVE_ASSIGN_OR_RETURN(const GgufValue value, TakeValue(cursor, what));
    if (!header->metadata.emplace(key, value).second) {
      return absl::InvalidArgumentError(Concat(what, ": expected the key once, found it twice"));
    }
  }
  return absl::OkStatus();
}

// Takes an entry of the table of tensors, without the data.
Result<GgufTensor> TakeTensor(Cursor& cursor, uint64_t number) {
  GgufTensor tensor;
  MOESERVE_ASSIGN_OR_RETURN(const std::string_view name,
                            cursor.String(kMaxNameBytes, Concat("tensor ", number, ": name")));
  if (name.empty()) {
    return absl::InvalidArgumentError(
        Concat("tensor ", number, ": name: expected at least one character, found none"));
  }
  TensorEntry& entry = tensor.entry;
  entry.name = name;
  const std::string what = Concat("tensor ", Quoted(name), ": ");
  MOESERVE_ASSIGN_OR_RETURN(const uint32_t dimensions,
                            cursor.Number<uint32_t>(what + "number of dimensions"));
  if (dimensions < 1 || dimensions > kMaxTensorDimensions) {
    return absl::InvalidArgumentError(Concat(what, "number of dimensions: expected 1 to ",
                                             kMaxTensorDimensions, ", found ", dimensions));
  }
  int64_t elements = 1;
  for (uint32_t i = 0; i < dimensions; ++i) {
    MOESERVE_ASSIGN_OR_RETURN(const uint64_t size, cursor.Number<uint64_t>(what + "shape"));
    if (size < 1 || size > uint64_t{1} << 62 ||
        __builtin_mul_overflow(elements, static_cast<int64_t>(size), &elements) ||
        elements > int64_t{1} << 60) {
      return absl::InvalidArgumentError(
          Concat(what, "shape: expected sizes of at least 1 and at most 2^60 elements, ",
                 "found a size of ", size));
    }
    // The file has the innermost dimension first.
    entry.shape.insert(entry.shape.begin(), static_cast<int64_t>(size));
  }
  MOESERVE_ASSIGN_OR_RETURN(const uint32_t id, cursor.Number<uint32_t>(what + "type"));
  const GgufType* const type = FindGgufType(id);
  if (type == nullptr || type->block_elements == 0) {
    const std::string found =
        type == nullptr ? Concat("the unknown number ", id) : std::string(type->name);
    return absl::InvalidArgumentError(
        Concat(what, "type: expected ", GgufTypeNames(), ", found ", found));
  }
  if (entry.shape.back() % type->block_elements != 0) {
    return absl::InvalidArgumentError(Concat(what, "shape: expected rows of a multiple of ",
                                             type->block_elements, " elements (", type->name,
                                             "), found ", entry.shape.back()));
  }
  MOESERVE_ASSIGN_OR_RETURN(tensor.offset, cursor.Number<uint64_t>(what + "offset"));
  tensor.type = type;
  entry.type = type->plain.value_or(ElementType::kF32);
  if (!type->plain.has_value()) entry.converted_from = type->name;
  entry.end = static_cast<uint64_t>(elements) * static_cast<uint64_t>(SizeOf(entry.type));
  return tensor;
}

uint64_t DataBytes(const GgufTensor& tensor) {
  uint64_t elements = tensor.entry.end / static_cast<uint64_t>(SizeOf(tensor.entry.type));
  return elements / static_cast<uint64_t>(tensor.type->block_elements) *
         static_cast<uint64_t>(tensor.type->block_bytes);
}

// Sets the data of all tensors, which must cover `data` without overlaps and without other gaps
// than those of the alignment.
absl::Status PlaceTensors(std::string_view data, uint64_t alignment,
                          std::vector<GgufTensor>& tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const GgufTensor& a, const GgufTensor& b) { return a.offset < b.offset; });
  uint64_t covered = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    GgufTensor& tensor = tensors[i];
    const std::string what = Concat("tensor ", Quoted(tensor.entry.name), ": ");
    const uint64_t expected = AlignUp(covered, alignment);
    if (tensor.offset != expected) {
      const std::string previous =
          i == 0 ? "the start of the data" : Concat("after ", Quoted(tensors[i - 1].entry.name));
      return absl::InvalidArgumentError(Concat(what, "offset: expected ", expected, " (", previous,
                                               ", alignment ", alignment, "), found ",
                                               tensor.offset));
    }
    const uint64_t bytes = DataBytes(tensor);
    const uint64_t rest = data.size() - std::min<uint64_t>(tensor.offset, data.size());
    if (bytes > rest) {
      return absl::InvalidArgumentError(
          Concat(what, "expected ", bytes, " bytes (", tensor.type->name, ' ',
                 ShapeText(tensor.entry.shape), "), found ", rest, " to the end of the file"));
    }
    tensor.data = data.substr(tensor.offset, bytes);
    covered = tensor.offset + bytes;
  }
  if (data.size() > AlignUp(covered, alignment)) {
    return absl::InvalidArgumentError(Concat(
        "data: expected ", covered, " bytes (the end of the last tensor), found ", data.size()));
  }
  return absl::OkStatus();
}

Result<uint64_t> Alignment(const GgufHeader& header) {
  const auto it = header.metadata.find(kAlignmentKey);
  if (it == header.metadata.end()) return kDefaultAlignment;
  const std::optional<int64_t> value = it->second.Integer();
  if (!value.has_value() || *value < 1 || *value > static_cast<int64_t>(kMaxAlignment) ||
      !std::has_single_bit(static_cast<uint64_t>(*value))) {
    return absl::InvalidArgumentError(Concat("metadata: ", Quoted(kAlignmentKey),
                                             ": expected a power of two up to ", kMaxAlignment,
                                             ", found ", ShowGguf(it->second)));
  }
  return static_cast<uint64_t>(*value);
}

absl::Status CheckVersion(uint32_t version) {
  if (version == 2 || version == 3) return absl::OkStatus();
  const uint32_t swapped = __builtin_bswap32(version);
  if (swapped >= 1 && swapped <= 3) {
    return absl::InvalidArgumentError(
        "version: expected a little-endian file, found a big-endian one");
  }
  return absl::InvalidArgumentError(Concat("version: expected 2 or 3, found ", version));
}

}  // namespace

Result<GgufHeader> ParseGguf(std::string_view bytes) {
  Cursor cursor(bytes);
  MOESERVE_ASSIGN_OR_RETURN(const std::string_view magic, cursor.Bytes(kMagic.size(), "header"));
  if (magic != kMagic) {
    return absl::InvalidArgumentError(
        Concat("header: expected ", Quoted(kMagic), ", found ", Quoted(magic)));
  }
  MOESERVE_ASSIGN_OR_RETURN(const uint32_t version, cursor.Number<uint32_t>("version"));
  MOESERVE_RETURN_IF_ERROR(CheckVersion(version));
  MOESERVE_ASSIGN_OR_RETURN(const uint64_t tensors, cursor.Number<uint64_t>("number of tensors"));
  MOESERVE_ASSIGN_OR_RETURN(const uint64_t keys, cursor.Number<uint64_t>("number of keys"));
  if (tensors > kMaxTensors) {
    return absl::InvalidArgumentError(
        Concat("number of tensors: expected at most ", kMaxTensors, ", found ", tensors));
  }
  if (keys > kMaxKeys) {
    return absl::InvalidArgumentError(
        Concat("number of keys: expected at most ", kMaxKeys, ", found ", keys));
  }
  GgufHeader header;
  MOESERVE_RETURN_IF_ERROR(TakeMetadata(cursor, keys, &header));
  MOESERVE_ASSIGN_OR_RETURN(const uint64_t alignment, Alignment(header));
  std::set<std::string, std::less<>> names;
  for (uint64_t i = 0; i < tensors; ++i) {
    MOESERVE_ASSIGN_OR_RETURN(GgufTensor tensor, TakeTensor(cursor, i));
    if (!names.insert(tensor.entry.name).second) {
      return absl::InvalidArgumentError(
          Concat("tensor ", Quoted(tensor.entry.name), ": expected the name once, found it twice"));
    }
    header.tensors.push_back(std::move(tensor));
  }
  const uint64_t begin = std::min<uint64_t>(AlignUp(cursor.position(), alignment), bytes.size());
  MOESERVE_RETURN_IF_ERROR(PlaceTensors(bytes.substr(begin), alignment, header.tensors));
  return header;
}

Result<std::shared_ptr<const GgufFile>> GgufFile::Open(const std::filesystem::path& path) {
  MOESERVE_ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> mapped, MappedFile::Open(path));
  MOESERVE_RETURN_IF_ERROR(CheckFileKind(
      path.filename().string(), mapped->bytes().substr(0, kFileKindBytes), OwnFormat::kGguf));
  // make_shared cannot call the private constructor.
  std::shared_ptr<GgufFile> file(new GgufFile());
  file->file_name_ = path.filename().string();
  Result<GgufHeader> header = ParseGguf(mapped->bytes());
  if (!header.ok()) return Prefixed(Printable(file->file_name_) + ": ", header.status());
  file->header_ = *std::move(header);
  file->file_ = std::move(mapped);
  for (const GgufTensor& tensor : file->header_.tensors) file->entries_.push_back(tensor.entry);
  return std::shared_ptr<const GgufFile>(std::move(file));
}

const GgufValue* GgufFile::Find(std::string_view key) const {
  const auto it = header_.metadata.find(key);
  return it == header_.metadata.end() ? nullptr : &it->second;
}

const GgufTensor& GgufFile::TensorOf(const TensorEntry& entry) const {
  const auto number = static_cast<size_t>(&entry - entries_.data());
  MOESERVE_CHECK(number < entries_.size(), "an entry of another GGUF file");
  return header_.tensors[number];
}

Result<TensorData> GgufFile::Read(const TensorEntry& entry) const {
  return ReadPart(entry, 0, static_cast<int64_t>(entry.end) / SizeOf(entry.type));
}

Result<TensorData> GgufFile::ReadPart(const TensorEntry& entry, int64_t first,
                                      int64_t count) const {
  const GgufTensor& tensor = TensorOf(entry);
  const int64_t size = SizeOf(entry.type);
  MOESERVE_CHECK(
      first >= 0 && count >= 0 && first + count <= static_cast<int64_t>(entry.end) / size,
      "a part of a GGUF tensor outside of it");
  if (entry.converted_from.empty()) {
    return TensorData{
        tensor.data.substr(static_cast<size_t>(first * size), static_cast<size_t>(count * size)),
        file_};
  }
  const GgufType& type = *tensor.type;
  const int64_t begin = first / type.block_elements;
  const int64_t end = (first + count + type.block_elements - 1) / type.block_elements;
  const auto floats = static_cast<size_t>((end - begin) * type.block_elements);
  std::shared_ptr<float[]> copy;
  try {
    copy = std::make_shared_for_overwrite<float[]>(floats);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        Concat(Printable(file_name()), ": tensor ", Quoted(entry.name), ": expected ",
               floats * sizeof(float), " bytes of memory for the values in f32, found less"));
  }
  const auto* block =
      reinterpret_cast<const uint8_t*>(tensor.data.data()) + begin * type.block_bytes;
  float* out = copy.get();
  for (int64_t b = begin; b < end; ++b) {
    type.convert(block, out);
    block += type.block_bytes;
    out += type.block_elements;
  }
  const float* part = copy.get() + (first - begin * type.block_elements);
  return TensorData{{reinterpret_cast<const char*>(part), static_cast<size_t>(count * size)}, copy};
}

uint64_t GgufFile::StoredBytes(const TensorEntry& entry) const {
  return TensorOf(entry).data.size();
}

}  // namespace moeserve
