#include "model_loaders/files/torch/torch_file.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "model_loaders/files/file_kind.h"

namespace moeserve {
namespace {

using K = PickleKind;

// The first pickle of a file before version 1.6: the magic number 0x1950a86a20f9469cfc6c.
constexpr std::string_view kLegacyBegin =
    "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";

// A tensor that repeats elements can demand more memory than the file has bytes.
constexpr int64_t kMinCopyLimit = int64_t{16} << 20;

struct TypeName {
  std::string_view name;
  ElementType type;
};

constexpr TypeName kStorages[] = {
    {"DoubleStorage", ElementType::kF64}, {"FloatStorage", ElementType::kF32},
    {"HalfStorage", ElementType::kF16},   {"BFloat16Storage", ElementType::kBF16},
    {"LongStorage", ElementType::kI64},   {"IntStorage", ElementType::kI32},
    {"ShortStorage", ElementType::kI16},  {"CharStorage", ElementType::kI8},
    {"ByteStorage", ElementType::kU8},    {"BoolStorage", ElementType::kBool},
};

constexpr TypeName kDTypes[] = {
    {"float64", ElementType::kF64},
    {"float32", ElementType::kF32},
    {"float16", ElementType::kF16},
    {"bfloat16", ElementType::kBF16},
    {"float8_e4m3fn", ElementType::kF8E4M3},
    {"float8_e5m2", ElementType::kF8E5M2},
    {"int64", ElementType::kI64},
    {"int32", ElementType::kI32},
    {"int16", ElementType::kI16},
    {"int8", ElementType::kI8},
    {"uint64", ElementType::kU64},
    {"uint32", ElementType::kU32},
    {"uint16", ElementType::kU16},
    {"uint8", ElementType::kU8},
    {"bool", ElementType::kBool},
};

template <size_t kCount>
std::optional<ElementType> TypeOf(const TypeName (&table)[kCount], const PickleValue& global) {
  if (!global.Is(K::kGlobal) || global.module() != "torch") return std::nullopt;
  for (const TypeName& row : table) {
    if (row.name == global.name()) return row.type;
  }
  return std::nullopt;
}

absl::Status Unexpected(std::string_view what, std::string_view expected,
                        const PickleValue& found) {
  return absl::InvalidArgumentError(
      Concat(what, ": expected ", expected, ", found ", ShowPickle(found)));
}

// The functions of torch._utils that make a tensor from a storage, an offset, a shape and strides.
enum class Rebuild { kNone, kFromTyped, kFromUntyped };

Rebuild RebuildOf(const PickleValue& callee) {
  if (callee.IsGlobal("torch._utils", "_rebuild_tensor") ||
      callee.IsGlobal("torch._utils", "_rebuild_tensor_v2")) {
    return Rebuild::kFromTyped;
  }
  return callee.IsGlobal("torch._utils", "_rebuild_tensor_v3") ? Rebuild::kFromUntyped
                                                               : Rebuild::kNone;
}

bool IsTensorFunction(const PickleValue& callee) {
  if (!callee.Is(K::kGlobal)) return false;
  return (callee.module() == "torch._utils" || callee.module() == "torch._tensor") &&
         callee.name().starts_with("_rebuild");
}

// A call of one of the functions of Rebuild.
struct RebuildCall {
  const PickleValue* callee = nullptr;
  const PickleValue* arguments = nullptr;
};

// Returns the call that makes the elements of a tensor, without the calls around it that add a
// gradient flag, attributes or a class.
Result<RebuildCall> Innermost(const PickleValue& value) {
  RebuildCall call{&value.callee(), &value.arguments()};
  while (RebuildOf(*call.callee) == Rebuild::kNone) {
    const std::vector<const PickleValue*>& arguments = call.arguments->items;
    const bool parameter = call.callee->IsGlobal("torch._utils", "_rebuild_parameter") ||
                           call.callee->IsGlobal("torch._utils", "_rebuild_parameter_with_state");
    if (parameter && !arguments.empty() && arguments[0]->Is(K::kCall)) {
      call = {&arguments[0]->callee(), &arguments[0]->arguments()};
      continue;
    }
    // (function, class, arguments of the function, attributes)
    const bool with_class = call.callee->IsGlobal("torch._tensor", "_rebuild_from_type_v2") ||
                            call.callee->IsGlobal("torch._tensor", "_rebuild_from_type");
    if (with_class && arguments.size() >= 3 && IsTensorFunction(*arguments[0]) &&
        (arguments[1]->IsGlobal("torch", "Tensor") ||
         arguments[1]->IsGlobal("torch.nn.parameter", "Parameter")) &&
        arguments[2]->Is(K::kTuple)) {
      call = {arguments[0], arguments[2]};
      continue;
    }
    return absl::InvalidArgumentError(
        Concat("expected a plain tensor or parameter, found a call of ", call.callee->FullName()));
  }
  return call;
}

// How a pickle refers to the data of tensors.
struct StorageReference {
  const PickleValue* storage_class = nullptr;
  std::string_view key;
  int64_t elements = 0;
};

Result<StorageReference> ReadReference(const PickleValue& value) {
  const PickleValue& id = value.Is(K::kPersistentId) ? *value.items[0] : value;
  // ("storage", class, key, device, number of elements)
  const std::vector<const PickleValue*>& parts = id.items;
  if (!value.Is(K::kPersistentId) || !id.Is(K::kTuple) || parts.size() != 5 ||
      !parts[0]->Is(K::kString) || parts[0]->text != "storage" || !parts[2]->Is(K::kString) ||
      !parts[4]->Is(K::kInt) || parts[4]->integer < 0) {
    return Unexpected("storage", "a reference to a storage", id);
  }
  return StorageReference{parts[1], parts[2]->text, parts[4]->integer};
}

Result<std::vector<int64_t>> Integers(std::string_view what, const PickleValue& value) {
  if (!value.Is(K::kTuple) || value.items.size() > kMaxDimensions) {
    return Unexpected(what, Concat("a tuple of at most ", kMaxDimensions, " integers"), value);
  }
  std::vector<int64_t> numbers;
  for (const PickleValue* item : value.items) {
    if (!item->Is(K::kInt) || item->integer < 0) {
      return Unexpected(what, "integers in [0, 2^63)", *item);
    }
    numbers.push_back(item->integer);
  }
  return numbers;
}

// Checks that all elements lie in the storage.
absl::Status CheckBounds(const TorchTensor& tensor) {
  const int64_t elements = static_cast<int64_t>(tensor.storage.size()) / SizeOf(tensor.type);
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) {
    return absl::OkStatus();  // no elements
  }
  int64_t last = tensor.first;
  bool fits = true;
  for (size_t i = 0; i < tensor.shape.size() && fits; ++i) {
    int64_t distance;
    fits = !__builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &distance) &&
           !__builtin_add_overflow(last, distance, &last);
  }
  if (fits && last < elements) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat("expected its elements among the ", elements,
                                           " of its storage, found shape ", ShapeText(tensor.shape),
                                           " with strides ", ShapeText(tensor.strides),
                                           " from element ", tensor.first, " on"));
}

