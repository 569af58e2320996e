#include "model_loaders/checkpoint/loader.h"

#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "tests/model_loaders/support.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using testing::Mentions;
using testing::RawTensor;
using testing::SafetensorsBytes;
using testing::TempFolder;
using testing::TinyConfig;
using testing::WriteFile;
using testing::WriteNativeModel;
using Json = nlohmann::json;

TEST(LoadCheckpoint, GivesTheWeightsAsTheyAreInTheFile) {
  TempFolder folder;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    WriteNativeModel(folder.path(), TinyConfig(), dtype);
    auto checkpoint = LoadCheckpoint(folder.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->weights->DominantDType(), dtype);
    for (const RawTensor& tensor : testing::RandomTensors(checkpoint->spec, dtype)) {
      const auto loaded = checkpoint->weights->Get(tensor.name, tensor.shape);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      EXPECT_EQ(loaded->dtype, dtype);
      EXPECT_EQ(loaded->shape, tensor.shape);
      EXPECT_EQ(std::memcmp(loaded->data, tensor.bytes.data(), tensor.bytes.size()), 0)
          << tensor.name;
    }
  }
}

TEST(LoadCheckpoint, TensorsOutliveTheCheckpointAndTheFolder) {
  HostTensor tensor;
  std::string expected;
  {
    TempFolder folder;
    WriteNativeModel(folder.path(), TinyConfig());
    auto checkpoint = LoadCheckpoint(folder.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    tensor = *checkpoint->weights->Get("embed.weight", {288, 16});
    expected = testing::RandomTensors(checkpoint->spec)[0].bytes;
  }
  EXPECT_EQ(std::memcmp(tensor.data, expected.data(), expected.size()), 0);
}

TEST(LoadCheckpoint, AskingForAnotherTensorIsAnInternalError) {
  TempFolder folder;
  WriteNativeModel(folder.path(), TinyConfig());
  auto checkpoint = LoadCheckpoint(folder.path());
  ASSERT_TRUE(checkpoint.ok());
  EXPECT_EQ(checkpoint->weights->Get("nothing", {1}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(checkpoint->weights->Get("embed.weight", {16, 288}).status().code(),
            absl::StatusCode::kInternal);
}

TEST(LoadCheckpoint, ReadsTheTokenizer) {
  TempFolder folder;
  WriteNativeModel(folder.path(), TinyConfig());
  const auto checkpoint = LoadCheckpoint(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_NE(checkpoint->tokenizer, nullptr);
  EXPECT_EQ(checkpoint->tokenizer->vocab_size(), 257);
  EXPECT_EQ(*checkpoint->tokenizer->Encode("ab", true), (std::vector<TokenId>{'a', 'b'}));
}

TEST(LoadCheckpoint, TokenizerMayBeAbsentWhenNotRequired) {
  TempFolder folder;
  WriteNativeModel(folder.path(), TinyConfig());
  fs::remove(folder.path() / "tokenizer.json");
  const auto required = LoadCheckpoint(folder.path());
  EXPECT_EQ(required.status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Mentions(required.status(), {"tokenizer.json"}));
  const auto checkpoint = LoadCheckpoint(folder.path(), {.require_tokenizer = false});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->tokenizer, nullptr);
}

TEST(LoadCheckpoint, JoinsTheIdsThatEndAGeneration) {
  TempFolder folder;
  Json config = TinyConfig();
  config["eos_token_id"] = {256, 3};
  WriteNativeModel(folder.path(), config);
  WriteFile(folder.path() / "generation_config.json",
            R"({"eos_token_id": [7, 3], "temperature": 0.7, "top_k": 5})");
  const auto checkpoint = LoadCheckpoint(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->eos_token_ids, (std::vector<TokenId>{256, 3, 7}));
  EXPECT_EQ(checkpoint->spec.eos_token_ids, (std::vector<int32_t>{256, 3}));
  EXPECT_EQ(checkpoint->generation.temperature, 0.7);
  EXPECT_EQ(checkpoint->generation.top_k, 5);
  EXPECT_FALSE(checkpoint->generation.top_p.has_value());
}

TEST(LoadCheckpoint, NamesTheFolder) {
  TempFolder folder;
  const fs::path model = folder.path() / "my-model";
  fs::create_directory(model);
  WriteNativeModel(model, TinyConfig());
  for (const fs::path& path : {model, model / "", model / "."}) {
    const auto checkpoint = LoadCheckpoint(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->directory_name, "my-model") << path;
  }
}

TEST(LoadCheckpoint, ReadsAConfigurationWithoutKeys) {
  TempFolder folder;
  WriteNativeModel(folder.path(), TinyConfig());
  const std::string state = LoadCheckpoint(folder.path())->identity.state;
  Json config = TinyConfig();
  config["odd"] = 1;
  config["a.b"] = 2;
  config["norm"] = {{"kind", "rms"}, {"shape", "round"}};
  config["feed_forward"][0]["extra"] = {{"deep", 1}};
  WriteFile(folder.path() / "config.json", config.dump());
  LoadOptions options;
  EXPECT_TRUE(
      Mentions(LoadCheckpoint(folder.path(), options).status(),
               {"--ignore-config odd", "--ignore-config a.b", "--ignore-config norm.shape"}));
  options.ignored_keys = {"odd", "a.b", "norm.shape", "not.there"};
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path(), options).status(),
                       {"--ignore-config feed_forward[0].extra"}));
  options.ignored_keys.push_back("feed_forward[0].extra");
  const auto checkpoint = LoadCheckpoint(folder.path(), options);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_FALSE(checkpoint->notes.empty());
  EXPECT_EQ(checkpoint->notes.back(),
            "config.json: read without these keys, as --ignore-config says: odd, a.b, norm.shape, "
            "not.there, feed_forward[0].extra");
  EXPECT_NE(checkpoint->identity.state.find("without odd"), std::string::npos);
  // A key that the model needs is missed.
  options.ignored_keys.push_back("hidden_size");
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path(), options).status(), {"hidden_size"}));
}

