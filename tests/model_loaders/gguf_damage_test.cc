// Damaged, hostile and unsupported GGUF files. Each is a valid file with one change, and must be
// refused with a message that names the file, the field, the expected and the found value.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/tokenizer/gguf_tokenizer.h"
#include "tests/model_loaders/gguf_bytes.h"
#include "tests/model_loaders/support.h"
#include "tests/model_loaders/torch_bytes.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

struct Damage {
  std::string name;
  std::function<void(GgufParts&)> change;
  std::vector<std::string> mentions;
};

void PrintTo(const Damage& d, std::ostream* out) { *out << d.name; }

std::string Good(const std::string& name) {
  return ReadFile(std::string(MOESERVE_GGUF_DIR) + "/" + name + ".gguf");
}

// Returns the peak memory of the process so far, in KiB.
long PeakMemory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

constexpr long kAllowedGrowth = 64 * 1024;

// Files may demand no more memory than their size justifies.
class Bounded : public ::testing::TestWithParam<Damage> {
 protected:
  void SetUp() override { before_ = PeakMemory(); }
  void TearDown() override { EXPECT_LT(PeakMemory(), before_ + kAllowedGrowth); }

  // Refuses the file as a whole and names it.
  void ExpectRefused(std::string_view bytes) {
    WriteFile(folder_.path() / "a.gguf", bytes);
    const auto checkpoint = LoadCheckpoint(folder_.path() / "a.gguf", {.require_tokenizer = false});
    std::vector<std::string> mentions = GetParam().mentions;
    mentions.push_back("a.gguf: ");
    EXPECT_TRUE(Mentions(checkpoint.status(), mentions));
  }

  TempFolder folder_;

 private:
  long before_ = 0;
};

// ---- the whole file

class GgufBytesDamage : public Bounded {};

TEST_P(GgufBytesDamage, IsRefused) {
  GgufParts parts = PartsOf(Good("models/qwen3-moe-bf16"));
  GetParam().change(parts);
  ExpectRefused(GgufBytes(parts));
}

void Swap(GgufParts& parts, size_t key, GgufKey with) { parts.keys[key] = std::move(with); }

std::string Array(uint32_t type, uint64_t count, const std::string& items) {
  return Number(type, 4) + Number(count, 8) + items;
}