template <int64_t kSize>
void CopyElements(const char* from, int64_t stride, int64_t count, char* to) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * kSize, from + i * stride * kSize, kSize);
}

// Writes the elements in row-major order to `to`.
void CopyStrided(const TorchTensor& tensor, char* to) {
  const auto copy = [&](int64_t element, int64_t stride, int64_t count) {
    const int64_t size = SizeOf(tensor.type);
    const char* from = tensor.storage.data() + element * size;
    switch (size) {
      case 1:
        CopyElements<1>(from, stride, count, to);
        break;
      case 2:
        CopyElements<2>(from, stride, count, to);
        break;
      case 4:
        CopyElements<4>(from, stride, count, to);
        break;
      default:
        CopyElements<8>(from, stride, count, to);
    }
    to += size * count;
  };
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) return;
  if (tensor.shape.empty()) return copy(tensor.first, 1, 1);
  const size_t inner = tensor.shape.size() - 1;
  std::vector<int64_t> index(inner, 0);
  int64_t row = tensor.first;  // first element of the innermost dimension at `index`
  for (;;) {
    copy(row, tensor.strides[inner], tensor.shape[inner]);
    size_t d = inner;
    for (; d > 0; --d) {
      row += tensor.strides[d - 1];
      if (++index[d - 1] < tensor.shape[d - 1]) break;
      row -= tensor.strides[d - 1] * tensor.shape[d - 1];
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

}  // namespace

bool TorchTensor::IsContiguous() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return true;
  int64_t expected = 1;
  for (size_t i = shape.size(); i > 0; --i) {
    if (shape[i - 1] != 1 && strides[i - 1] != expected) return false;
    // cannot overflow, because this many elements are in the storage
    expected *= shape[i - 1];
  }
  return true;
}

Result<std::shared_ptr<const TorchFile>> TorchFile::Open(const std::filesystem::path& path) {
  MOESERVE_ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> mapped, MappedFile::Open(path));
  MOESERVE_RETURN_IF_ERROR(CheckFileKind(
      path.filename().string(), mapped->bytes().substr(0, kFileKindBytes), OwnFormat::kZip));
  // make_shared cannot call the private constructor.
  std::shared_ptr<TorchFile> file(new TorchFile());
  file->file_name_ = path.filename().string();
  const absl::Status status = file->Load(std::move(mapped));
  if (!status.ok()) return Prefixed(Printable(file->file_name_) + ": ", status);
  return std::shared_ptr<const TorchFile>(std::move(file));
}

