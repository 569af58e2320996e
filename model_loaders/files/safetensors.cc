#include "model_loaders/files/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "model_loaders/files/file_kind.h"

namespace moeserve {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

using Json = nlohmann::json;

// A tensor takes about eight JSON values. The limit, of some 260,000 tensors, is above the number
// of tensors that the largest mixtures have in all their files together, and bounds the memory that
// a hostile header can demand, about 100 bytes for each value.
constexpr JsonLimits kHeaderLimits = {
    .max_bytes = kMaxSafetensorsHeader, .max_depth = 4, .max_values = size_t{2} << 20};

absl::Status Fault(std::string_view tensor, std::string_view message) {
  return absl::InvalidArgumentError(Concat("tensor ", Quoted(tensor), ": ", message));
}

// Returns the value if it is a JSON integer in [0, 2^63), else nullopt.
std::optional<int64_t> NonNegative(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(number);
}

Result<TensorEntry> ParseEntry(const std::string& name, const Json& value, uint64_t data_size) {
  if (!value.is_object()) {
    return Fault(name, Concat("expected an object, found ", ShowJson(value)));
  }
  for (const auto& [key, unused] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return Fault(name,
                   Concat("unknown key ", Quoted(key), "; expected dtype, shape and data_offsets"));
    }
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) return Fault(name, Concat("key \"", key, "\" is missing"));
  }

  TensorEntry entry;
  entry.name = name;
  const Json& dtype = value["dtype"];
  const std::optional<ElementType> type =
      dtype.is_string() ? ElementTypeFromName(dtype.get_ref<const std::string&>()) : std::nullopt;
  if (!type.has_value()) {
    return Fault(name, Concat("dtype: expected one of the format's types (F32, F16, BF16, ...), "
                              "found ",
                              ShowJson(dtype)));
  }
  entry.type = *type;

  const Json& shape = value["shape"];
  if (!shape.is_array() || shape.size() > kMaxDimensions) {
    return Fault(name, Concat("shape: expected a list of at most ", kMaxDimensions,
                              " integers, found ", ShowJson(shape)));
  }
  for (const Json& dim : shape) {
    const std::optional<int64_t> size = NonNegative(dim);
    if (!size.has_value()) {
      return Fault(name, Concat("shape: expected integers in [0, 2^63), found ", ShowJson(dim)));
    }
    entry.shape.push_back(*size);
  }

  const Json& offsets = value["data_offsets"];
  std::optional<int64_t> begin, end;
  if (offsets.is_array() && offsets.size() == 2) {
    begin = NonNegative(offsets[0]);
    end = NonNegative(offsets[1]);
  }
  if (!begin.has_value() || !end.has_value()) {
    return Fault(name, Concat("data_offsets: expected two integers in [0, 2^63), found ",
                              ShowJson(offsets)));
  }
  entry.begin = static_cast<uint64_t>(*begin);
  entry.end = static_cast<uint64_t>(*end);
  if (entry.begin > entry.end) {
    return Fault(name, Concat("data_offsets: expected begin <= end, found ", ShowJson(offsets)));
  }
  if (entry.end > data_size) {
    return Fault(name, Concat("data_offsets: expected an end within the ", data_size,
                              " bytes of data in the file, found ", entry.end));
  }
  const std::optional<int64_t> bytes = ByteCount(entry.shape, entry.type);
  if (!bytes.has_value()) {
    return Fault(name, Concat("shape: expected a size below 2^63 bytes, found ",
                              ShapeText(entry.shape), " of ", Name(entry.type)));
  }
  if (static_cast<uint64_t>(*bytes) != entry.end - entry.begin) {
    return Fault(name, Concat("data_offsets: expected ", *bytes, " bytes (", Name(entry.type), " ",
                              ShapeText(entry.shape), "), found ", entry.end - entry.begin));
  }
  return entry;
}

