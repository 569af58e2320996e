// Folders with quantized matrices: writing, reading, and refused folders.
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "model_loaders/architectures/native/config_json.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/checkpoint/quantized_tensors.h"
#include "model_loaders/inspect.h"
#include "model_loaders/write/quantize_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/integer_weights.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using testing::ElementOf;
using testing::ElementsOf;
using testing::Mentions;
using testing::RawTensor;
using testing::ReadFile;
using testing::SafetensorsBytes;
using testing::TempFolder;
using testing::WriteFile;
using Json = nlohmann::json;

constexpr Quantization kTypes[] = {Quantization::kInt8, Quantization::kInt8Channel,
                                   Quantization::kInt4, Quantization::kInt4K};

// Rows have several groups, the last of which is shorter, and widths are odd.
Json QuantizedConfig() {
  Json config = testing::TinyConfig();
  config["hidden_size"] = 150;
  config["feed_forward"][0]["routing"]["widths"] = {9, 11, 33, 64, 65, 19, 129, 23};
  return config;
}

// An unquantized source folder and its tensors.
struct Source {
  explicit Source(DType dtype = DType::kF32) {
    testing::WriteNativeModel(folder.path(), QuantizedConfig(), dtype);
    spec = ParseNativeConfig(QuantizedConfig().dump())->spec;
    tensors = testing::RandomTensors(spec, dtype);
  }
  TempFolder folder;
  ModelSpec spec;
  std::vector<RawTensor> tensors;

  const fs::path& path() const { return folder.path(); }
};

HostTensor AsHostTensor(const RawTensor& t) {
  const DType dtype = t.dtype == "F32"   ? DType::kF32
                      : t.dtype == "F16" ? DType::kF16
                                         : DType::kBF16;
  return {t.bytes.data(), dtype, t.shape, nullptr};
}

std::set<std::string> NamesIn(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

TEST(QuantizeFolder, HoldsTheIntegersOfARun) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Source source(dtype);
    for (const Quantization type : kTypes) {
      SCOPED_TRACE(std::string(Name(dtype)) + " to " + std::string(Name(type)));
      TempFolder parent;
      const auto written = QuantizeFolder(source.path(), parent.path() / "new", type);
      ASSERT_TRUE(written.ok()) << written.status();
      EXPECT_EQ(NamesIn(parent.path()), std::set<std::string>{"new"});
      auto checkpoint = LoadCheckpoint(parent.path() / "new");
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      WeightSource& weights = *checkpoint->weights;
      EXPECT_TRUE(CheckQuantizedData(checkpoint->spec, weights).ok());
      EXPECT_EQ(weights.StoredQuantization(), type);
      EXPECT_EQ(weights.DominantDType(), dtype);
      EXPECT_EQ(written->bytes, checkpoint->weight_bytes);
      EXPECT_LT(written->bytes, written->source_bytes);
      const ModelSummary summary = Summarize(checkpoint->spec);
      if (dtype == DType::kBF16) {
        EXPECT_EQ(written->source_bytes, summary.WeightBytes(DType::kBF16));
        const auto& sizes = summary.quantized_bytes;
        EXPECT_EQ(std::count(sizes.begin(), sizes.end(), std::pair(type, written->bytes)), 1);
      }
      int matrices = 0;
      for (const RawTensor& raw : source.tensors) {
        SCOPED_TRACE(raw.name);
        const HostTensor original = AsHostTensor(raw);
        const Quantization q = QuantizationOf(raw.name, raw.shape, type);
        const auto numbers = weights.Get(raw.name, raw.shape);
        ASSERT_TRUE(numbers.ok()) << numbers.status();
        for (const Quantization asked : kTypes) {
          const auto integers = weights.GetQuantized(raw.name, raw.shape, asked);
          ASSERT_TRUE(integers.ok()) << integers.status();
          EXPECT_EQ(integers->has_value(), q == asked);
        }
        if (q == Quantization::kNone) {
          EXPECT_EQ(numbers->dtype, dtype);
          EXPECT_EQ(std::memcmp(numbers->data, raw.bytes.data(), raw.bytes.size()), 0);
          continue;
        }
        ++matrices;
        const QuantizedMatrix m = **weights.GetQuantized(raw.name, raw.shape, q);
        EXPECT_EQ(numbers->dtype, DType::kF32);
        const int64_t columns = raw.shape[1];
        std::vector<float> row(static_cast<size_t>(columns));
        std::vector<int8_t> values(static_cast<size_t>(QuantRowValues(q, columns)));
        std::vector<F16> scales(static_cast<size_t>(QuantScales(q, columns)));
        const std::vector<double> elements = ElementsOf(m);
        for (int64_t r = 0; r < raw.shape[0]; ++r) {
          for (int64_t c = 0; c < columns; ++c) {
            row[static_cast<size_t>(c)] = ElementAsF32(original, r * columns + c);
          }
          QuantizeRow(q, row, values.data(), scales.data());
          for (int64_t c = 0; c < columns; ++c) {
            ASSERT_EQ(m.value(r, c), values[static_cast<size_t>(c)]);
            const double element = elements[static_cast<size_t>(r * columns + c)];
            ASSERT_EQ(element, ElementOf(q, columns, values.data(), scales.data(), c));
            ASSERT_NEAR(ElementAsF32(*numbers, r * columns + c), element,
                        std::fabs(element) * 0x1p-23);
          }
        }
      }
      EXPECT_GT(matrices, 20);
    }
  }
}