INSTANTIATE_TEST_SUITE_P(
    Header, GgufBytesDamage,
    ::testing::Values(
        Damage{"Magic",
               [](GgufParts& p) { p.magic = "GGML"; },
               {"header: expected \"GGUF\", found \"GGML\""}},
        Damage{"VersionZero",
               [](GgufParts& p) { p.version = 0; },
               {"version: expected 2 or 3, found 0"}},
        Damage{"VersionOne",
               [](GgufParts& p) { p.version = 1; },
               {"version: expected 2 or 3, found 1"}},
        Damage{"VersionFour",
               [](GgufParts& p) { p.version = 4; },
               {"version: expected 2 or 3, found 4"}},
        Damage{"BigEndian",
               [](GgufParts& p) { p.version = 0x03000000; },
               {"version: expected a little-endian file, found a big-endian one"}},
        Damage{"TensorsHuge",
               [](GgufParts& p) { p.tensor_count = kHuge; },
               {"number of tensors: expected at most 1048576, found 18446744073709551615"}},
        Damage{"TensorsMany", [](GgufParts& p) { p.tensor_count = 1 << 20; }, {"tensor "}},
        Damage{"OneTensorMore",
               [](GgufParts& p) { ++*(p.tensor_count = p.tensors.size()); },
               {"tensor ", "expected", "found"}},
        Damage{"OneTensorLess",
               [](GgufParts& p) { --*(p.tensor_count = p.tensors.size()); },
               {"expected", "found"}},
        Damage{"NoTensors",
               [](GgufParts& p) { p.tensor_count = 0; },
               {"data: expected 0 bytes (the end of the last tensor), found"}},
        Damage{"KeysHuge",
               [](GgufParts& p) { p.key_count = kHuge; },
               {"number of keys: expected at most 65536, found 18446744073709551615"}},
        Damage{"OneKeyMore",
               [](GgufParts& p) { ++*(p.key_count = p.keys.size()); },
               {"expected", "found"}},
        Damage{"OneKeyLess",
               [](GgufParts& p) { --*(p.key_count = p.keys.size()); },
               {"tensor ", "expected", "found"}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Metadata, GgufBytesDamage,
    ::testing::Values(
        Damage{"KeyLong",
               [](GgufParts& p) { Swap(p, 1, GgufU32(std::string(65'536, 'k'), 1)); },
               {"metadata: key 1: expected a length of at most 65535 bytes, found 65536"}},
        Damage{"KeyEmpty",
               [](GgufParts& p) { Swap(p, 1, GgufU32("", 1)); },
               {"metadata: key 1: expected at least one character, found none"}},
        Damage{"KeyTwice",
               [](GgufParts& p) { p.keys.push_back(p.keys[2]); },
               {"metadata: \"", "expected the key once, found it twice"}},
        Damage{"TypeUnknown",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 13, Number(0, 8)});
               },
               {"metadata: \"k\": type: expected a number in [0, 12], found 13"}},
        Damage{"BoolTwo",
               [](GgufParts& p) { Swap(p, 0, GgufBool("k", 2)); },
               {"metadata: \"k\": expected 0 or 1 for a bool, found 2"}},
        Damage{"BoolItem",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 9, Array(7, 2, "\x01\xff")});
               },
               {"metadata: \"k\": expected 0 or 1 for a bool, found 255"}},
        Damage{"StringLong",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 8, Number(kHuge, 8)});
               },
               {"metadata: \"k\": expected a length of at most", "found 18446744073709551615"}},
        Damage{"StringBeyond",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 8, Number(uint64_t{1} << 40, 8)});
               },
               {"metadata: \"k\": expected a length of at most", "found 1099511627776"}},
        Damage{"ArrayOfArrays",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 9, Array(9, 1, Array(4, 0, ""))});
               },
               {"metadata: \"k\": expected an array of numbers or strings, found one of arrays"}},
        Damage{
            "ArrayHuge",
            [](GgufParts& p) {
              Swap(p, 0, {"k", 9, Array(4, kHuge, "")});
            },
            {"metadata: \"k\": number of items: expected at most", "found 18446744073709551615"}},
        Damage{"ArrayOfStringsHuge",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 9, Array(8, uint64_t{1} << 40, "")});
               },
               {"metadata: \"k\": number of items: expected at most", "found 1099511627776"}},
        Damage{"ArrayBytesHuge",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 9, Array(0, uint64_t{1} << 32, "")});
               },
               {"metadata: \"k\": number of items: expected at most", "found 4294967296"}},
        Damage{"ArrayType",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 9, Array(99, 1, "")});
               },
               {"metadata: \"k\": type of the items: expected a number in [0, 12], found 99"}},
        Damage{"ArrayItemBeyond",
               [](GgufParts& p) {
                 Swap(p, 0, {"k", 9, Array(8, 1, Number(kHuge - 8, 8))});
               },
               {"metadata: \"k\"[0]: item: expected a length of at most"}},
        Damage{"AlignmentZero",
               [](GgufParts& p) { p.Set(GgufU32("general.alignment", 0)); },
               {"\"general.alignment\": expected a power of two up to 65536, found 0 (u32)"}},
        Damage{"AlignmentOdd",
               [](GgufParts& p) { p.Set(GgufU32("general.alignment", 24)); },
               {"\"general.alignment\": expected a power of two", "found 24 (u32)"}},
        Damage{"AlignmentHuge",
               [](GgufParts& p) { p.Set(GgufU32("general.alignment", 0x80000000)); },
               {"\"general.alignment\": expected a power of two", "found 2147483648 (u32)"}},
        Damage{"AlignmentText",
               [](GgufParts& p) { p.Set(GgufText("general.alignment", "32")); },
               {"\"general.alignment\": expected a power of two", "found \"32\""}},
        Damage{"AlignmentOther",
               [](GgufParts& p) { p.Set(GgufU32("general.alignment", 4096)); },
               {"tensor \"", "offset: expected", "alignment 4096), found"}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Tensors, GgufBytesDamage,
    ::testing::Values(
        Damage{"NameLong",
               [](GgufParts& p) { p.tensors[0].name = std::string(65, 'n'); },
               {"tensor 0: name: expected a length of at most 64 bytes, found 65"}},
        Damage{"NameEmpty",
               [](GgufParts& p) { p.tensors[3].name = ""; },
               {"tensor 3: name: expected at least one character, found none"}},
        Damage{"NameTwice",
               [](GgufParts& p) { p.tensors[3].name = p.tensors[2].name; },
               {"tensor \"", "expected the name once, found it twice"}},
        Damage{"NoDimensions",
               [](GgufParts& p) { p.tensors[0].shape.clear(); },
               {"number of dimensions: expected 1 to 4, found 0"}},
        Damage{"FiveDimensions",
               [](GgufParts& p) {
                 p.tensors[0].shape = {1, 1, 1, 1, 32};
               },
               {"number of dimensions: expected 1 to 4, found 5"}},
        Damage{"SizeZero",
               [](GgufParts& p) { p.tensors[0].shape[0] = 0; },
               {"shape: expected sizes of at least 1", "found a size of 0"}},
        Damage{"SizeHuge",
               [](GgufParts& p) { p.tensors[0].shape[0] = kHuge; },
               {"shape: expected sizes", "found a size of 18446744073709551615"}},
        Damage{"ProductHuge",
               [](GgufParts& p) {
                 p.tensors[0].shape = {uint64_t{1} << 32, uint64_t{1} << 32};
               },
               {"shape: expected sizes", "at most 2^60 elements"}},
        Damage{"TypeRemoved",
               [](GgufParts& p) { p.tensors[0].type = 4; },
               {"type: expected F32, F16", "found the unknown number 4"}},
        Damage{"TypeUnknown",
               [](GgufParts& p) { p.tensors[0].type = 0xFFFFFFFF; },
               {"type: expected F32, F16", "found the unknown number 4294967295"}},
        Damage{"TypeUnsupported",
               [](GgufParts& p) { p.tensors[0].type = 19; },
               {"type: expected F32, F16", "found IQ1_S"}},
        Damage{"TypeNvfp4",
               [](GgufParts& p) { p.tensors[0].type = 40; },
               {"type: expected F32, F16", "Q6_K or MXFP4, found NVFP4"}},
        Damage{"RowNoMxfp4Blocks",
               [](GgufParts& p) {
                 p.tensors[0].type = 39;
                 p.tensors[0].shape = {2, 48};
               },
               {"shape: expected rows of a multiple of 32 elements (MXFP4), found 48"}},
        Damage{"Mxfp4TooShort",
               [](GgufParts& p) {
                 p.tensors = {{"a", {4, 64}, 39, std::string(128, 'x')}};
               },
               {"tensor \"a\": expected 136 bytes (MXFP4 [4, 64]), found 128 "}},
        Damage{"RowNoBlocks",
               [](GgufParts& p) {
                 p.tensors[0].type = 12;
                 p.tensors[0].shape = {1, 32};
               },
               {"shape: expected rows of a multiple of 256 elements (Q4_K), found 32"}},
        Damage{"TypeWider",
               [](GgufParts& p) { p.Tensor("token_embd.weight").type = 0; },
               {"offset: expected"}},
        Damage{"OffsetUnaligned",
               [](GgufParts& p) { p.tensors[0].offset = 1; },
               {"offset: expected 0 (the start of the data, alignment 32), found 1"}},
        Damage{"OffsetHuge",
               [](GgufParts& p) { p.tensors[1].offset = kHuge - 31; },
               {"tensor \"", "offset: expected", "found"}},
        Damage{"OffsetOverlaps",
               [](GgufParts& p) { p.tensors[1].offset = 0; },
               {"tensor \"", "offset: expected", "found 0"}},
        Damage{"OffsetGap",
               [](GgufParts& p) { p.tensors.back().offset = uint64_t{1} << 30; },
               {"tensor \"", "offset: expected", "found 1073741824"}},
        Damage{"LastTooLong",
               [](GgufParts& p) { p.tensors.back().shape = {1 << 20}; },
               {"tensor \"", "expected", "to the end of the file"}},
        Damage{"DataAfter",
               [](GgufParts& p) { p.tensors.back().data += std::string(64, 'x'); },
               {"data: expected", "(the end of the last tensor), found"}}),
    [](const auto& info) { return info.param.name; });