absl::Status CheckCoverage(const std::vector<TensorEntry>& sorted, uint64_t data_size) {
  uint64_t covered = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const TensorEntry& entry = sorted[i];
    if (entry.begin != covered) {
      const std::string previous =
          i == 0 ? "the start of the data" : Concat("the end of ", Quoted(sorted[i - 1].name));
      return Fault(entry.name, Concat("data_offsets: expected a begin of ", covered, " (", previous,
                                      "), found ", entry.begin,
                                      entry.begin < covered ? ": they overlap" : ": a hole"));
    }
    covered = entry.end;
  }
  if (covered != data_size) {
    return absl::InvalidArgumentError(Concat("data after the header: expected ", covered,
                                             " bytes (the end of the last tensor), found ",
                                             data_size));
  }
  return absl::OkStatus();
}

}  // namespace

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_size) {
  if (!json.starts_with('{')) {
    return absl::InvalidArgumentError(
        Concat("header: expected JSON that starts with '{', found ", Quoted(json, 16)));
  }
  Result<Json> parsed = ParseStrictJson(json, kHeaderLimits);
  if (!parsed.ok()) return Prefixed("header: ", parsed.status());

  SafetensorsHeader header;
  header.tensors.reserve(parsed->size());
  for (const auto& [name, value] : parsed->items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) {
        return absl::InvalidArgumentError(
            Concat("header: __metadata__: expected an object, found ", ShowJson(value)));
      }
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) {
          return absl::InvalidArgumentError(Concat("header: __metadata__: ", Quoted(key),
                                                   ": expected a string, found ", ShowJson(text)));
        }
        header.metadata.emplace(key, text.get_ref<const std::string&>());
      }
      continue;
    }
    MOESERVE_ASSIGN_OR_RETURN(TensorEntry entry, ParseEntry(name, value, data_size));
    header.tensors.push_back(std::move(entry));
  }
  // Entries with equal begin are sorted by end, so that an empty tensor comes first.
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) {
              return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
            });
  MOESERVE_RETURN_IF_ERROR(CheckCoverage(header.tensors, data_size));
  return header;
}

Result<std::shared_ptr<const SafetensorsFile>> SafetensorsFile::Open(
    const std::filesystem::path& path) {
  MOESERVE_ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> mapped, MappedFile::Open(path));
  MOESERVE_RETURN_IF_ERROR(CheckFileKind(
      path.filename().string(), mapped->bytes().substr(0, kFileKindBytes), OwnFormat::kOther));
  // make_shared cannot call the private constructor.
  std::shared_ptr<SafetensorsFile> file(new SafetensorsFile());
  file->file_name_ = path.filename().string();
  const std::string prefix = Printable(file->file_name_) + ": ";

  const std::string_view bytes = mapped->bytes();
  constexpr size_t kLengthBytes = sizeof(uint64_t);
  if (bytes.size() < kLengthBytes) {
    return absl::InvalidArgumentError(
        Concat(prefix, "expected at least ", kLengthBytes, " bytes, found ", bytes.size()));
  }
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), sizeof(header_size));
  if (header_size > kMaxSafetensorsHeader) {
    return absl::InvalidArgumentError(Concat(prefix, "header: expected a length of at most ",
                                             kMaxSafetensorsHeader, " bytes, found ", header_size));
  }
  if (header_size > bytes.size() - kLengthBytes) {
    return absl::InvalidArgumentError(
        Concat(prefix, "header: expected ", header_size, " bytes (its own length field), found ",
               bytes.size() - kLengthBytes, " to the end of the file"));
  }
  file->data_ = bytes.substr(kLengthBytes + header_size);
  Result<SafetensorsHeader> header =
      ParseSafetensorsHeader(bytes.substr(kLengthBytes, header_size), file->data_.size());
  if (!header.ok()) return Prefixed(prefix, header.status());

  file->entries_ = std::move(header->tensors);
  file->metadata_ = std::move(header->metadata);
  file->file_ = std::move(mapped);
  file->by_name_.reserve(file->entries_.size());
  for (const TensorEntry& entry : file->entries_) file->by_name_.emplace(entry.name, &entry);
  return std::shared_ptr<const SafetensorsFile>(std::move(file));
}

const TensorEntry* SafetensorsFile::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : it->second;
}

}  // namespace moeserve
