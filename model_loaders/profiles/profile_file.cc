#include "model_loaders/profiles/profile_file.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "base/kinds.h"
#include "engine/statistics/stats_fields.h"
#include "model_loaders/files/safetensors.h"
#include "nlohmann/json.hpp"

namespace moeserve {
namespace {

// The numbers that stand for kinds of routed blocks.
constexpr BlockKind kStoredBlocks[] = {BlockKind::kAttention, BlockKind::kFeedForward,
                                       BlockKind::kCrossAttention};
int64_t StoredBlock(BlockKind kind) {
  return std::ranges::find(kStoredBlocks, kind) - std::begin(kStoredBlocks);
}

constexpr char kFormat[] = "moeserve-expert-profile";
constexpr char kVersion[] = "1";
// Limits far above any model. They bound the memory that a hostile file can demand.
constexpr int64_t kMaxBlocks = 1 << 16;
constexpr int64_t kMaxExperts = 0xffff;
constexpr int64_t kMaxVocabulary = int64_t{1} << 28;

template <typename T>
constexpr ElementType TypeOf() {
  if constexpr (std::is_same_v<T, uint16_t>) return ElementType::kU16;
  if constexpr (std::is_same_v<T, int32_t>) return ElementType::kI32;
  if constexpr (std::is_same_v<T, uint32_t>) return ElementType::kU32;
  if constexpr (std::is_same_v<T, int64_t>) return ElementType::kI64;
  if constexpr (std::is_same_v<T, uint64_t>) return ElementType::kU64;
  if constexpr (std::is_same_v<T, float>) return ElementType::kF32;
  if constexpr (std::is_same_v<T, double>) return ElementType::kF64;
}

class Writer {
 public:
  template <typename T>
  void Array(const std::string& name, std::span<const T> values, std::vector<int64_t> shape) {
    nlohmann::json entry;
    entry["dtype"] = std::string(Name(TypeOf<T>()));
    entry["shape"] = std::move(shape);
    const size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
    entry["data_offsets"] = {begin, data_.size()};
    header_[name] = std::move(entry);
  }
  template <typename T>
  void Vector(const std::string& name, const std::vector<T>& values) {
    Array<T>(name, values, {static_cast<int64_t>(values.size())});
  }

  std::string Finish(const std::map<std::string, std::string>& metadata) && {
    header_["__metadata__"] = metadata;
    std::string header = header_.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    header.append((8 - header.size() % 8) % 8, ' ');
    const uint64_t length = header.size();
    std::string out(reinterpret_cast<const char*>(&length), sizeof(length));
    out += header;
    out += data_;
    return out;
  }

 private:
  nlohmann::json header_;
  std::string data_;
};

class Reader {
 public:
  Reader(const SafetensorsHeader& header, std::string_view data) : data_(data) {
    for (const TensorEntry& t : header.tensors) entries_.emplace(t.name, &t);
  }

  bool Has(const std::string& name) const { return entries_.count(name) > 0; }

  // Returns the elements of an array. `shape` is the expected shape, in which -1 accepts any size;
  // it is replaced by the array's shape.
  template <typename T>
  Result<std::vector<T>> Array(const std::string& name, std::vector<int64_t>& shape) {
    const auto at = entries_.find(name);
    if (at == entries_.end()) return Fault(name, "is missing");
    const TensorEntry& entry = *at->second;
    used_.insert(name);
    bool fits = entry.type == TypeOf<T>() && entry.shape.size() == shape.size();
    for (size_t i = 0; fits && i < shape.size(); ++i) {
      fits = shape[i] == -1 || shape[i] == entry.shape[i];
    }
    if (!fits) {
      return Fault(
          name, Concat("expected ", Name(TypeOf<T>()), " ", ShapeText(shape),
                       " (-1: any size), found ", Name(entry.type), " ", ShapeText(entry.shape)));
    }
    shape = entry.shape;
    std::vector<T> out((entry.end - entry.begin) / sizeof(T));
    if (!out.empty()) {
      std::memcpy(out.data(), data_.data() + entry.begin, out.size() * sizeof(T));
    }
    if constexpr (std::is_floating_point_v<T>) {
      for (const T v : out) {
        if (!std::isfinite(v)) return Fault(name, "holds a number that is not finite");
      }
    }
    return out;
  }
  template <typename T>
  absl::Status Into(const std::string& name, std::vector<T>& to, int64_t size) {
    std::vector<int64_t> shape = {size};
    MOESERVE_ASSIGN_OR_RETURN(to, Array<T>(name, shape));
    return absl::OkStatus();
  }