// The scales have type F16 and here more bytes than all other tensors, but they must not make F16
// the dominant type of the weights.
TEST(QuantizeFolder, ScalesDoNotDecideTheType) {
  Json config = QuantizedConfig();
  config["feed_forward"][0]["routing"]["widths"] = 1600;
  config["tie_word_embeddings"] = true;
  TempFolder source, parent;
  testing::WriteNativeModel(source.path(), config, DType::kBF16);
  ASSERT_TRUE(QuantizeFolder(source.path(), parent.path() / "new", Quantization::kInt4).ok());
  const auto checkpoint = LoadCheckpoint(parent.path() / "new");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->weights->DominantDType(), DType::kBF16);
}

TEST(QuantizeFolder, CopiesTheOtherFiles) {
  const Source source;
  WriteFile(source.path() / "generation_config.json", "{ \"top_k\":  3 }");
  WriteFile(source.path() / "tokenizer_config.json", "{\"eos_token\": \"<|endoftext|>\"}\n\n");
  WriteFile(source.path() / "chat_template.jinja", "{{ messages[0].content }}");
  WriteFile(source.path() / "notes.txt", "not part of a model");
  TempFolder parent;
  fs::create_directory(parent.path() / "empty");
  ASSERT_TRUE(
      QuantizeFolder(source.path(), parent.path() / "empty" / "", Quantization::kInt8).ok());
  const fs::path made = parent.path() / "empty";
  for (const char* name : {"generation_config.json", "tokenizer_config.json", "tokenizer.json",
                           "chat_template.jinja"}) {
    EXPECT_EQ(ReadFile(made / name), ReadFile(source.path() / name)) << name;
  }
  EXPECT_FALSE(fs::exists(made / "notes.txt"));
  Json config = Json::parse(ReadFile(made / "config.json"));
  EXPECT_EQ(config["quantization"], (Json{{"type", "int8"}, {"group_size", 64}}));
  config.erase("quantization");
  EXPECT_EQ(config, QuantizedConfig());
}

TEST(QuantizeFolder, IntegersAreCopiedOrRoundedAgain) {
  const Source source(DType::kBF16);
  TempFolder parent;
  const fs::path int8 = parent.path() / "int8", int4 = parent.path() / "int4";
  ASSERT_TRUE(QuantizeFolder(source.path(), int8, Quantization::kInt8).ok());
  const auto again = QuantizeFolder(int8, parent.path() / "again", Quantization::kInt8);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->source_type, Quantization::kInt8);
  for (const char* file : {"model.safetensors", "config.json"}) {
    EXPECT_EQ(ReadFile(parent.path() / "again" / file), ReadFile(int8 / file));
  }
  ASSERT_TRUE(QuantizeFolder(int8, int4, Quantization::kInt4).ok());
  EXPECT_EQ(LoadCheckpoint(int4)->weights->StoredQuantization(), Quantization::kInt4);
  // The LM head is int8 in both folders and must keep its integers and scales.
  const auto head = [](const fs::path& folder) {
    const auto matrix = LoadCheckpoint(folder)->weights->GetQuantized("head.weight", {288, 150},
                                                                      Quantization::kInt8);
    EXPECT_TRUE(matrix.ok() && matrix->has_value());
    return matrix->value_or(QuantizedMatrix());
  };
  const QuantizedMatrix before = head(int8), after = head(int4);
  ASSERT_EQ(before.rows, 288);
  ASSERT_EQ(after.rows, 288);
  EXPECT_EQ(std::memcmp(before.values, after.values, 288 * 150), 0);
}