// Every prefix of a file is refused, whatever it ends with.
TEST(GgufTruncated, IsRefused) {
  const std::string good = Good("models/qwen3-moe-bf16");
  ASSERT_TRUE(ParseGguf(good).ok());
  for (size_t size = 0; size < good.size(); size += size < 4000 ? 1 : 997) {
    const auto header = ParseGguf(std::string_view(good).substr(0, size));
    ASSERT_TRUE(Mentions(header.status(), {"expected", "found"})) << size;
  }
}

// ---- the model

class GgufModelDamage : public Bounded {};

TEST_P(GgufModelDamage, IsRefused) {
  GgufParts parts = PartsOf(Good("models/qwen3-moe-bf16"));
  GetParam().change(parts);
  const std::string bytes = GgufBytes(parts);
  ASSERT_TRUE(ParseGguf(bytes).ok()) << ParseGguf(bytes).status();
  ExpectRefused(bytes);
}

Damage Key(std::string name, GgufKey key, std::vector<std::string> mentions) {
  return {std::move(name), [key](GgufParts& p) { p.Set(key); }, std::move(mentions)};
}

Damage Without(std::string name, std::string key) {
  std::vector<std::string> mentions = {"metadata: " + key + ": expected", "found no such key"};
  return {std::move(name), [key](GgufParts& p) { p.Remove(key); }, std::move(mentions)};
}