absl::Status TorchFile::Load(std::shared_ptr<const MappedFile> file) {
  file_ = std::move(file);
  if (file_->bytes().starts_with(kLegacyBegin)) {
    return absl::InvalidArgumentError(
        "expected a file of PyTorch 1.6 or later, found the format before. Load and save it again: "
        "torch.save(torch.load(\"...\", weights_only=True), \"...\")");
  }
  MOESERVE_ASSIGN_OR_RETURN(zip_, ZipFile::Parse(file_->bytes()));
  constexpr std::string_view kPickle = "data.pkl";
  const ZipEntry* pickle = nullptr;
  for (const ZipEntry& entry : zip_->entries()) {
    const size_t slash = entry.name.find('/');
    if (slash == std::string_view::npos || entry.name.substr(slash + 1) != kPickle) continue;
    if (pickle != nullptr) {
      return absl::InvalidArgumentError(Concat("expected one entry ", kPickle, ", found ",
                                               Quoted(pickle->name), " and ", Quoted(entry.name)));
    }
    pickle = &entry;
    folder_ = entry.name.substr(0, slash + 1);
  }
  if (pickle == nullptr) {
    return absl::InvalidArgumentError(
        Concat("expected a file of torch.save(), found a zip archive without an entry ", kPickle,
               " in a folder"));
  }
  if (zip_->Find(folder_ + "constants.pkl") != nullptr) {
    return absl::InvalidArgumentError(
        "expected a file of torch.save(), found a TorchScript program of torch.jit.save()");
  }
  if (const ZipEntry* order = zip_->Find(folder_ + "byteorder");
      order != nullptr && order->bytes != "little") {
    return absl::InvalidArgumentError(
        Concat("byteorder: expected \"little\", found ", Quoted(order->bytes)));
  }
  MOESERVE_RETURN_IF_ERROR(CheckCrc(*pickle));
  Result<PickleTree> tree = PickleTree::Parse(pickle->bytes);
  if (!tree.ok()) return Prefixed(Concat(kPickle, ": "), tree.status());
  pickle_ = *std::move(tree);
  return absl::OkStatus();
}

Result<std::string_view> TorchFile::Storage(std::string_view key, int64_t elements,
                                            int64_t element_bytes) const {
  const std::string name = Concat("data/", key);
  const ZipEntry* entry = zip_->Find(folder_ + name);
  if (entry == nullptr) {
    return absl::InvalidArgumentError(
        Concat("expected the entry ", Quoted(name), " for its storage, found none"));
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements, element_bytes, &bytes) ||
      static_cast<uint64_t>(bytes) != entry->bytes.size()) {
    return absl::InvalidArgumentError(Concat("storage ", Quoted(key), ": expected ", elements,
                                             " times ", element_bytes, " bytes, found ",
                                             entry->bytes.size()));
  }
  return entry->bytes;
}

Result<std::optional<TorchTensor>> TorchFile::Tensor(const PickleValue& value) const {
  if (!value.Is(K::kCall) || !IsTensorFunction(value.callee())) return std::optional<TorchTensor>();
  MOESERVE_ASSIGN_OR_RETURN(const RebuildCall call, Innermost(value));
  const bool typed = RebuildOf(*call.callee) == Rebuild::kFromTyped;
  // (storage, first element, shape, strides, gradient flag, hooks, then for untyped storages the
  // type, and flags). The oldest function has only the first four.
  const std::vector<const PickleValue*>& arguments = call.arguments->items;
  const size_t flags = typed ? 6 : 7;
  if (arguments.size() < (typed ? 4 : flags) || arguments.size() > flags + 1) {
    return Unexpected(call.callee->FullName(), Concat(flags, " arguments"), *call.arguments);
  }
  if (arguments.size() > flags && !arguments[flags]->Is(K::kNone) &&
      !(arguments[flags]->Is(K::kDict) && arguments[flags]->items.empty())) {
    return absl::InvalidArgumentError(
        "expected a tensor without conjugation and negation flags, found flags");
  }

  MOESERVE_ASSIGN_OR_RETURN(const StorageReference storage, ReadReference(*arguments[0]));
  const PickleValue& type_global = typed ? *storage.storage_class : *arguments[6];
  const std::optional<ElementType> type =
      typed ? TypeOf(kStorages, type_global) : TypeOf(kDTypes, type_global);
  if (!type.has_value()) {
    return Unexpected("type", "a type of real numbers, integers or bool", type_global);
  }
  TorchTensor tensor;
  tensor.type = *type;
  const int64_t unit = typed ? SizeOf(*type) : 1;  // an untyped storage has bytes
  MOESERVE_ASSIGN_OR_RETURN(tensor.storage, Storage(storage.key, storage.elements, unit));
  if (!arguments[1]->Is(K::kInt) || arguments[1]->integer < 0) {
    return Unexpected("first element", "an integer of at least 0", *arguments[1]);
  }
  tensor.first = arguments[1]->integer;
  MOESERVE_ASSIGN_OR_RETURN(tensor.shape, Integers("shape", *arguments[2]));
  MOESERVE_ASSIGN_OR_RETURN(tensor.strides, Integers("strides", *arguments[3]));
  if (tensor.shape.size() != tensor.strides.size()) {
    return absl::InvalidArgumentError(Concat("strides: expected ", tensor.shape.size(),
                                             " (one per dimension), found ",
                                             tensor.strides.size()));
  }
  MOESERVE_RETURN_IF_ERROR(CheckBounds(tensor));
  // Any stride may be stated for a dimension of one element; 0 cannot overflow.
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] == 1) tensor.strides[i] = 0;
  }
  return std::optional<TorchTensor>(std::move(tensor));
}