  // Returns an error if the file has an array that was not read.
  absl::Status CheckAllUsed() const {
    for (const auto& [name, entry] : entries_) {
      if (used_.count(name) == 0) return Fault(name, "is unknown");
    }
    return absl::OkStatus();
  }

  static absl::Status Fault(const std::string& name, const std::string& what) {
    return absl::InvalidArgumentError(Concat("array ", Quoted(name), " ", what));
  }

 private:
  const std::string_view data_;
  std::map<std::string, const TensorEntry*> entries_;
  std::set<std::string> used_;
};

std::string Prefix(size_t block) { return Concat("blocks.", block, "."); }

template <typename T>
bool AllBelow(const std::vector<T>& values, int64_t end) {
  return std::all_of(values.begin(), values.end(), [end](T v) {
    return static_cast<int64_t>(v) >= 0 && static_cast<int64_t>(v) < end;
  });
}

absl::Status ReadShape(Reader& reader, const std::string& prefix, BlockExpertStats& b) {
  std::vector<int64_t> values;
  MOESERVE_RETURN_IF_ERROR(reader.Into(prefix + "shape", values, 6));
  const auto within = [&](int i, int64_t low, int64_t high) -> absl::Status {
    if (values[static_cast<size_t>(i)] >= low && values[static_cast<size_t>(i)] <= high) {
      return absl::OkStatus();
    }
    return Reader::Fault(prefix + "shape", Concat("entry ", i, ": expected ", low, " to ", high,
                                                  ", found ", values[static_cast<size_t>(i)]));
  };
  constexpr int64_t kMany = std::numeric_limits<int32_t>::max();
  MOESERVE_RETURN_IF_ERROR(within(0, 0, kMany));
  MOESERVE_RETURN_IF_ERROR(within(1, 0, std::ssize(kStoredBlocks) - 1));
  MOESERVE_RETURN_IF_ERROR(within(2, 1, kMaxExperts));
  MOESERVE_RETURN_IF_ERROR(within(3, 1, kMaxExperts));
  MOESERVE_RETURN_IF_ERROR(within(4, 0, std::ssize(AllKinds<SelectKind>()) - 1));
  MOESERVE_RETURN_IF_ERROR(within(5, 1, values[2]));
  b.layer = static_cast<int>(values[0]);
  b.block = kStoredBlocks[values[1]];
  b.num_experts = static_cast<int>(values[2]);
  b.split_heads = static_cast<int>(values[3]);
  b.select = static_cast<SelectKind>(values[4]);
  b.max_selected = static_cast<int>(values[5]);
  return absl::OkStatus();
}

absl::Status ReadBlock(Reader& reader, const std::string& prefix, BlockExpertStats& b) {
  MOESERVE_RETURN_IF_ERROR(ReadShape(reader, prefix, b));
  absl::Status status;
  ForEachBlockArray(
      [&](const BlockArray& array, auto& values) {
        if (!status.ok()) return;
        status =
            reader.Into(Concat(prefix, array.name), values, array.by_expert ? b.num_experts : -1);
      },
      b);
  MOESERVE_RETURN_IF_ERROR(status);
  if (b.distinct_histogram.empty()) {
    return Reader::Fault(prefix + "distinct_histogram", "is empty");
  }
  std::vector<uint64_t> integers;
  MOESERVE_RETURN_IF_ERROR(reader.Into(prefix + "counters", integers, kBlockIntegers));
  size_t next = 0;
  ForEachBlockInteger([&](uint64_t& value) { value = integers[next++]; }, b);
  std::vector<double> reals;
  MOESERVE_RETURN_IF_ERROR(reader.Into(prefix + "router.sums", reals, kBlockReals));
  next = 0;
  ForEachBlockReal([&](double& value) { value = reals[next++]; }, b);
  if (!AllBelow(b.expert_widths, std::numeric_limits<int32_t>::max()) ||
      !AllBelow(b.expert_parameters, std::numeric_limits<int64_t>::max() / kMaxExperts)) {
    return Reader::Fault(prefix + "expert_parameters", "holds a size out of range");
  }
  return absl::OkStatus();
}

absl::Status ReadHidden(Reader& reader, const std::string& prefix, const BlockExpertStats& b,
                        HiddenSample& sample) {
  std::vector<int64_t> shape = {-1, -1};
  MOESERVE_ASSIGN_OR_RETURN(sample.rows, reader.Array<float>(prefix + "hidden.rows", shape));
  sample.width = shape[1];
  MOESERVE_RETURN_IF_ERROR(reader.Into(prefix + "hidden.experts", sample.experts, shape[0]));
  std::vector<uint64_t> counters;
  MOESERVE_RETURN_IF_ERROR(reader.Into(prefix + "hidden.counters", counters, 2));
  sample.seen = counters[0];
  constexpr uint64_t kMost = uint64_t{1} << 62;
  if (counters[1] > kMost || sample.seen > kMost ||
      static_cast<uint64_t>(sample.size()) != std::min(counters[0], counters[1])) {
    return Reader::Fault(prefix + "hidden.counters",
                         Concat("expected rows seen and capacity that leave ", sample.size(),
                                " rows, found ", counters[0], " and ", counters[1]));
  }
  sample.capacity = static_cast<int64_t>(counters[1]);
  if (sample.width < 1 || !AllBelow(sample.experts, b.num_experts)) {
    return Reader::Fault(prefix + "hidden.experts", "does not fit the block");
  }
  return absl::OkStatus();
}

absl::Status ReadRoutes(Reader& reader, const std::string& prefix, const BlockExpertStats& b,
                        size_t tokens, BlockRoutes& routes) {
  const int64_t rows = static_cast<int64_t>(tokens) * b.split_heads;
  MOESERVE_RETURN_IF_ERROR(reader.Into(prefix + "routes.top1", routes.top1, rows));
  MOESERVE_RETURN_IF_ERROR(reader.Into(prefix + "routes.offsets", routes.offsets, rows + 1));
  MOESERVE_RETURN_IF_ERROR(reader.Into(prefix + "routes.experts", routes.experts, -1));
  if (routes.offsets.front() != 0 || routes.offsets.back() != routes.experts.size() ||
      !std::is_sorted(routes.offsets.begin(), routes.offsets.end())) {
    return Reader::Fault(prefix + "routes.offsets",
                         Concat("expected to ascend from 0 to ", routes.experts.size()));
  }
  if (!AllBelow(routes.experts, b.num_experts)) {
    return Reader::Fault(prefix + "routes.experts", "holds an expert that the block lacks");
  }
  for (const uint16_t e : routes.top1) {
    if (e != BlockRoutes::kNone && e >= b.num_experts) {
      return Reader::Fault(prefix + "routes.top1", "holds an expert that the block lacks");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadModel(Reader& reader, ExpertProfile& out) {
  std::vector<int64_t> shape;
  MOESERVE_RETURN_IF_ERROR(reader.Into("model.shape", shape, 4));
  if (shape[0] < 1 || shape[0] > kMaxVocabulary || shape[1] < 0 || shape[1] > kMaxBlocks ||
      shape[2] < 0 || shape[2] > shape[1] || shape[3] < 0) {
    return Reader::Fault("model.shape", Concat("is out of range: found ", ShapeText(shape)));
  }
  out.vocabulary = shape[0];
  out.stats.diversity_blocks = static_cast<int>(shape[2]);
  out.stats.always_active_parameters = shape[3];
  std::vector<uint64_t> counters;
  MOESERVE_RETURN_IF_ERROR(reader.Into("model.counters", counters, kModelIntegers));
  size_t next = 0;
  ForEachModelInteger([&](uint64_t& value) { value = counters[next++]; }, out.stats);
  MOESERVE_RETURN_IF_ERROR(
      reader.Into("model.diversity_histogram", out.stats.diversity_histogram, -1));
  if (out.stats.diversity_histogram.empty()) {
    return Reader::Fault("model.diversity_histogram", "is empty");
  }
  // Append the blocks one by one instead of allocating as many as the file claims to have.
  for (int64_t i = 0; i < shape[1]; ++i) {
    BlockExpertStats block;
    MOESERVE_RETURN_IF_ERROR(ReadBlock(reader, Prefix(static_cast<size_t>(i)), block));
    block.stack = out.stats.stack;
    out.stats.blocks.push_back(std::move(block));
  }
  return absl::OkStatus();
}

Result<ExpertProfile> Decode(const SafetensorsHeader& header, std::string_view data) {
  const auto value = [&](const char* key) {
    const auto at = header.metadata.find(key);
    return at == header.metadata.end() ? std::string() : at->second;
  };
  if (value("format") != kFormat || value("version") != kVersion) {
    return absl::InvalidArgumentError(
        Concat("not an expert profile: expected format ", kFormat, " of version ", kVersion,
               ", found ", Quoted(value("format")), " of version ", Quoted(value("version"))));
  }
  ExpertProfile out;
  out.model = value("model");
  if (const std::string name = value("stack"); !name.empty()) {
    const std::optional<Stack> stack = KindNamed<Stack>(name);
    if (!stack) {
      return absl::InvalidArgumentError(
          Concat("expert profile: stack: expected encoder or decoder, found ", Quoted(name)));
    }
    out.stats.stack = *stack;
  }
  Reader reader(header, data);
  MOESERVE_RETURN_IF_ERROR(ReadModel(reader, out));
  const std::vector<BlockExpertStats>& blocks = out.stats.blocks;
  if (!blocks.empty() && reader.Has("blocks.0.token_counts")) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      std::vector<int64_t> shape = {out.vocabulary, blocks[i].num_experts};
      MOESERVE_ASSIGN_OR_RETURN(auto counts,
                                reader.Array<uint32_t>(Prefix(i) + "token_counts", shape));
      out.token_counts.push_back(std::move(counts));
    }
  }
  if (!blocks.empty() && reader.Has("blocks.0.hidden.rows")) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      HiddenSample sample;
      MOESERVE_RETURN_IF_ERROR(ReadHidden(reader, Prefix(i), blocks[i], sample));
      out.hidden.push_back(std::move(sample));
    }
  }
  if (reader.Has("routes.tokens")) {
    RouteSequence routes;
    MOESERVE_RETURN_IF_ERROR(reader.Into("routes.tokens", routes.tokens, -1));
    if (!AllBelow(routes.tokens, out.vocabulary)) {
      return Reader::Fault("routes.tokens", "holds a token beyond the vocabulary");
    }
    for (size_t i = 0; i < blocks.size(); ++i) {
      BlockRoutes block;
      MOESERVE_RETURN_IF_ERROR(
          ReadRoutes(reader, Prefix(i), blocks[i], routes.tokens.size(), block));
      routes.blocks.push_back(std::move(block));
    }
    out.routes = std::move(routes);
  }
  MOESERVE_RETURN_IF_ERROR(reader.CheckAllUsed());
  return out;
}

}  // namespace