INSTANTIATE_TEST_SUITE_P(
    Keys, GgufModelDamage,
    ::testing::Values(
        Key("Mamba", GgufText("general.architecture", "mamba"),
            {"metadata: general.architecture: expected \"afmoe\", \"bailingmoe2\", \"bailingmoe3\"",
             "\"t5\" or \"t5encoder\", found \"mamba\""}),
        Key("Gemma3n", GgufText("general.architecture", "gemma3n"),
            {"metadata: general.architecture: expected", "found \"gemma3n\""}),
        Key("ArchitectureNumber", GgufU32("general.architecture", 3),
            {"metadata", "general.architecture: expected a string, found 3 (u32)"}),
        Damage{"NoArchitecture",
               [](GgufParts& p) { p.Remove("general.architecture"); },
               {"metadata: general.architecture: expected \"afmoe\"", "found none"}},
        Key("Adapter", GgufText("general.type", "adapter"),
            {"metadata: general.type: expected \"model\", found \"adapter\""}),
        Without("NoLayers", "qwen3moe.block_count"),
        Without("NoHeads", "qwen3moe.attention.head_count"),
        Without("NoEps", "qwen3moe.attention.layer_norm_rms_epsilon"),
        Without("NoExperts", "qwen3moe.expert_count"),
        Without("NoSelected", "qwen3moe.expert_used_count"),
        Key("LayersZero", GgufU32("qwen3moe.block_count", 0),
            {"metadata: qwen3moe.block_count: expected an integer in [1, ", " tensors), found 0"}),
        Key("LayersHuge", GgufU32("qwen3moe.block_count", 0xFFFFFFFF),
            {"metadata: qwen3moe.block_count: expected an integer, found 4294967295 (u32)"}),
        Key("LayersMany", GgufU32("qwen3moe.block_count", 10'000),
            {"metadata: qwen3moe.block_count: expected an integer in [1, ",
             " tensors), found 10000"}),
        Key("LayersText", GgufText("qwen3moe.block_count", "2"),
            {"metadata: qwen3moe.block_count: expected an integer, found \"2\""}),
        Key("WidthOther", GgufU32("qwen3moe.embedding_length", 33),
            {"tensor \"token_embd.weight\": expected shape [96, 33] (metadata: "
             "[qwen3moe.vocab_size, qwen3moe.embedding_length]), found [96, 32]"}),
        Key("HeadsZero", GgufU32("qwen3moe.attention.head_count", 0),
            {"metadata: qwen3moe.attention.head_count: expected"}),
        Key("HeadsNoMultiple", GgufU32("qwen3moe.attention.head_count", 3),
            {"metadata: qwen3moe.attention.head_count", "expected"}),
        Key("HeadsOfLayers", GgufInts("qwen3moe.attention.head_count_kv", {1, 2}),
            {"qwen3moe.attention.head_count_kv: expected an integer, found an array of 2 i32"}),
        Key("ContextHuge", GgufU32("qwen3moe.context_length", 0x7FFFFFFF),
            {"metadata: qwen3moe.context_length: expected", "found 2147483647"}),
        Key("EpsNaN",
            GgufF32("qwen3moe.attention.layer_norm_rms_epsilon",
                    std::numeric_limits<float>::quiet_NaN()),
            {"qwen3moe.attention.layer_norm_rms_epsilon: expected a finite number"}),
        Key("ThetaNegative", GgufF32("qwen3moe.rope.freq_base", -1.0f),
            {"metadata: qwen3moe.rope.freq_base: expected", "found -1"}),
        Key("RotatedOdd", GgufU32("qwen3moe.rope.dimension_count", 3),
            {"metadata: qwen3moe.rope.dimension_count: expected"}),
        Key("Longrope", GgufText("qwen3moe.rope.scaling.type", "longrope"),
            {"qwen3moe.rope.scaling.type: expected \"none\", \"linear\" or \"yarn\", found "
             "\"longrope\""}),
        Key("YarnWithoutLength", GgufText("qwen3moe.rope.scaling.type", "yarn"),
            {"qwen3moe.rope.scaling.original_context_length: expected", "found no such key"}),
        Key("ValueLength", GgufU32("qwen3moe.attention.value_length", 4),
            {"qwen3moe.attention.value_length: expected", "found 4 (u32)"}),
        Key("Window", GgufU32("qwen3moe.attention.sliding_window", 128),
            {"qwen3moe.attention.sliding_window: expected 0, found 128 (u32), which this server "
             "does not support"}),
        Key("CausalNumber", GgufU32("qwen3moe.attention.causal", 1),
            {"qwen3moe.attention.causal: expected a bool, found 1 (u32)"}),
        Key("PoolingUnknown", GgufU32("qwen3moe.pooling_type", 5),
            {"qwen3moe.pooling_type: expected 0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank), "
             "found 5"}),
        Key("PoolingRank", GgufU32("qwen3moe.pooling_type", 4),
            {"qwen3moe.pooling_type: expected 1 (mean), 2 (cls) or 3 (last), found 4 (rank), but "
             "not two rows of cls.output.weight with the labels"}),
        Key("UnknownKey", GgufF32("qwen3moe.logit_scale", 2.0f),
            {"qwen3moe.logit_scale: expected no such key", "changes the model's answers"}),
        Key("ExpertsZero", GgufU32("qwen3moe.expert_count", 0),
            {"qwen3moe.expert_count: expected at least 1 expert", "found 0"}),
        Key("ExpertsHuge", GgufU32("qwen3moe.expert_count", 0x7FFFFFFF),
            {"qwen3moe.expert_count: expected", "found 2147483647"}),
        Key("ExpertsMore", GgufU32("qwen3moe.expert_count", 9),
            {"expected shape [9, ", "qwen3moe.expert_count"}),
        Key("SelectedMore", GgufU32("qwen3moe.expert_used_count", 60),
            {"metadata: qwen3moe.expert_used_count: expected", "found 60"}),
        Key("Gating", GgufU32("qwen3moe.expert_gating_func", 2),
            {"qwen3moe.expert_gating_func: expected 1, found 2 (u32)"}),
        Key("Groups", GgufU32("qwen3moe.expert_group_count", 4),
            {"qwen3moe.expert_group_count: expected 0, found 4 (u32)"}),
        Key("DenseLayers", GgufU32("qwen3moe.leading_dense_block_count", 1),
            {"qwen3moe.leading_dense_block_count: expected 0, found 1 (u32)"}),
        Key("VocabularyOther", GgufU32("qwen3moe.vocab_size", 97),
            {"tensor \"token_embd.weight\": expected shape [97, 32]"}),
        Key("BosOutside", GgufU32("tokenizer.ggml.bos_token_id", 96),
            {"metadata: tokenizer.ggml.bos_token_id: expected", "found 96"}),
        Key("EosNegative", {"tokenizer.ggml.eos_token_id", 5, Number(kHuge, 4)},
            {"metadata: tokenizer.ggml.eos_token_id: expected", "found -1"}),
        Key("Split", GgufU32("split.count", 2),
            {"expected a name that ends with -00001-of-00002.gguf"}),
        Key("SplitMany", GgufU32("split.count", 1'000'000),
            {"metadata: split.count: expected at most 10000, found 1000000"})),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Tensors, GgufModelDamage,
    ::testing::Values(
        Damage{"Missing",
               [](GgufParts& p) { p.tensors.erase(p.tensors.begin() + 5); },
               {"tensor \"blk.", "is missing: expected shape"}},
        Damage{"NoEmbedding",
               [](GgufParts& p) { p.Tensor("token_embd.weight").name = "other.weight"; },
               {"qwen3moe.vocab_size: expected an integer, found no such key"}},
        Damage{"Extra",
               [](GgufParts& p) {
                 p.tensors.push_back({"blk.0.extra", {1}, 0, "abcd"});
               },
               {"tensor \"blk.0.extra\": expected no such tensor (metadata: "}},
        Damage{"ExtraLayer",
               [](GgufParts& p) {
                 p.tensors.push_back({"blk.2.attn_norm.weight", {32}, 0, std::string(128, 'x')});
               },
               {"tensor \"blk.2.attn_norm.weight\": expected no such tensor (metadata: "
                "qwen3moe.block_count is 2"}},
        Damage{"Transposed",
               [](GgufParts& p) {
                 auto& shape = p.Tensor("blk.1.ffn_down_exps.weight").shape;
                 std::swap(shape[1], shape[2]);
               },
               {"tensor \"blk.1.ffn_down_exps.weight\": expected shape ["}},
        Damage{"Integers",
               [](GgufParts& p) {
                 auto& tensor = p.Tensor("blk.1.attn_q.weight");
                 tensor.type = 25;  // I16, as wide as BF16
               },
               {"tensor \"blk.1.attn_q.weight\": expected dtype F32, F16 or BF16, found I16"}},
        Damage{"Vector",
               [](GgufParts& p) {
                 auto& shape = p.Tensor("blk.0.attn_k.weight").shape;
                 shape = {shape[0] * shape[1]};
               },
               {"tensor \"blk.0.attn_k.weight\": expected shape ["}}),
    [](const auto& info) { return info.param.name; });

// ---- the tokenizer

struct TokenizerDamage : Damage {
  std::string file = "qwen2";
};

class GgufTokenizerDamage : public ::testing::TestWithParam<TokenizerDamage> {};

TEST_P(GgufTokenizerDamage, IsRefused) {
  GgufParts parts = PartsOf(Good("tokenizers/" + GetParam().file));
  GetParam().change(parts);
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  const auto file = GgufFile::Open(folder.path() / "a.gguf");
  ASSERT_TRUE(file.ok()) << file.status();
  const auto tokenizer = ReadGgufTokenizer(**file);
  const auto config = ReadGgufTokenizerConfig(**file);
  std::vector<std::string> mentions = GetParam().mentions;
  mentions.push_back("a.gguf: metadata: ");
  EXPECT_TRUE(Mentions(tokenizer.ok() ? config.status() : tokenizer.status(), mentions));
}

TokenizerDamage Token(std::string name, GgufKey key, std::vector<std::string> mentions,
                      std::string file = "qwen2") {
  return {Key(std::move(name), std::move(key), std::move(mentions)), std::move(file)};
}

INSTANTIATE_TEST_SUITE_P(
    Gguf, GgufTokenizerDamage,
    ::testing::Values(
        Token("Model", GgufText("tokenizer.ggml.model", "rwkv"),
              {R"(tokenizer.ggml.model: expected "llama", "t5", "gpt2", "bert" or "gemma4", found )"
               R"("rwkv")"}),
        Token("ModelNumber", GgufU32("tokenizer.ggml.model", 1),
              {"tokenizer.ggml.model: expected a string, found 1 (u32)"}),
        Token("PreTokenizer", GgufText("tokenizer.ggml.pre", "viking"),
              {"tokenizer.ggml.pre: expected one of \"afmoe\", \"bailingmoe\", ",
               "\"kimi-k2\", \"lfm2\", \"llama-bpe\"", "found \"viking\""}),
        Token("UnknownToken", GgufU32("tokenizer.ggml.unknown_token_id", 100'000),
              {"tokenizer.ggml.unknown_token_id: expected an id in [0, "}, "gemma4"),
        Token("NoMerges", GgufTexts("tokenizer.ggml.merges", {"a"}),
              {"tokenizer.ggml.merges[0]: expected two tokens with one space between them"},
              "gemma4"),
        Token("PreTokenizerDefault", GgufText("tokenizer.ggml.pre", "default"),
              {"tokenizer.ggml.pre: expected one of", "found \"default\""}),
        TokenizerDamage{{"NoPreTokenizer",
                         [](GgufParts& p) { p.Remove("tokenizer.ggml.pre"); },
                         {"tokenizer.ggml.pre: expected one of", "found none"}}},
        TokenizerDamage{{"NoTokens",
                         [](GgufParts& p) { p.Remove("tokenizer.ggml.tokens"); },
                         {"tokenizer.ggml.tokens: expected an array", "found no such key"}}},
        Token("TokensNumbers", GgufInts("tokenizer.ggml.tokens", {1, 2}),
              {"tokenizer.ggml.tokens: expected an array of 1 to", "found an array of 2 i32"}),
        Token("TokensEmpty", GgufTexts("tokenizer.ggml.tokens", {}),
              {"tokenizer.ggml.tokens: expected an array of 1 to", "found an array of 0"}),
        Token("TokensTwice", GgufTexts("tokenizer.ggml.tokens", std::vector<std::string>(428, "a")),
              {"tokenizer.ggml.tokens: "}),
        Token("TypesFew", GgufInts("tokenizer.ggml.token_type", {1}),
              {"tokenizer.ggml.token_type: expected an array of", "found an array of 1 i32"}),
        Token("TypesUnknown", GgufInts("tokenizer.ggml.token_type", std::vector<int32_t>(428, 7)),
              {"tokenizer.ggml.token_type[0]: expected a type from 1 to 6, found 7"}),
        Token("MergesNumbers", GgufInts("tokenizer.ggml.merges", {1}),
              {"tokenizer.ggml.merges: expected an array of strings"}),
        Token("MergeWithoutSpace", GgufTexts("tokenizer.ggml.merges", {"a b", "ab"}),
              {"tokenizer.ggml.merges[1]: expected two tokens with one space", "found \"ab\""}),
        Token("MergeUnknown", GgufTexts("tokenizer.ggml.merges", {"qq zz"}),
              {"tokenizer.ggml.tokens: merges[0]: expected tokens of the vocabulary"}),
        Token("AddBosNumber", GgufU32("tokenizer.ggml.add_bos_token", 1),
              {"tokenizer.ggml.add_bos_token: expected a bool, found 1 (u32)"}),
        Token("BosOutside", GgufU32("tokenizer.ggml.bos_token_id", 100'000),
              {"tokenizer.ggml.bos_token_id: expected an id in [0, ", "found 100000 (u32)"}),
        Token("TemplateBytes", GgufText("tokenizer.chat_template", "\xff"),
              {"tokenizer.chat_template: expected a template in UTF-8"}),
        Token("TemplateNumber", GgufU32("tokenizer.chat_template.tool", 1),
              {"tokenizer.chat_template.tool: expected a string, found 1 (u32)"}),
        TokenizerDamage{{"NoScores",
                         [](GgufParts& p) { p.Remove("tokenizer.ggml.scores"); },
                         {"tokenizer.ggml.scores: expected an array of", "found no such key"}},
                        "spm"},
        Token("ScoresFew", GgufFloats("tokenizer.ggml.scores", {1.0f}),
              {"tokenizer.ggml.scores: expected an array of", "found an array of 1 f32"}, "spm"),
        Token("ScoresNaN",
              GgufFloats("tokenizer.ggml.scores",
                         std::vector<float>(420, std::numeric_limits<float>::quiet_NaN())),
              {"tokenizer.ggml.tokens: piece 0", "its score is not finite"}, "spm"),
        Token("NoUnknown", GgufInts("tokenizer.ggml.token_type", std::vector<int32_t>(420, 1)),
              {"tokenizer.ggml.tokens: expected one piece of type UNKNOWN, found 0"}, "spm"),
        Token("CharacterMap", GgufInts("tokenizer.ggml.precompiled_charsmap", {1}),
              {"tokenizer.ggml.precompiled_charsmap: expected an array of bytes"}, "spm")),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moeserve::testing