Result<std::shared_ptr<const TorchStateDict>> TorchStateDict::Make(const TorchFile& file,
                                                                   const PickleValue& dict) {
  const std::string prefix = Printable(file.file_name()) + ": ";
  if (!dict.Is(K::kDict)) {
    return Prefixed(prefix, Unexpected("state dict", "a dict from names to tensors", dict));
  }
  std::shared_ptr<TorchStateDict> result(new TorchStateDict());
  const int64_t copy_limit =
      std::max(kMinCopyLimit, static_cast<int64_t>(file.mapped()->stamp().size));
  for (size_t i = 0; i < dict.items.size(); i += 2) {
    const PickleValue& key = *dict.items[i];
    if (!key.Is(K::kString)) return Prefixed(prefix, Unexpected("state dict", "names", key));
    if (key.text.ends_with("_extra_state")) continue;
    const std::string place = Concat(prefix, "tensor ", Quoted(key.text), ": ");
    Result<std::optional<TorchTensor>> tensor = file.Tensor(*dict.items[i + 1]);
    if (!tensor.ok()) return Prefixed(place, tensor.status());
    if (!tensor->has_value()) {
      return absl::InvalidArgumentError(
          Concat(place, "expected a tensor, found ", ShowPickle(*dict.items[i + 1])));
    }
    TorchTensor& found = **tensor;
    const std::optional<int64_t> bytes = ByteCount(found.shape, found.type);
    if (!bytes.has_value() || (*bytes > copy_limit && !found.IsContiguous())) {
      return absl::InvalidArgumentError(Concat(place, "expected at most ", copy_limit,
                                               " bytes of a tensor that is not "
                                               "contiguous, found shape ",
                                               ShapeText(found.shape), " with strides ",
                                               ShapeText(found.strides)));
    }
    result->entries_.push_back({.name = std::string(key.text),
                                .type = found.type,
                                .shape = found.shape,
                                .begin = 0,
                                .end = static_cast<uint64_t>(*bytes)});
    result->tensors_.push_back(std::move(found));
  }
  result->file_name_ = file.file_name();
  result->file_ = file.mapped();
  return std::shared_ptr<const TorchStateDict>(std::move(result));
}

Result<std::shared_ptr<const TorchStateDict>> TorchStateDict::Open(
    const std::filesystem::path& path) {
  MOESERVE_ASSIGN_OR_RETURN(std::shared_ptr<const TorchFile> file, TorchFile::Open(path));
  return Make(*file, file->root());
}

Result<TensorData> TorchStateDict::Read(const TensorEntry& entry) const {
  const auto number = static_cast<size_t>(&entry - entries_.data());
  MOESERVE_CHECK(number < entries_.size(), "TorchStateDict::Read() of an entry of another file");
  const TorchTensor& tensor = tensors_[number];
  if (entry.end == 0) return TensorData{{}, file_};
  if (tensor.IsContiguous()) {
    const auto first = static_cast<size_t>(tensor.first * SizeOf(tensor.type));
    return TensorData{tensor.storage.substr(first, entry.end), file_};
  }
  const MutexLock lock(mutex_);
  if (copy_ == nullptr || copied_ != number) {
    copy_.reset();  // before the next copy takes memory
    try {
      std::shared_ptr<char[]> copy = std::make_shared_for_overwrite<char[]>(entry.end);
      CopyStrided(tensor, copy.get());
      copy_ = std::move(copy);
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError(
          Concat(Printable(file_name()), ": tensor ", Quoted(entry.name), ": expected ", entry.end,
                 " bytes of memory for a contiguous copy, found less"));
    }
    copied_ = number;
  }
  return TensorData{{copy_.get(), entry.end}, copy_};
}

}  // namespace moeserve