TEST(QuantizeFolder, RefusesAFolderWithFiles) {
  const Source source;
  TempFolder parent;
  WriteFile(parent.path() / "file", "x");
  EXPECT_TRUE(Mentions(QuantizeFolder(source.path(), parent.path(), Quantization::kInt8).status(),
                       {"expected no such folder or an empty one, found one with files"}));
  EXPECT_TRUE(
      Mentions(QuantizeFolder(source.path(), parent.path() / "file", Quantization::kInt8).status(),
               {"expected no such folder or an empty one, found a file"}));
  EXPECT_TRUE(Mentions(QuantizeFolder(source.path(), source.path(), Quantization::kInt4).status(),
                       {"with files"}));
  EXPECT_FALSE(
      QuantizeFolder(source.path(), parent.path() / "no" / "parent", Quantization::kInt8).ok());
  EXPECT_EQ(NamesIn(parent.path()), std::set<std::string>{"file"});
  EXPECT_EQ(ReadFile(parent.path() / "file"), "x");
}

TEST(QuantizeFolder, RefusesWhatNoIntegerStandsFor) {
  struct QuantizedCase {
    const char* tensor;
    float value;
    std::vector<std::string> expect;
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<QuantizedCase> cases = {
      {"blocks.0.feed_forward.experts.6.down.weight",
       std::nanf(""),
       {"row 74, column 128", "magnitude at most 65504, found NaN"}},
      {"head.weight", -kInfinity, {"row 287, column 149", "found an infinite value"}},
      {"blocks.1.attention.experts.3.q.weight", 65505.0f, {"found 65505"}},
      {"norm.weight", kInfinity, {"expected a finite number, found an infinite value"}},
      {"blocks.1.feed_forward.router.weight",
       std::nanf(""),
       {"expected a finite number, found NaN"}},
  };
  Source source;
  const std::vector<RawTensor> whole = source.tensors;
  for (const QuantizedCase& c : cases) {
    SCOPED_TRACE(c.tensor);
    std::vector<RawTensor> tensors = whole;
    for (RawTensor& t : tensors) {
      if (t.name != c.tensor) continue;
      std::memcpy(t.bytes.data() + t.bytes.size() - 4, &c.value, 4);
    }
    WriteFile(source.path() / "model.safetensors", SafetensorsBytes(tensors));
    for (const Quantization type : kTypes) {
      TempFolder parent;
      const auto made = QuantizeFolder(source.path(), parent.path() / "new", type);
      EXPECT_TRUE(Mentions(made.status(), {"tensor \"" + std::string(c.tensor) + "\""}));
      EXPECT_TRUE(Mentions(made.status(), c.expect));
      EXPECT_TRUE(NamesIn(parent.path()).empty()) << "nothing is left behind";
    }
  }
}

// Simulates a full disk by a limit on the size of files.
TEST(QuantizeFolder, LeavesNothingBehindWhereThereIsNoRoom) {
  const Source source;
  TempFolder parent;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = limit;
  small.rlim_cur = 64 << 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto made = QuantizeFolder(source.path(), parent.path() / "new", Quantization::kInt8);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(Mentions(made.status(), {"model.safetensors: cannot write: "}));
  EXPECT_TRUE(NamesIn(parent.path()).empty());
}

// Returns the tensors of a file in the order of their data.
std::vector<RawTensor> TensorsIn(const fs::path& file) {
  const std::string bytes = ReadFile(file);
  uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof(size));
  std::vector<RawTensor> tensors;
  const auto parsed = ParseSafetensorsHeader(bytes.substr(8, size), bytes.size() - 8 - size);
  for (const TensorEntry& entry : parsed->tensors) {
    tensors.push_back({entry.name, std::string(Name(entry.type)), entry.shape,
                       bytes.substr(8 + size + entry.begin, entry.end - entry.begin)});
  }
  return tensors;
}