TEST(LoadCheckpoint, MixesDtypesAndFollowsTheLargerPart) {
  TempFolder folder;
  WriteNativeModel(folder.path(), TinyConfig());
  const ModelSpec spec = LoadCheckpoint(folder.path())->spec;
  std::vector<RawTensor> tensors = testing::RandomTensors(spec, DType::kBF16);
  const std::vector<RawTensor> wide = testing::RandomTensors(spec, DType::kF32);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].name.find("router") != std::string::npos) tensors[i] = wide[i];
  }
  WriteFile(folder.path() / "model.safetensors", SafetensorsBytes(tensors));
  const auto checkpoint = LoadCheckpoint(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->weights->DominantDType(), DType::kBF16);
  EXPECT_EQ(checkpoint->weights->Get("blocks.1.attention.router.weight", {4, 16})->dtype,
            DType::kF32);
}

// A folder with weights in two shards. Tests damage it.
class ShardedFolder {
 public:
  ShardedFolder() {
    WriteNativeModel(folder_.path(), TinyConfig());
    tensors_ = testing::RandomTensors(LoadCheckpoint(folder_.path())->spec);
    fs::remove(folder_.path() / "model.safetensors");
    uint64_t total = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const int shard = i < tensors_.size() / 2 ? 0 : 1;
      shards_[shard].push_back(tensors_[i]);
      index["weight_map"][tensors_[i].name] = kNames[shard];
      total += tensors_[i].bytes.size();
    }
    index["metadata"]["total_size"] = total;
    for (int shard : {0, 1}) {
      WriteFile(path() / kNames[shard], SafetensorsBytes(shards_[shard]));
    }
  }

  const fs::path& path() const { return folder_.path(); }
  const std::vector<RawTensor>& tensors() const { return tensors_; }
  Result<Checkpoint> Load() const {
    WriteFile(path() / "model.safetensors.index.json", index.dump());
    return LoadCheckpoint(path());
  }

  static constexpr const char* kNames[2] = {"model-00001-of-00002.safetensors",
                                            "model-00002-of-00002.safetensors"};
  Json index;

 private:
  TempFolder folder_;
  std::vector<RawTensor> tensors_;
  std::vector<RawTensor> shards_[2];
};

TEST(ShardedWeights, LoadLikeASingleFile) {
  ShardedFolder folder;
  auto checkpoint = folder.Load();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const RawTensor& tensor : folder.tensors()) {
    const auto loaded = checkpoint->weights->Get(tensor.name, tensor.shape);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(std::memcmp(loaded->data, tensor.bytes.data(), tensor.bytes.size()), 0);
  }
  folder.index.erase("metadata");
  EXPECT_TRUE(folder.Load().ok());
}

TEST(ShardedWeights, BothFormsAreRefused) {
  ShardedFolder folder;
  WriteFile(folder.path() / "model.safetensors", SafetensorsBytes(folder.tensors()));
  EXPECT_TRUE(Mentions(folder.Load().status(),
                       {"model.safetensors", "model.safetensors.index.json", "found both"}));
  fs::remove(folder.path() / "model.safetensors.index.json");
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(),
                       {"model-00001-of-00002.safetensors", "beside those of model.safetensors"}));
}

TEST(ShardedWeights, ShardsWithoutAnIndexAreRefused) {
  ShardedFolder folder;
  const auto checkpoint = LoadCheckpoint(folder.path());
  EXPECT_TRUE(Mentions(checkpoint.status(), {"found none", "shards, but no index"}));
}

TEST(ShardedWeights, AStrayShardIsRefused) {
  ShardedFolder folder;
  WriteFile(folder.path() / "model-00003-of-00003.safetensors", SafetensorsBytes("{}", ""));
  EXPECT_TRUE(Mentions(folder.Load().status(), {"model-00003-of-00003.safetensors"}));
}

TEST(ShardedWeights, ATensorInTwoShardsIsRefused) {
  ShardedFolder folder;
  WriteFile(folder.path() / ShardedFolder::kNames[1], SafetensorsBytes(folder.tensors()));
  EXPECT_TRUE(Mentions(folder.Load().status(),
                       {ShardedFolder::kNames[0], ShardedFolder::kNames[1], "in one file"}));
}