std::string EncodeProfile(const ExpertProfile& profile) {
  Writer writer;
  const ExpertStats& stats = profile.stats;
  writer.Vector<int64_t>("model.shape",
                         {profile.vocabulary, static_cast<int64_t>(stats.blocks.size()),
                          stats.diversity_blocks, stats.always_active_parameters});
  std::vector<uint64_t> counters;
  ForEachModelInteger([&](uint64_t value) { counters.push_back(value); }, stats);
  writer.Vector("model.counters", counters);
  writer.Vector("model.diversity_histogram", stats.diversity_histogram);
  for (size_t i = 0; i < stats.blocks.size(); ++i) {
    const BlockExpertStats& b = stats.blocks[i];
    const std::string prefix = Prefix(i);
    writer.Vector<int64_t>(prefix + "shape",
                           {b.layer, StoredBlock(b.block), b.num_experts, b.split_heads,
                            static_cast<int>(b.select), b.max_selected});
    ForEachBlockArray(
        [&](const BlockArray& array, const auto& values) {
          writer.Vector(Concat(prefix, array.name), values);
        },
        b);
    counters.clear();
    ForEachBlockInteger([&](uint64_t value) { counters.push_back(value); }, b);
    writer.Vector(prefix + "counters", counters);
    std::vector<double> reals;
    ForEachBlockReal([&](double value) { reals.push_back(value); }, b);
    writer.Vector(prefix + "router.sums", reals);
    if (!profile.token_counts.empty()) {
      writer.Array<uint32_t>(prefix + "token_counts", profile.token_counts[i],
                             {profile.vocabulary, b.num_experts});
    }
    if (!profile.hidden.empty()) {
      const HiddenSample& sample = profile.hidden[i];
      writer.Array<float>(prefix + "hidden.rows", sample.rows, {sample.size(), sample.width});
      writer.Vector(prefix + "hidden.experts", sample.experts);
      writer.Vector<uint64_t>(prefix + "hidden.counters",
                              {sample.seen, static_cast<uint64_t>(sample.capacity)});
    }
    if (profile.routes) {
      const BlockRoutes& routes = profile.routes->blocks[i];
      writer.Vector(prefix + "routes.top1", routes.top1);
      writer.Vector(prefix + "routes.offsets", routes.offsets);
      writer.Vector(prefix + "routes.experts", routes.experts);
    }
  }
  if (profile.routes) writer.Vector("routes.tokens", profile.routes->tokens);
  std::map<std::string, std::string> metadata = {
      {"format", kFormat}, {"version", kVersion}, {"model", profile.model}};
  if (stats.stack != Stack::kOnly) metadata["stack"] = KindName(stats.stack);
  return std::move(writer).Finish(metadata);
}