TEST(SafetensorsOfIntegers, AreAligned) {
  const Source source(DType::kBF16);
  TempFolder parent;
  ASSERT_TRUE(QuantizeFolder(source.path(), parent.path() / "new", Quantization::kInt4).ok());
  const std::string bytes = ReadFile(parent.path() / "new" / "model.safetensors");
  uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof(size));
  EXPECT_EQ((8 + size) % 64, 0u);
  const auto parsed = ParseSafetensorsHeader(bytes.substr(8, size), bytes.size() - 8 - size);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  for (const TensorEntry& entry : parsed->tensors) {
    EXPECT_EQ(entry.begin % static_cast<uint64_t>(SizeOf(entry.type)), 0u) << entry.name;
  }
}

// Files of other programs may have scales at odd offsets.
TEST(SafetensorsOfIntegers, NeedNotBeAligned) {
  const Source source;
  TempFolder parent;
  const fs::path made = parent.path() / "new";
  for (const Quantization type : kTypes) {
    fs::remove_all(made);
    ASSERT_TRUE(QuantizeFolder(source.path(), made, type).ok());
    auto before = LoadCheckpoint(made);
    std::vector<RawTensor> tensors = TensorsIn(made / "model.safetensors");
    // Integers come first: a tensor with an odd number of bytes precedes the scales.
    std::reverse(tensors.begin(), tensors.end());
    const fs::path other = parent.path() / "other";
    fs::remove_all(other);
    fs::copy(made, other);
    std::string header = testing::SafetensorsHeader(tensors);
    header.append(header.size() % 2 == 0 ? 1 : 0, ' ');
    WriteFile(other / "model.safetensors",
              SafetensorsBytes(header, testing::SafetensorsData(tensors)));
    auto after = LoadCheckpoint(other);
    ASSERT_TRUE(after.ok()) << after.status();
    for (const RawTensor& raw : source.tensors) {
      const Quantization q = QuantizationOf(raw.name, raw.shape, type);
      if (q == Quantization::kNone) continue;
      const auto a = *before->weights->GetQuantized(raw.name, raw.shape, q);
      const auto b = *after->weights->GetQuantized(raw.name, raw.shape, q);
      ASSERT_EQ(ElementsOf(*a), ElementsOf(*b)) << raw.name;
    }
  }
}

TEST(SafetensorsOfIntegers, OutliveTheCheckpointAndTheFolder) {
  QuantizedMatrix matrix;
  {
    const Source source;
    TempFolder parent;
    ASSERT_TRUE(QuantizeFolder(source.path(), parent.path() / "new", Quantization::kInt8).ok());
    auto checkpoint = LoadCheckpoint(parent.path() / "new");
    matrix = **checkpoint->weights->GetQuantized("head.weight", {288, 150}, Quantization::kInt8);
  }
  int sum = 0;
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t c = 0; c < matrix.columns; ++c) sum += std::abs(matrix.value(r, c));
  }
  EXPECT_GT(sum, 288 * 150);
  EXPECT_TRUE(std::isfinite(ElementsOf(matrix).back()));
}

// A quantized folder, which test cases damage.
class DamagedFolder {
 public:
  explicit DamagedFolder(Quantization type) {
    const Source source;
    EXPECT_TRUE(QuantizeFolder(source.path(), path(), type).ok());
    config = Json::parse(ReadFile(path() / "config.json"));
    tensors = TensorsIn(path() / "model.safetensors");
  }

  fs::path path() const { return parent_.path() / "model"; }
  RawTensor& Tensor(std::string_view name) {
    for (RawTensor& t : tensors) {
      if (t.name == name) return t;
    }
    ADD_FAILURE() << "no tensor " << name;
    return tensors[0];
  }
  // Returns the status of the loader or, if the loader accepts the folder, of the check of the
  // integers.
  absl::Status Check() {
    WriteFile(path() / "config.json", config.dump());
    WriteFile(path() / "model.safetensors", SafetensorsBytes(tensors));
    const auto checkpoint = LoadCheckpoint(path());
    MOESERVE_RETURN_IF_ERROR(checkpoint.status());
    return CheckQuantizedData(checkpoint->spec, *checkpoint->weights);
  }