TEST(ShardedWeights, AWrongTotalSizeIsAWarning) {
  ShardedFolder folder;
  EXPECT_TRUE(folder.Load()->warnings.empty());
  for (const char* wrong : {"1", "-1", "1.5", "\"many\"", "null"}) {
    folder.index["metadata"]["total_size"] = nlohmann::json::parse(wrong);
    const auto checkpoint = folder.Load();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ASSERT_EQ(checkpoint->warnings.size(), 1u) << wrong;
    EXPECT_NE(checkpoint->warnings[0].find("model.safetensors.index.json: metadata.total_size"),
              std::string::npos)
        << checkpoint->warnings[0];
  }
}

TEST(ShardedWeights, LinksMustNotLeaveTheFolder) {
  ShardedFolder folder;
  TempFolder elsewhere;
  const fs::path shard = folder.path() / ShardedFolder::kNames[1];
  fs::rename(shard, folder.path() / "data");
  fs::create_symlink("data", shard);
  EXPECT_TRUE(folder.Load().ok());
  fs::copy_file(folder.path() / "data", elsewhere.path() / "secret");
  for (const fs::path& target :
       {elsewhere.path() / "secret", fs::path("..") / elsewhere.path().filename() / "secret"}) {
    fs::remove(shard);
    fs::create_symlink(target, shard);
    const absl::Status status = folder.Load().status();
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    EXPECT_TRUE(Mentions(status, {ShardedFolder::kNames[1], "link to", "/secret"}));
  }
  // A model folder may be reached through a link.
  fs::remove(shard);
  fs::create_symlink("data", shard);
  fs::create_directory_symlink(folder.path(), elsewhere.path() / "model");
  EXPECT_TRUE(LoadCheckpoint(elsewhere.path() / "model").ok());
}

TEST(ShardedWeights, TextsMustNotBeLinksToElsewhere) {
  ShardedFolder folder;
  TempFolder elsewhere;
  std::ofstream(elsewhere.path() / "secret") << "a secret";
  const fs::path link = folder.path() / "chat_template.jinja";
  fs::create_symlink(elsewhere.path() / "secret", link);
  const absl::Status status = folder.Load().status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_TRUE(Mentions(status, {"chat_template.jinja", "link to", "/secret"}));
}

TEST(ShardedWeights, IndexAndShardsMustAgree) {
  struct Case {
    const char* patch;  // a JSON patch (RFC 6902) of the index
    std::vector<std::string> expect;
  };
  const std::vector<Case> cases = {
      {R"([{"op": "remove", "path": "/weight_map"}])", {"weight_map: expected an object", "none"}},
      {R"([{"op": "replace", "path": "/weight_map", "value": {}}])", {"weight_map"}},
      {R"([{"op": "add", "path": "/extra", "value": 1}])", {"\"extra\" is unknown"}},
      {R"([{"op": "replace", "path": "/metadata", "value": 1}])",
       {"metadata: expected an object", "found 1"}},
      {R"([{"op": "replace", "path": "/weight_map/embed.weight", "value": "../x.safetensors"}])",
       {"weight_map[\"embed.weight\"]", "same folder", "found \"../x.safetensors\""}},
      {R"([{"op": "replace", "path": "/weight_map/embed.weight", "value": "/etc/passwd"}])",
       {"weight_map[\"embed.weight\"]", "found \"/etc/passwd\""}},
      {R"([{"op": "replace", "path": "/weight_map/embed.weight", "value": ".."}])",
       {"found \"..\""}},
      {R"([{"op": "replace", "path": "/weight_map/embed.weight", "value": "a\u0000b"}])",
       {"found \"a\\x00b\""}},
      {R"([{"op": "replace", "path": "/weight_map/embed.weight", "value": 7}])", {"found 7"}},
      {R"([{"op": "replace", "path": "/weight_map/embed.weight", "value": "none.safetensors"}])",
       {"expected the file \"none.safetensors\"", "found none"}},
      {R"([{"op": "replace", "path": "/weight_map/embed.weight",
            "value": "model-00002-of-00002.safetensors"}])",
       {"weight_map[\"embed.weight\"]", "expected the tensor in \"model-00002",
        "found it in \"model-00001"}},
      {R"([{"op": "add", "path": "/weight_map/ghost",
            "value": "model-00002-of-00002.safetensors"}])",
       {"weight_map[\"ghost\"]", "found it in no file"}},
      {R"([{"op": "remove", "path": "/weight_map/embed.weight"}])",
       {"expected an entry for tensor \"embed.weight\" of \"model-00001", "found none"}},
  };
  ShardedFolder folder;
  const Json whole = folder.index;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.patch);
    folder.index = whole.patch(Json::parse(c.patch));
    const auto checkpoint = folder.Load();
    EXPECT_TRUE(Mentions(checkpoint.status(), {"model.safetensors.index.json: "}));
    EXPECT_TRUE(Mentions(checkpoint.status(), c.expect));
  }
}

}  // namespace
}  // namespace moeserve
