#include "model_loaders/files/torch/torch_file.h"

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "gtest/gtest.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/safetensors.h"
#include "model_loaders/files/weight_files.h"
#include "tests/model_loaders/support.h"
#include "tests/model_loaders/torch_bytes.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using testing::Mentions;
using testing::Number;
using testing::PickleDict;
using testing::PickleGlobal;
using testing::PickleInt;
using testing::PickleItem;
using testing::PickleTensor;
using testing::PickleTuple;
using testing::RawTensor;
using testing::StateDictBytes;
using testing::TempFolder;
using testing::TorchBytes;
using testing::WriteFile;
using Json = nlohmann::json;

const fs::path kData = MOESERVE_TORCH_FILES_DIR;

const TensorEntry* Find(const TensorFile& file, std::string_view name) {
  for (const TensorEntry& entry : file.tensors()) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

// The state dicts were written by two versions of PyTorch, which also wrote every tensor
// contiguously to a safetensors file.
TEST(TorchFile, ReadsTensorsAsPyTorchDoes) {
  for (const std::string version : {"1.13", "2.15"}) {
    const auto torch = TorchStateDict::Open(kData / ("state-" + version + ".pt"));
    ASSERT_TRUE(torch.ok()) << torch.status();
    const auto expected = SafetensorsFile::Open(kData / ("state-" + version + ".safetensors"));
    ASSERT_TRUE(expected.ok()) << expected.status();
    EXPECT_EQ((*torch)->tensors().size(), (*expected)->tensors().size());
    for (const TensorEntry& entry : (*expected)->tensors()) {
      SCOPED_TRACE(version + " " + entry.name);
      const TensorEntry* found = Find(**torch, entry.name);
      ASSERT_NE(found, nullptr);
      EXPECT_EQ(found->type, entry.type);
      EXPECT_EQ(found->shape, entry.shape);
      const auto data = (*torch)->Read(*found);
      ASSERT_TRUE(data.ok()) << data.status();
      EXPECT_EQ(data->bytes, (*expected)->Bytes(entry));
    }
  }
}

TEST(TorchFile, OnlyOtherLayoutsAreCopied) {
  const auto file = TorchStateDict::Open(kData / "state-2.15.pt");
  ASSERT_TRUE(file.ok()) << file.status();
  const auto data = [&](std::string_view name) {
    return (*file)->Read(*Find(**file, name))->bytes.data();
  };
  // views of one storage
  EXPECT_EQ(data("views.base"), data("views.tied"));
  EXPECT_EQ(data("views.row"), data("views.base") + (60 + 2 * 20) * 4);
  // The latest copy stays valid while another tensor is read, and is not made twice.
  const auto first = *(*file)->Read(*Find(**file, "views.transposed"));
  EXPECT_EQ(first.bytes.data(), data("views.transposed"));
  const std::string before(first.bytes);
  EXPECT_NE(first.bytes.data(), data("views.matrix"));
  EXPECT_EQ(first.bytes, before);
}

// The value of checkpoint() in tests/data/torch_files/make.py, in every protocol.
TEST(TorchFile, ReadsValuesOfEveryProtocol) {
  for (const std::string version : {"1.13", "2.15"}) {
    for (const int protocol : {1, 2, 3, 4, 5}) {
      const std::string name = Concat("checkpoint-", version, "-p", protocol, ".pt");
      SCOPED_TRACE(name);
      const auto file = TorchFile::Open(kData / name);
      ASSERT_TRUE(file.ok()) << file.status();
      const PickleValue& root = (*file)->root();
      EXPECT_TRUE(root.Get("cfg")->Is(PickleKind::kNone));
      const PickleValue& args = *root.Get("args");
      ASSERT_TRUE(args.IsCallOf("argparse", "Namespace"));
      const PickleValue& options = *args.state();
      EXPECT_EQ(options.Get("arch")->text, "lm");
      EXPECT_EQ(options.Get("decoder_embed_dim")->integer, 2);
      EXPECT_EQ(options.Get("dropout")->real, 0.1);
      EXPECT_EQ(ShowPickle(*options.Get("moe_top1_expert")), "False");
      EXPECT_EQ(options.Get("adam_betas")->items[1]->real, 0.98);
      EXPECT_EQ(options.Get("lr")->items[0]->real, 0.0005);
      EXPECT_EQ(options.Get("text")->text, "Kuchen mit Ü\n");
      const PickleValue& extra = *root.Get("extra_state");
      EXPECT_EQ(extra.Get("negative")->integer, -5);
      EXPECT_EQ(extra.Get("wide")->integer, int64_t{1} << 40);
      EXPECT_TRUE(extra.Get("huge")->Is(PickleKind::kBigInt));
      EXPECT_EQ(extra.Get("set")->items[0]->integer, 7);
      EXPECT_EQ(extra.Get("frozen")->items[0]->integer, 8);
      EXPECT_TRUE(extra.Get("dtype")->IsGlobal("torch", "float16"));
      EXPECT_TRUE(extra.Get("device")->IsCallOf("torch", "device"));
      EXPECT_TRUE(extra.Get("when")->IsCallOf("datetime", "timedelta"));
      const auto model = TorchStateDict::Make(**file, *root.Get("model"));
      ASSERT_TRUE(model.ok()) << model.status();
      ASSERT_EQ((*model)->tensors().size(), 2u);
      const TensorEntry& entry = (*model)->tensors()[1];
      EXPECT_EQ(entry.name, "decoder.output_projection.weight");
      EXPECT_EQ(entry.type, ElementType::kF16);
      EXPECT_EQ(entry.shape, (std::vector<int64_t>{4, 2}));
      // a path is no value of a state dict, but a record
      EXPECT_TRUE(Mentions(TorchStateDict::Make(**file, extra).status(),
                           {name + ": tensor \"epoch\"", "expected a tensor, found 3"}));
    }
  }
}

TEST(TorchFile, RefusesOtherFiles) {
  for (const char* name : {"legacy-1.13.pt", "legacy-2.15.pt"}) {
    EXPECT_TRUE(Mentions(TorchFile::Open(kData / name).status(),
                         {name, "PyTorch 1.6 or later", "torch.save(torch.load("}));
  }
  EXPECT_TRUE(TorchStateDict::Open(kData / "no-crc-2.15.pt").ok());
  TempFolder folder;
  const fs::path path = folder.path() / "a.bin";
  const auto open = [&](std::string_view bytes) {
    WriteFile(path, bytes);
    return TorchFile::Open(path).status();
  };
  EXPECT_EQ(TorchFile::Open(folder.path() / "none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Mentions(open(""), {"a.bin: ", "a zip archive", "0 bytes"}));
  EXPECT_TRUE(Mentions(open(std::string(100, 'x')), {"a.bin: ", "a zip archive"}));
  const std::string pickle = PickleDict({});
  EXPECT_TRUE(open(testing::ZipBytes({{"x/data.pkl", pickle}})).ok());
  EXPECT_TRUE(Mentions(open(testing::ZipBytes({{"data.pkl", pickle}})),
                       {"a.bin: ", "without an entry data.pkl in a folder"}));
  EXPECT_TRUE(Mentions(open(testing::ZipBytes({{"x/data.pkl", pickle}, {"y/data.pkl", pickle}})),
                       {"one entry data.pkl", "x/data.pkl", "y/data.pkl"}));
  EXPECT_TRUE(Mentions(open(testing::ZipBytes({{"x/data.pkl", pickle}, {"x/byteorder", "big"}})),
                       {"byteorder: expected \"little\", found \"big\""}));
  EXPECT_TRUE(
      Mentions(open(testing::ZipBytes({{"x/data.pkl", pickle}, {"x/constants.pkl", pickle}})),
               {"TorchScript"}));
  EXPECT_TRUE(Mentions(open(TorchBytes(PickleGlobal("os", "system") + ")R.", {})),
                       {"a.bin: data.pkl: byte 12: REDUCE: ", "os.system"}));
  std::string damaged = TorchBytes(pickle, {});
  damaged[damaged.find(pickle)] ^= 1;
  EXPECT_TRUE(Mentions(open(damaged), {"a.bin: zip entry \"archive/data.pkl\"", "CRC"}));
}

// A state dict with one tensor "t" whose value is `value`, and one storage of 24 bytes.
absl::Status StateDictOf(const std::string& value) {
  TempFolder folder;
  WriteFile(folder.path() / "a.bin",
            TorchBytes(PickleDict({{"t", value}}), {std::string(24, 'x')}));
  return TorchStateDict::Open(folder.path() / "a.bin").status();
}

TEST(TorchFile, RefusesTensorsThatDoNotFit) {
  const int64_t large = int64_t{1} << 62;
  EXPECT_TRUE(StateDictOf(PickleTensor("FloatStorage", "0", 6, 0, {2, 3}, {3, 1})).ok());
  EXPECT_TRUE(StateDictOf(PickleTensor("FloatStorage", "0", 6, 5, {1, 1}, {large, large})).ok());
  EXPECT_TRUE(StateDictOf(PickleTensor("FloatStorage", "0", 6, 0, {0, large}, {large, 1})).ok());
  EXPECT_TRUE(StateDictOf(PickleTensor("DoubleStorage", "0", 3, 2, {}, {})).ok());
  const struct {
    const char* name;
    std::string value;
    std::vector<std::string> expect;
  } cases[] = {
      {"one too far",
       PickleTensor("FloatStorage", "0", 6, 1, {2, 3}, {3, 1}),
       {"among the 6 of its storage", "[2, 3]", "from element 1"}},
      {"scalar beyond", PickleTensor("FloatStorage", "0", 6, 6, {}, {}), {"from element 6"}},
      {"stride", PickleTensor("FloatStorage", "0", 6, 0, {2, 3}, {4, 1}), {"strides [4, 1]"}},
      {"overflow of a product",
       PickleTensor("FloatStorage", "0", 6, 0, {large}, {large}),
       {"among the 6"}},
      {"overflow of a sum",
       PickleTensor("FloatStorage", "0", 6, 0, {3, 3}, {large, large}),
       {"among the 6"}},
      {"expanded",
       PickleTensor("FloatStorage", "0", 6, 0, {large, large}, {0, 0}),
       {"tensor \"t\"", "at most 16777216 bytes", "not contiguous"}},
      {"expanded a little",
       PickleTensor("FloatStorage", "0", 6, 0, {int64_t{1} << 23}, {0}),
       {"at most 16777216 bytes", "[8388608]"}},
      {"negative size",
       PickleTensor("FloatStorage", "0", 6, 0, {-1}, {1}),
       {"shape: ", "[0, 2^63)", "found -1"}},
      {"negative stride",
       PickleTensor("FloatStorage", "0", 6, 5, {2}, {-1}),
       {"strides: ", "found -1"}},
      {"negative first",
       PickleTensor("FloatStorage", "0", 6, -1, {2}, {1}),
       {"first element: ", "found -1"}},
      {"dimensions",
       PickleTensor("FloatStorage", "0", 6, 0, {2, 3}, {1}),
       {"strides: expected 2", "found 1"}},
      {"33 dimensions",
       PickleTensor("FloatStorage", "0", 6, 0, std::vector<int64_t>(33, 1),
                    std::vector<int64_t>(33, 1)),
       {"at most 32 integers"}},
      {"lying count",
       PickleTensor("FloatStorage", "0", 7, 0, {2}, {1}),
       {"storage \"0\"", "7 times 4 bytes, found 24"}},
      {"lying type", PickleTensor("DoubleStorage", "0", 6, 0, {2}, {1}), {"6 times 8", "found 24"}},
      {"large count", PickleTensor("FloatStorage", "0", large, 0, {2}, {1}), {"found 24"}},
      {"no storage",
       PickleTensor("FloatStorage", "7", 6, 0, {2}, {1}),
       {"\"data/7\"", "found none"}},
      {"path as key", PickleTensor("FloatStorage", "../data/0", 6, 0, {2}, {1}), {"found none"}},
      {"complex",
       PickleTensor("ComplexFloatStorage", "0", 3, 0, {2}, {1}),
       {"type: ", "torch.ComplexFloatStorage"}},
      {"quantized",
       PickleGlobal("torch._utils", "_rebuild_qtensor") + ")R",
       {"a plain tensor", "torch._utils._rebuild_qtensor"}},
      {"no arguments",
       PickleGlobal("torch._utils", "_rebuild_tensor_v2") + ")R",
       {"6 arguments", "0 values"}},
      {"a parameter of nothing",
       PickleGlobal("torch._utils", "_rebuild_parameter") + "N\x85R",
       {"a plain tensor"}},
      {"storage is no reference",
       PickleGlobal("torch._utils", "_rebuild_tensor_v2") +
           PickleTuple({"N", PickleInt(0), ")", ")", "\x89", "}"}) + "R",
       {"storage: ", "found None"}},
      {"a number", PickleInt(3), {"expected a tensor, found 3"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    const absl::Status status = StateDictOf(c.value);
    EXPECT_TRUE(Mentions(status, {"a.bin: tensor \"t\": "}));
    EXPECT_TRUE(Mentions(status, c.expect));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(TorchFile, StateDictsMayHaveExtraState) {
  TempFolder folder;
  const fs::path path = folder.path() / "a.bin";
  WriteFile(path, TorchBytes(PickleDict({{"layer._extra_state", "N"}}), {}));
  const auto file = TorchStateDict::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE((*file)->tensors().empty());
  WriteFile(path, TorchBytes("].", {}));
  EXPECT_TRUE(Mentions(TorchStateDict::Open(path).status(), {"a.bin: ", "a dict", "a list"}));
  WriteFile(path, TorchBytes("}NNs.", {}));
  EXPECT_TRUE(Mentions(TorchStateDict::Open(path).status(), {"a.bin: ", "names", "None"}));
}

// A folder whose weights are moved to pytorch_model.bin.
class TorchFolder : public TempFolder {
 public:
  explicit TorchFolder(DType dtype = DType::kF32) {
    testing::WriteNativeModel(path(), testing::TinyConfig(), dtype);
    tensors_ = testing::RandomTensors(LoadCheckpoint(path())->spec, dtype);
    fs::remove(path() / "model.safetensors");
  }
  const std::vector<RawTensor>& tensors() const { return tensors_; }

  void WriteWhole() const { WriteFile(path() / "pytorch_model.bin", StateDictBytes(tensors_)); }
  // Writes two shards and an index, to which `total` is added.
  void WriteShards(const Json& total = 5) const {
    Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", Json::object()}};
    std::vector<RawTensor> shards[2];
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const size_t shard = i % 2;
      shards[shard].push_back(tensors_[i]);
      index["weight_map"][tensors_[i].name] = Name(shard);
    }
    for (const size_t shard : {0, 1})
      WriteFile(path() / Name(shard), StateDictBytes(shards[shard]));
    WriteFile(path() / "pytorch_model.bin.index.json", index.dump());
  }
  static std::string Name(size_t shard) {
    return Concat("pytorch_model-0000", shard + 1, "-of-00002.bin");
  }

  // Expects that the folder's weights are tensors().
  void ExpectWeights() const {
    auto checkpoint = LoadCheckpoint(path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    for (const RawTensor& tensor : tensors_) {
      const auto loaded = checkpoint->weights->Get(tensor.name, tensor.shape);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      EXPECT_EQ(std::memcmp(loaded->data, tensor.bytes.data(), tensor.bytes.size()), 0)
          << tensor.name;
    }
  }

 private:
  std::vector<RawTensor> tensors_;
};

TEST(TorchFolder, HasTheWeightsOfTheSafetensorsFile) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const TorchFolder folder(dtype);
    folder.WriteWhole();
    folder.ExpectWeights();
    EXPECT_EQ(LoadCheckpoint(folder.path())->weights->DominantDType(), dtype);
  }
}

TEST(TorchFolder, ReadsShards) {
  const TorchFolder folder;
  for (const Json& total : {Json(5), Json(1.5), Json("?")}) {
    folder.WriteShards(total);
    folder.ExpectWeights();
  }
  fs::remove(folder.path() / TorchFolder::Name(1));
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(),
                       {"pytorch_model.bin.index.json: ", TorchFolder::Name(1), "found none"}));
  fs::remove(folder.path() / "pytorch_model.bin.index.json");
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(), {"shards, but no index"}));
}

TEST(TorchFolder, RefusesShardsThatDisagreeWithTheIndex) {
  const TorchFolder folder;
  folder.WriteShards();
  folder.WriteWhole();
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(),
                       {"pytorch_model.bin or pytorch_model.bin.index.json, found both"}));
  fs::remove(folder.path() / "pytorch_model.bin");
  WriteFile(folder.path() / "pytorch_model-00003-of-00003.bin", "x");
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(),
                       {"pytorch_model-00003-of-00003.bin", "no weight file beside"}));
  fs::remove(folder.path() / "pytorch_model-00003-of-00003.bin");
  fs::copy(folder.path() / TorchFolder::Name(0), folder.path() / TorchFolder::Name(1),
           fs::copy_options::overwrite_existing);
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(), {"expected it in one file"}));
}