  Json config;
  std::vector<RawTensor> tensors;

 private:
  TempFolder parent_;
};

struct QuantizedCase {
  const char* name;
  Quantization type;
  std::function<void(DamagedFolder&)> damage;
  std::vector<std::string> expect;
};

// Long because it is a table.
std::vector<QuantizedCase> QuantizedCases() {
  constexpr auto kInt8 = Quantization::kInt8;
  constexpr auto kInt4 = Quantization::kInt4;
  constexpr auto kInt4K = Quantization::kInt4K;
  const std::string q = "blocks.0.attention.q.weight", scales = q + "_scale";  // [16, 150]
  const std::string wide = "blocks.0.feed_forward.experts.4.down.weight";      // [75, 65]
  return {
      {"nothing", kInt8, [](DamagedFolder&) {}, {}},
      {"nothing", kInt4, [](DamagedFolder&) {}, {}},
      {"nothing", kInt4K, [](DamagedFolder&) {}, {}},
      // Damage to the configuration.
      {"unknown type",
       kInt8,
       [](DamagedFolder& f) { f.config["quantization"]["type"] = "int3"; },
       {"config.json: quantization.type: expected \"int8\", \"int8-channel\", \"int4\" or "
        "\"int4-k\", found \"int3\""}},
      {"no type",
       kInt8,
       [](DamagedFolder& f) { f.config["quantization"].erase("type"); },
       {"config.json: quantization.type: ", "\"int8\", \"int8-channel\", \"int4\" or \"int4-k\""}},
      {"no group",
       kInt8,
       [](DamagedFolder& f) { f.config["quantization"].erase("group_size"); },
       {"config.json: quantization.group_size: "}},
      {"another group",
       kInt8,
       [](DamagedFolder& f) { f.config["quantization"]["group_size"] = 32; },
       {"config.json: quantization.group_size: expected 64 (type is \"int8\"), found 32"}},
      {"another group",
       kInt4,
       [](DamagedFolder& f) { f.config["quantization"]["group_size"] = 64; },
       {"config.json: quantization.group_size: expected 32 (type is \"int4\"), found 64"}},
      {"a group that is no integer",
       kInt4,
       [](DamagedFolder& f) { f.config["quantization"]["group_size"] = "32"; },
       {"config.json: quantization.group_size: expected an integer, found \"32\""}},
      {"unknown key",
       kInt8,
       [](DamagedFolder& f) { f.config["quantization"]["bits"] = 8; },
       {"config.json: quantization.bits: ", "unknown key"}},
      {"no object",
       kInt8,
       [](DamagedFolder& f) { f.config["quantization"] = "int8"; },
       {"config.json: quantization: expected an object"}},
      {"the key is missing",
       kInt8,
       [](DamagedFolder& f) { f.config.erase("quantization"); },
       {"expected dtype F32, F16 or BF16 (config.json: quantization is absent), found I8", "more"}},
      {"the other type",
       kInt8,
       [](DamagedFolder& f) {
         f.config["quantization"] = {{"type", "int4"}, {"group_size", 32}};
       },
       {"expected dtype U8", "quantization.type is \"int4\"", "found I8"}},
      {"numbers instead of integers",
       kInt8,
       [q](DamagedFolder& f) {
         f.Tensor(q).dtype = "F16";
         f.Tensor(q).bytes.resize(16 * 150 * 2);
       },
       {"model.safetensors: tensor \"" + q + "\": expected dtype I8",
        "quantization.type is \"int8\"", "found F16"}},
      // Wrong shapes and types, missing and left-over tensors.
      {"missing scales",
       kInt8,
       [scales](DamagedFolder& f) {
         std::erase_if(f.tensors, [&](const RawTensor& t) { return t.name == scales; });
       },
       {"tensor \"" + scales + "\" is missing: expected shape [16, 3]", "64 columns in a group",
        "attention[0].num_heads * attention[0].head_dim, hidden_size",
        "quantization.type is \"int8\""}},
      {"missing integers",
       kInt4,
       [q](DamagedFolder& f) {
         std::erase_if(f.tensors, [&](const RawTensor& t) { return t.name == q; });
       },
       {"tensor \"" + q + "\" is missing: expected shape [16, 75]", "two columns in a byte"}},
      {"a byte for each int4",
       kInt4,
       [q](DamagedFolder& f) {
         f.Tensor(q).shape = {16, 150};
         f.Tensor(q).bytes.resize(16 * 150);
       },
       {"tensor \"" + q + "\": expected shape [16, 75]", "two columns in a byte",
        "found [16, 150]"}},
      {"a scale too few",
       kInt4,
       [scales](DamagedFolder& f) {
         f.Tensor(scales).shape = {16, 4};
         f.Tensor(scales).bytes.resize(16 * 4 * 2);
       },
       {"tensor \"" + scales + "\": expected shape [16, 5]", "32 columns in a group",
        "found [16, 4]"}},
      {"scales in f32",
       kInt8,
       [scales](DamagedFolder& f) {
         f.Tensor(scales).dtype = "F32";
         f.Tensor(scales).bytes.resize(16 * 3 * 4);
       },
       {"tensor \"" + scales + "\": expected dtype F16", "found F32"}},
      {"scales in bf16",
       kInt8,
       [scales](DamagedFolder& f) { f.Tensor(scales).dtype = "BF16"; },
       {"tensor \"" + scales + "\": expected dtype F16", "found BF16"}},
      {"unsigned int8",
       kInt8,
       [q](DamagedFolder& f) { f.Tensor(q).dtype = "U8"; },
       {"tensor \"" + q + "\": expected dtype I8", "found U8"}},
      {"signed int4",
       kInt4,
       [q](DamagedFolder& f) { f.Tensor(q).dtype = "I8"; },
       {"tensor \"" + q + "\": expected dtype U8", "found I8"}},
      {"an int4 head",
       kInt4,
       [](DamagedFolder& f) { f.Tensor("head.weight").dtype = "U8"; },
       {"tensor \"head.weight\": expected dtype I8", "quantization.type is \"int4\"", "found U8"}},
      {"a router of integers",
       kInt8,
       [](DamagedFolder& f) {
         RawTensor& t = f.Tensor("blocks.1.feed_forward.router.weight");
         t.dtype = "I8";
         t.bytes.resize(t.bytes.size() / 4);
       },
       {"\"blocks.1.feed_forward.router.weight\": expected dtype F32, F16 or BF16 (no "
        "quantization of this tensor), found I8"}},
      {"scales of a router",
       kInt8,
       [](DamagedFolder& f) {
         f.tensors.push_back({"blocks.1.feed_forward.router.weight_scale", "F16", {1}, "ab"});
       },
       {"\"blocks.1.feed_forward.router.weight_scale\": expected no such tensor (config.json: "
        "quantization leaves this weight as it is), found shape [1]"}},
      {"scales of nothing",
       kInt8,
       [](DamagedFolder& f) {
         f.tensors.push_back({"a.weight_scale", "F16", {1}, "ab"});
       },
       {"\"a.weight_scale\": expected no such tensor", "no key of the configuration"}},
      // Damage to the data.
      {"-128",
       kInt8,
       [q](DamagedFolder& f) { f.Tensor(q).bytes[2 * 150 + 7] = '\x80'; },
       {"model.safetensors: tensor \"" + q +
        "\": row 2, column 7: expected an integer in [-127, 127], found -128"}},
      {"-128 at the end",
       kInt8,
       [](DamagedFolder& f) { f.Tensor("head.weight").bytes.back() = '\x80'; },
       {"tensor \"head.weight\": row 287, column 149: "}},
      {"-128 in the head",
       kInt4,
       [](DamagedFolder& f) { f.Tensor("head.weight").bytes.front() = '\x80'; },
       {"tensor \"head.weight\": row 0, column 0: "}},
      {"NaN scale",
       kInt8,
       [scales](DamagedFolder& f) { f.Tensor(scales).bytes.replace(8, 2, "\x01\x7e"); },
       {"model.safetensors: tensor \"" + scales +
        "\": row 1, column 1: expected a finite number, found NaN"}},
      {"infinite scale",
       kInt4,
       [scales](DamagedFolder& f) {
         std::string& bytes = f.Tensor(scales).bytes;
         bytes.replace(bytes.size() - 2, 2, std::string("\x00\xfc", 2));
       },
       {"tensor \"" + scales +
        "\": row 15, column 4: expected a finite number, found an infinite one"}},
      {"a minimum unit above 17",
       kInt4K,
       [scales](DamagedFolder& f) { f.Tensor(scales).bytes.replace(14, 2, "\x80\x4c"); },
       {"model.safetensors: tensor \"" + scales +
        "\": row 3, column 1: expected an integer in [0, 17], found 18"}},
      {"a minimum unit that is no integer",
       kInt4K,
       [scales](DamagedFolder& f) {
         f.Tensor(scales).bytes.replace(14, 2, std::string("\x00\x3e", 2));
       },
       {"row 3, column 1: expected an integer in [0, 17], found 1.5"}},
      {"a negative minimum unit",
       kInt4K,
       [scales](DamagedFolder& f) {
         f.Tensor(scales).bytes.replace(14, 2, std::string("\x00\xbc", 2));
       },
       {"row 3, column 1: expected an integer in [0, 17], found -1"}},
      {"a byte for 32 columns too few",
       kInt4K,
       [q](DamagedFolder& f) {
         f.Tensor(q).shape = {16, 79};
         f.Tensor(q).bytes.resize(16 * 79);
       },
       {"tensor \"" + q + "\": expected shape [16, 80]", "then a byte for 32 columns",
        "found [16, 79]"}},
      {"values of attention in 4 bits",
       kInt4K,
       [](DamagedFolder& f) { f.Tensor("blocks.0.attention.v.weight").dtype = "U8"; },
       {"tensor \"blocks.0.attention.v.weight\": expected dtype I8",
        "quantization.type is \"int4-k\"", "found U8"}},
      {"bits after the last column",
       kInt4,
       [wide](DamagedFolder& f) {
         char& byte = f.Tensor(wide).bytes[4 * 33 - 1];
         byte = static_cast<char>(byte | 0x30);
       },
       {"tensor \"" + wide +
        "\": row 3, column 32: expected zero in the high bits (the row has 65 columns), found 3"}},
  };
}

