// Tests that the files of synthetic models hold the same models.
#include "tests/bench/synthetic/synthetic_files.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "engine/spec/weights.h"
#include "kernels/base/host_tensor.h"
#include "model_loaders/architectures/native/write_config.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/bench/synthetic_model.h"
#include "server/bench/synthetic_options.h"
#include "tests/support/native_model.h"

namespace moeserve::server {
namespace {

// Returns the spec for these command line flags, which replace defaults of a small shape.
ModelSpec TinyShape(const std::string& flags = "") {
  std::string line = flags;
  for (const auto& [flag, value] : {std::pair{"--synthetic", "small"},
                                    {"--hidden", "64"},
                                    {"--layers", "2"},
                                    {"--heads", "4"},
                                    {"--head-dim", "16"},
                                    {"--vocab", "300"},
                                    {"--experts", "8"},
                                    {"--widths", "32"}}) {
    const bool none =
        line.find("--attention routed") != std::string::npos && std::string(flag) == "--heads";
    const bool dense =
        line.find("--ff dense") != std::string::npos && std::string(flag) == "--experts";
    if (none || dense || line.find(std::string(flag) + " ") != std::string::npos) continue;
    line += std::string(" ") + flag + " " + value;
  }
  CLI::App app;
  SyntheticOptions options;
  AddSyntheticOptions(app, options);
  app.parse(line, false);
  const Result<ModelSpec> spec = BuildSyntheticSpec(options);
  EXPECT_TRUE(spec.ok()) << line << ": " << spec.status().message();
  return spec.ok() ? *spec : ModelSpec();
}

// A hybrid with four value heads, two for each key head.
ModelSpec TinyHybrid(const std::string& flags = "--hidden 256 --layers 4") {
  return TinyShape("--synthetic small-hybrid " + flags);
}

// How the values of a file may differ from those of the synthetic model.
enum class Stored {
  kSame,     // not at all
  kWidened,  // some are f32 instead of bf16
  kRounded   // all are bf16
};

void ExpectSameModel(const std::filesystem::path& path, ModelSpec spec, Stored stored) {
  Result<Checkpoint> read = LoadCheckpoint(path, {});
  ASSERT_TRUE(read.ok()) << read.status().message();
  // Formats have tokens of other names.
  read->spec.bos_token_id = spec.bos_token_id;
  read->spec.pad_token_id = spec.pad_token_id;
  spec.eos_token_ids = {256};
  EXPECT_EQ(NativeConfigJson(read->spec).dump(2), NativeConfigJson(spec).dump(2));
  const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    SCOPED_TRACE(t.name);
    const Result<HostTensor> made = weights->Get(t.name, t.shape);
    const Result<HostTensor> found = read->weights->Get(t.name, t.shape);
    ASSERT_TRUE(made.ok() && found.ok()) << found.status().message();
    if (stored == Stored::kSame) {
      ASSERT_EQ(made->dtype, found->dtype);
    }
    std::vector<float> expected = Widened(*made);
    if (stored == Stored::kRounded) {
      for (float& v : expected) v = F32FromBf16(Bf16FromF32(v));
    }
    ASSERT_EQ(Widened(*found), expected);
  }
}

TEST(SyntheticFiles, AFolderReadsBackAsTheSameModel) {
  for (const ModelSpec& spec : {TinyShape(), TinyShape("--widths 9,11,13,15 --top-p 0.5 --top-k 3"),
                                TinyShape("--split-heads 4 --score cosine"),
                                TinyShape("--attention routed --ff dense"), TinyHybrid()}) {
    const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
    const testing::TempFolder folder;
    const absl::Status status = testing::WriteNative(spec, *weights, folder.path());
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectSameModel(folder.path(), spec, Stored::kSame);
  }
}

TEST(SyntheticFiles, AHuggingFaceFolderReadsBackAsTheSameModel) {
  for (const ModelSpec& spec : {TinyShape(), TinyHybrid(), TinyHybrid("--hidden 128 --layers 4")}) {
    const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
    const testing::TempFolder folder;
    const absl::Status status = testing::WriteHuggingFace(spec, *weights, folder.path());
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectSameModel(folder.path(), spec, Stored::kRounded);
  }
}

TEST(SyntheticFiles, AGgufFileReadsBackAsTheSameModel) {
  for (const ModelSpec& spec : {TinyShape(), TinyShape("--ff dense"), TinyHybrid(),
                                TinyHybrid("--hidden 256 --layers 8 --kv-heads 2")}) {
    const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
    const testing::TempFolder folder;
    const auto path = folder.path() / "m.gguf";
    const absl::Status status = testing::WriteGguf(spec, *weights, "tiny", path);
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectSameModel(path, spec, Stored::kWidened);
  }
}

TEST(SyntheticFiles, GgufHoldsTheExpertsInTheirOrder) {
  const ModelSpec spec = TinyShape("--layers 1");
  const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
  const testing::TempFolder folder;
  const auto path = folder.path() / "m.gguf";
  const absl::Status status = testing::WriteGguf(spec, *weights, "tiny", path);
  ASSERT_TRUE(status.ok()) << status.message();
  const std::string file = testing::ReadFile(path);
  ASSERT_EQ(file.substr(0, 4), "GGUF");
  // An entry of the tensor table: name, number of dimensions, dimensions, type, offset.
  const std::string name = "blk.0.ffn_down_exps.weight";
  const size_t entry = file.find(name);
  ASSERT_NE(entry, std::string::npos);
  const auto u32 = [&](size_t at) {
    uint32_t v;
    std::memcpy(&v, file.data() + at, 4);
    return v;
  };
  const auto u64 = [&](size_t at) {
    uint64_t v;
    std::memcpy(&v, file.data() + at, 8);
    return v;
  };
  const size_t dims = entry + name.size();
  EXPECT_EQ(u32(dims), 3u);
  EXPECT_EQ(u64(dims + 4), 32u);   // fastest-varying: the inner width
  EXPECT_EQ(u64(dims + 12), 64u);  // hidden
  EXPECT_EQ(u64(dims + 20), 8u);   // experts
  EXPECT_EQ(u32(dims + 28), 30u);  // bf16
  const uint64_t offset = u64(dims + 32);
  EXPECT_EQ(offset % 32, 0u);
  // This tensor is the last in the file, so the begin of the data follows from the file's size.
  const size_t expert = 32 * 64 * 2;
  const size_t data = file.size() - 8 * expert - offset;
  EXPECT_EQ(data % 32, 0u);
  for (int e = 0; e < 8; ++e) {
    Result<HostTensor> made = weights->Get(
        "blocks.0.feed_forward.experts." + std::to_string(e) + ".down.weight", {64, 32});
    ASSERT_TRUE(made.ok());
    EXPECT_EQ(std::memcmp(file.data() + data + offset + e * expert, made->data, expert), 0) << e;
  }
}

TEST(SyntheticFiles, OtherFormatsRefuseWhatTheyCannotExpress) {
  const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
  const testing::TempFolder folder;
  for (const char* flags :
       {" --widths 8,16", " --split-heads 2", " --score cosine", " --top-p 0.5"}) {
    EXPECT_FALSE(testing::WriteGguf(TinyShape(flags), *weights, "x", folder.path() / "x").ok());
    EXPECT_FALSE(testing::WriteHuggingFace(TinyShape(flags), *weights, folder.path()).ok());
  }
  const ModelSpec few = TinyShape("--vocab 256");
  EXPECT_FALSE(testing::WriteNative(few, *weights, folder.path()).ok());
  EXPECT_FALSE(testing::WriteGguf(few, *weights, "x", folder.path() / "x").ok());
  EXPECT_FALSE(testing::WriteHuggingFace(few, *weights, folder.path()).ok());
  const ModelSpec dense = TinyShape("--ff dense --layers 1");
  EXPECT_FALSE(testing::WriteHuggingFace(dense, *weights, folder.path()).ok());
  for (const char* flags : {"--layers 4 --ff dense", "--layers 3", "--layers 4 --window 8",
                            "--layers 4 --widths 8,16"}) {
    const ModelSpec hybrid = TinyHybrid(flags);
    EXPECT_FALSE(testing::WriteGguf(hybrid, *weights, "x", folder.path() / "x").ok()) << flags;
    EXPECT_FALSE(testing::WriteHuggingFace(hybrid, *weights, folder.path()).ok()) << flags;
  }
}

}  // namespace
}  // namespace moeserve::server