Result<ExpertProfile> DecodeProfile(std::string_view bytes) {
  uint64_t length = 0;
  if (bytes.size() < sizeof(length)) {
    return absl::InvalidArgumentError(
        Concat("not an expert profile: expected at least 8 bytes, found ", bytes.size()));
  }
  std::memcpy(&length, bytes.data(), sizeof(length));
  bytes.remove_prefix(sizeof(length));
  if (length > kMaxSafetensorsHeader || length > bytes.size()) {
    return absl::InvalidArgumentError(Concat("not an expert profile: its header of ", length,
                                             " bytes does not fit the ", bytes.size(),
                                             " bytes that follow"));
  }
  const std::string_view data = bytes.substr(length);
  MOESERVE_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                            ParseSafetensorsHeader(bytes.substr(0, length), data.size()));
  return Decode(header, data);
}

absl::Status WriteWholeFile(const std::filesystem::path& path, std::string_view bytes) {
  std::error_code ignored;
  // Devices and pipes are written directly, because a rename would replace them by a file.
  const bool special = std::filesystem::is_other(path, ignored);
  std::filesystem::path partial = path;
  if (!special) partial += ".partial";
  const auto failed = [&] {
    const std::string reason = std::error_code(errno, std::generic_category()).message();
    if (!special) std::filesystem::remove(partial, ignored);
    return absl::UnavailableError(
        Concat("cannot write ", Quoted(path.filename().string()), ": ", reason));
  };
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  if (!file) return failed();
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) return failed();
  if (special) return absl::OkStatus();
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  if (error) {
    errno = error.value();
    return failed();
  }
  return absl::OkStatus();
}

absl::Status SaveProfile(const std::filesystem::path& path, const ExpertProfile& profile) {
  return WriteWholeFile(path, EncodeProfile(profile));
}

Result<ExpertProfile> LoadProfile(const std::filesystem::path& path) {
  MOESERVE_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  Result<ExpertProfile> profile = DecodeProfile(file->bytes());
  MOESERVE_RETURN_IF_ERROR(file->Check());
  if (profile.ok()) return profile;
  return Prefixed(Concat(Quoted(path.filename().string()), ": "), profile.status());
}

}  // namespace moeserve