TEST(TorchFolder, SafetensorsArePreferred) {
  const TorchFolder folder;
  WriteFile(folder.path() / "pytorch_model.bin", "not even a zip archive");
  EXPECT_FALSE(LoadCheckpoint(folder.path()).ok());
  WriteFile(folder.path() / "model.safetensors", testing::SafetensorsBytes(folder.tensors()));
  folder.ExpectWeights();
}

TEST(TorchFolder, ChecksNamesAndShapes) {
  const TorchFolder folder;
  std::vector<RawTensor> tensors = folder.tensors();
  tensors[0].shape = {tensors[0].shape[1], tensors[0].shape[0]};
  tensors[1].name = "other";
  WriteFile(folder.path() / "pytorch_model.bin", StateDictBytes(tensors));
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(),
                       {"pytorch_model.bin: tensor ", "expected shape [288, 16]", "found shape",
                        "\"other\"", "is missing"}));
}

// Transposed and tied weights give the same model as contiguous ones.
TEST(TorchFolder, ReadsTransposedAndSharedStorages) {
  const TorchFolder folder;
  std::vector<PickleItem> items;
  std::vector<std::string> storages;
  for (const RawTensor& tensor : folder.tensors()) {
    const bool matrix = tensor.shape.size() == 2;
    const int64_t rows = tensor.shape[0];
    const int64_t columns = matrix ? tensor.shape[1] : 1;
    // Three elements come first in every storage. Matrices are stored column by column.
    std::string storage(12, 'x');
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < rows; ++r) {
        storage += tensor.bytes.substr(static_cast<size_t>(r * columns + c) * 4, 4);
      }
    }
    const std::vector<int64_t> strides =
        matrix ? std::vector<int64_t>{1, rows} : std::vector<int64_t>{1};
    items.push_back({tensor.name, PickleTensor("FloatStorage", Concat(storages.size()),
                                               rows * columns + 3, 3, tensor.shape, strides)});
    storages.push_back(std::move(storage));
  }
  WriteFile(folder.path() / "pytorch_model.bin", TorchBytes(PickleDict(items), storages));
  folder.ExpectWeights();
}

}  // namespace
}  // namespace moeserve