TEST(DamagedIntegers, AreRefusedByName) {
  for (const QuantizedCase& c : QuantizedCases()) {
    SCOPED_TRACE(std::string(c.name) + ", " + std::string(Name(c.type)));
    DamagedFolder folder(c.type);
    c.damage(folder);
    const absl::Status status = folder.Check();
    if (c.expect.empty()) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_TRUE(Mentions(status, c.expect));
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    }
    EXPECT_LT(testing::Message(status).size(), 4000u);
  }
}

// With random bytes in the file, it is refused, or every matrix can be read and is in range.
TEST(DamagedIntegers, AnyByteMayBeWrong) {
  for (const Quantization type : kTypes) {
    const DamagedFolder folder(type);
    const std::string good = ReadFile(folder.path() / "model.safetensors");
    uint64_t state = 7;
    const auto below = [&](uint64_t bound) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return (state >> 33) % bound;
    };
    int accepted = 0;
    for (int i = 0; i < 300; ++i) {
      std::string bytes = good;
      for (uint64_t edits = 1 + below(3); edits > 0; --edits) {
        // Every third edit is in the header.
        const uint64_t bound = below(3) == 0 ? 12000 : bytes.size();
        bytes[below(bound)] = static_cast<char>(below(256));
      }
      WriteFile(folder.path() / "model.safetensors", bytes);
      auto checkpoint = LoadCheckpoint(folder.path());
      if (!checkpoint.ok()) continue;
      const absl::Status status = CheckQuantizedData(checkpoint->spec, *checkpoint->weights);
      bool all_read = true;
      for (const TensorRequirement& t : RequiredTensors(checkpoint->spec)) {
        const auto numbers = checkpoint->weights->Get(t.name, t.shape);
        all_read = all_read && numbers.ok();
        if (!numbers.ok() || QuantizationOf(t.name, t.shape, type) == Quantization::kNone) continue;
        for (int64_t e = 0; e < numbers->size(); ++e) {
          ASSERT_TRUE(std::isfinite(ElementAsF32(*numbers, e))) << t.name;
        }
      }
      EXPECT_EQ(status.ok(), all_read) << status;
      accepted += all_read ? 1 : 0;
    }
    EXPECT_GT(accepted, 100);
    EXPECT_LT(accepted, 300);
  }
}

}  // namespace
}  // namespace moeserve
