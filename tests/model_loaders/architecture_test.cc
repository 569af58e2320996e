// Tests the interface of model_loaders/architectures with a family that exists in this test only.

#include "model_loaders/architectures/architecture.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/name_table.h"
#include "model_loaders/architectures/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/checkpoint/stored_parts.h"
#include "tests/model_loaders/made_up_family.h"
#include "tests/model_loaders/support.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using testing::Mentions;
using testing::ModelRunner;
using testing::RawTensor;
using testing::TempFolder;
using Json = nlohmann::json;

constexpr const Architecture* kFamilies[] = {&kNativeArchitecture, &testing::kMadeUpArchitecture};

LoadOptions WithFamily() { return {.require_tokenizer = false, .architectures = kFamilies}; }

std::string TensorBytesOf(const HostTensor& tensor) {
  return {static_cast<const char*>(tensor.data),
          static_cast<size_t>(tensor.size()) * SizeOf(tensor.dtype)};
}

constexpr int kLayers = 4;
constexpr int kExperts = 8;

// The bundled model "smoe" in the file layout of the made-up family. This class joins the tensors
// itself, without using the family's table.
class MadeUpFolder {
 public:
  MadeUpFolder() {
    auto native = LoadCheckpoint(Native());
    EXPECT_TRUE(native.ok()) << native.status();
    for (const TensorRequirement& tensor : RequiredTensors(native->spec)) {
      const auto data = native->weights->Get(tensor.name, tensor.shape);
      EXPECT_TRUE(data.ok()) << data.status();
      native_[tensor.name] = {tensor.name, data->dtype == DType::kF32 ? "F32" : "BF16",
                              tensor.shape, TensorBytesOf(*data)};
    }
    Add("model.embed_tokens.weight", {4096, 128}, {"embed.weight"});
    Add("model.norm.weight", {128}, {"norm.weight"});
    for (int i = 0; i < kLayers; ++i) AddLayer(i);
    config = {{"model_type", "made_up_moe"},
              {"architectures", {"MadeUpForCausalLM"}},
              {"torch_dtype", "bfloat16"},
              {"vocab_size", 4096},
              {"hidden_size", 128},
              {"intermediate_size", 128},
              {"num_hidden_layers", kLayers},
              {"num_attention_heads", 4},
              {"num_key_value_heads", 2},
              {"num_local_experts", kExperts},
              {"num_experts_per_tok", 2},
              {"max_position_embeddings", 8192},
              {"bos_token_id", 0},
              {"eos_token_id", 0},
              {"rope_theta", 10000},
              {"embedding_multiplier", 11.313708498984761},
              {"tie_word_embeddings", true}};
  }

  static fs::path Native() { return testing::SourcePath("deploy/models/smoe"); }
  const fs::path& path() const { return folder_.path(); }

  RawTensor& Tensor(const std::string& name) {
    for (RawTensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << "no tensor " << name;
    return tensors[0];
  }

  void Write() const {
    testing::WriteFile(path() / "config.json", config.dump());
    testing::WriteFile(path() / "model.safetensors", testing::SafetensorsBytes(tensors));
  }

  Result<Checkpoint> Load() const {
    Write();
    return LoadCheckpoint(path(), WithFamily());
  }

  Json config;
  std::vector<RawTensor> tensors;

 private:
  // Adds a tensor that consists of the tensors `sources` of the native folder, one after the other.
  void Add(const std::string& name, const std::vector<int64_t>& shape,
           const std::vector<std::string>& sources) {
    RawTensor tensor{name, native_.at(sources[0]).dtype, shape, ""};
    for (const std::string& source : sources) tensor.bytes += native_.at(source).bytes;
    tensors.push_back(std::move(tensor));
  }

  // Returns the bytes of the transpose of a matrix.
  static std::string Transposed(const RawTensor& matrix) {
    const size_t rows = static_cast<size_t>(matrix.shape[0]);
    const size_t columns = static_cast<size_t>(matrix.shape[1]);
    const size_t size = matrix.bytes.size() / (rows * columns);
    std::string bytes;
    for (size_t c = 0; c < columns; ++c) {
      for (size_t r = 0; r < rows; ++r)
        bytes += matrix.bytes.substr((r * columns + c) * size, size);
    }
    return bytes;
  }

  // Returns the bytes of a matrix whose rows are those of the upper and the lower half in turns.
  static std::string Interleaved(const RawTensor& matrix) {
    const size_t rows = static_cast<size_t>(matrix.shape[0]);
    const size_t size = matrix.bytes.size() / rows;
    std::string bytes;
    for (size_t r = 0; r < rows / 2; ++r) {
      bytes += matrix.bytes.substr(r * size, size);
      bytes += matrix.bytes.substr((r + rows / 2) * size, size);
    }
    return bytes;
  }

  void AddLayer(int i) {
    const std::string from = "blocks." + std::to_string(i) + ".";
    const std::string to = "model.layers." + std::to_string(i) + ".";
    const std::string moe = to + "block_sparse_moe.";
    Add(to + "input_layernorm.weight", {128}, {from + "attention.norm.weight"});
    Add(to + "self_attn.q_proj.weight", {128, 128}, {from + "attention.q.weight"});
    Add(to + "self_attn.kv_proj.weight", {128, 128},
        {from + "attention.k.weight", from + "attention.v.weight"});
    tensors.back().bytes = Interleaved(tensors.back());
    Add(to + "self_attn.o_proj.weight", {128, 128}, {from + "attention.o.weight"});
    tensors.back().bytes = Transposed(tensors.back());
    Add(to + "post_attention_layernorm.weight", {128}, {from + "feed_forward.norm.weight"});
    Add(moe + "gate.weight", {kExperts, 128}, {from + "feed_forward.router.weight"});
    std::vector<std::string> gate_and_up;
    for (int j = 0; j < kExperts; ++j) {
      const std::string expert = from + "feed_forward.experts." + std::to_string(j) + ".";
      gate_and_up.push_back(expert + "gate.weight");
      gate_and_up.push_back(expert + "up.weight");
      Add(moe + "experts." + std::to_string(j) + ".w2.weight", {128, 128},
          {expert + "down.weight"});
    }
    Add(moe + "input_linear.weight", {kExperts, 256, 128}, gate_and_up);
  }

  std::map<std::string, RawTensor> native_;
  TempFolder folder_;
};

TEST(Architecture, AFamilyGivesTheLogitsOfTheNativeFolder) {
  const MadeUpFolder folder;
  folder.Write();
  const std::vector<int32_t> tokens = {0, 17, 900, 33, 4095, 2, 2, 1208, 51, 700, 3};
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto native = ModelRunner::Load(MadeUpFolder::Native(), {.compute = compute});
    const auto other = ModelRunner::Load(folder.path(), {.compute = compute, .load = WithFamily()});
    ASSERT_TRUE(native.ok()) << native.status();
    ASSERT_TRUE(other.ok()) << other.status();
    const std::vector<float> expected = (*native)->Run(tokens, 4);
    const std::vector<float> found = (*other)->Run(tokens, 4);
    ASSERT_EQ(expected.size(), tokens.size() * 4096);
    ASSERT_EQ(found.size(), expected.size());
    EXPECT_EQ(std::memcmp(found.data(), expected.data(), expected.size() * sizeof(float)), 0);
  }
}

TEST(Architecture, EveryTensorIsTheOneOfTheNativeFolder) {
  const MadeUpFolder folder;
  auto native = LoadCheckpoint(MadeUpFolder::Native());
  auto other = folder.Load();
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->weights->DominantDType(), DType::kBF16);
  EXPECT_EQ(other->weights->StoredQuantization(), Quantization::kNone);
  EXPECT_EQ(other->weight_bytes, native->weight_bytes);
  for (const TensorRequirement& tensor : RequiredTensors(native->spec)) {
    const auto a = native->weights->Get(tensor.name, tensor.shape);
    const auto b = other->weights->Get(tensor.name, tensor.shape);
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_EQ(b->shape, tensor.shape);
    EXPECT_EQ(b->dtype, a->dtype);
    EXPECT_TRUE(TensorBytesOf(*b) == TensorBytesOf(*a)) << tensor.name;
  }
  for (const char* name : {"nothing", "blocks.0.feed_forward.experts.8.up.weight"}) {
    EXPECT_EQ(other->weights->Get(name, {128, 128}).status().code(), absl::StatusCode::kInternal);
  }
}

TEST(Architecture, AnUnknownFamilyIsNamedBesideThoseThatAreKnown) {
  MadeUpFolder folder;
  folder.Write();
  EXPECT_EQ(testing::Message(LoadCheckpoint(folder.path()).status()),
            "config.json: model_type: expected one of the " +
                std::to_string(Architectures().size()) +
                " model types in model_loaders/architectures/huggingface/README.md, found "
                "\"made_up_moe\"");
  const std::string known = "model_type: expected \"routed_decoder\" or \"made_up_moe\", found ";
  const std::map<std::string, std::string> cases = {
      {R"({"model_type": "no_such_family"})", known + "\"no_such_family\""},
      {R"({"model_type": null})", known + "null"},
      {R"({"model_type": ["made_up_moe"]})", known + "[\"made_up_moe\"]"},
      {R"({})", known + "no such key, and it has no default"},
      {R"([])", "expected an object, found "},
      {R"("made_up_moe")", "expected an object, found \"made_up_moe\""},
      {R"({"model_type": "made_up_moe", "model_type": "made_up_moe"})", "model_type"},
  };
  for (const auto& [text, expected] : cases) {
    const absl::Status status = ReadConfig(text, {}, kFamilies).status();
    EXPECT_TRUE(Mentions(status, {"config.json: ", expected})) << text;
    EXPECT_EQ(testing::Message(status).find('\n'), std::string::npos);
  }
  EXPECT_TRUE(LoadCheckpoint(MadeUpFolder::Native(), WithFamily()).ok());
}

TEST(Architecture, FaultsOfTheConfigurationNameTheKeysOfTheFile) {
  const std::vector<std::pair<Json, std::string>> cases = {
      {{{"num_experts_per_tok", 9}}, "num_experts_per_tok: expected an integer in [1, 8], found 9"},
      {{{"num_key_value_heads", 3}}, "num_key_value_heads: expected a divisor of "},
      {{{"num_hidden_layers", 2000000000}}, "num_hidden_layers: expected an integer in [1, 10000]"},
      {{{"num_local_experts", 2000000000}},
       "num_local_experts: expected an integer in [0, 32768] (num_hidden_layers is 4)"},
      {{{"intermediate_size", 0}}, "intermediate_size: expected an integer in [1, "},
      {{{"hidden_size", "big"}}, "hidden_size: expected an integer, found \"big\""},
      {{{"num_attention_heads", 0}, {"num_key_value_heads", 1}, {"head_dim", 4}},
       "num_attention_heads: expected "},
  };
  MadeUpFolder folder;
  const Json whole = folder.config;
  for (const auto& [change, expected] : cases) {
    folder.config = whole;
    folder.config.update(change);
    EXPECT_TRUE(Mentions(folder.Load().status(), {"config.json: " + expected})) << change;
  }
}

TEST(Architecture, FaultsOfTensorsNameWhatIsStored) {
  const std::string fused = "model.layers.2.block_sparse_moe.input_linear.weight";
  {
    MadeUpFolder folder;
    folder.Tensor(fused).shape = {kExperts, 128, 256};
    EXPECT_EQ(testing::Message(folder.Load().status()),
              "model.safetensors: tensor \"" + fused +
                  "\": expected shape [8, 256, 128] (config.json: [num_local_experts, 2 * "
                  "intermediate_size, hidden_size]; feed_forward.expert.form is \"gated\"), found "
                  "[8, 128, 256]");
  }
  {
    MadeUpFolder folder;
    folder.Tensor("model.layers.1.self_attn.kv_proj.weight").name = "elsewhere";
    EXPECT_TRUE(Mentions(
        folder.Load().status(),
        {"2 problems",
         "tensor \"model.layers.1.self_attn.kv_proj.weight\" is missing: expected shape [128, 128] "
         "(config.json: [2 * num_key_value_heads * attention.head_dim, hidden_size])",
         "tensor \"elsewhere\": expected no such tensor (config.json: no key of the"}));
  }
  {
    MadeUpFolder folder;
    folder.Tensor(fused).dtype = "I16";
    EXPECT_TRUE(Mentions(folder.Load().status(),
                         {fused + "\": expected dtype F32, F16 or BF16, found I16"}));
  }
}

TEST(Architecture, LeftOverTensorsAreExplainedOrIgnored) {
  const std::map<std::string, std::string> refused = {
      {"model.layers.0.block_sparse_moe.experts.8.w2.weight", "num_local_experts is 8"},
      {"model.layers.4.input_layernorm.weight", "num_hidden_layers is 4"},
      {"model.layers.0.block_sparse_moe.experts.08.w2.weight", "no key of the configuration"},
      {"model.layers.0.block_sparse_moe.experts.99999999999.w2.weight",
       "no key of the configuration"},
      {"embed.weight", "no key of the configuration"},
      {"model.layers.0.self_attn.rotary_emb.inv_freq.x", "no key of the configuration"}};
  for (const auto& [name, reason] : refused) {
    MadeUpFolder folder;
    folder.tensors.push_back({name, "F32", {1}, std::string(4, '\0')});
    EXPECT_TRUE(Mentions(folder.Load().status(),
                         {"tensor \"" + name + "\": expected no such", "(config.json: " + reason}));
  }
  MadeUpFolder folder;
  folder.tensors.push_back(
      {"model.layers.3.self_attn.rotary_emb.inv_freq", "I64", {1}, std::string(8, '\0')});
  EXPECT_TRUE(folder.Load().ok()) << folder.Load().status();
}

// The made-up family has tied embeddings.
TEST(Architecture, AHeadBesideTiedEmbeddingsIsComparedWithThem) {
  MadeUpFolder folder;
  RawTensor head = folder.Tensor("model.embed_tokens.weight");
  head.name = "lm_head.weight";
  folder.tensors.push_back(head);
  auto checkpoint = folder.Load();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE(checkpoint->spec.tie_word_embeddings);
  EXPECT_TRUE(checkpoint->warnings.empty());
  folder.tensors.back().bytes.back() ^= 1;
  checkpoint = folder.Load();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_FALSE(checkpoint->spec.tie_word_embeddings);
  ASSERT_EQ(checkpoint->warnings.size(), 1u);
  EXPECT_NE(checkpoint->warnings[0].find("\"lm_head.weight\" is the LM head"), std::string::npos);
  const auto loaded = checkpoint->weights->Get("head.weight", head.shape);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(std::memcmp(loaded->data, folder.tensors.back().bytes.data(), head.bytes.size()), 0);
  folder.tensors.back() = {"lm_head.weight", "F32", {1}, std::string(4, '\0')};
  EXPECT_TRUE(Mentions(folder.Load().status(), {"tensor \"lm_head.weight\": expected shape"}));
}

// A family with a bug may return any location. StoredParts() must not read outside the stored
// tensor.
class FixedPlace final : public CheckpointConfig {
 public:
  explicit FixedPlace(std::optional<TensorPlace> place) : place_(std::move(place)) {}
  std::optional<TensorPlace> Place(const TensorRequirement&) const override { return place_; }
  std::optional<std::string> LeftOverReason(std::string_view) const override { return ""; }
  std::string AsInFile(std::string_view text) const override { return std::string(text); }

 private:
  const std::optional<TensorPlace> place_;
};

TEST(StoredParts, LieInsideTheStoredTensor) {
  const TensorRequirement matrix{"blocks.0.attention.q.weight", {4, 6}, ""};
  struct Inside {
    TensorPlace place;
    int64_t first;
    int64_t row_stride = 6;
    int64_t column_stride = 1;
    bool contiguous = true;
  };
  const std::vector<Inside> inside = {
      {{.name = "x"}, 0},
      {{.name = "x", .shape = {4, 6}}, 0},
      {{.name = "x", .shape = {12, 6}, .first_row = 8}, 48},
      {{.name = "x", .shape = {3, 4, 6}, .index = 2}, 48},
      {{.name = "x", .shape = {3, 8, 6}, .index = 1, .first_row = 4}, 72},
      {{.name = "x", .shape = {6, 4}, .transposed = true}, 0, 1, 4, false},
      {{.name = "x", .shape = {8, 6}, .first_row = 1, .row_step = 2}, 6, 12, 1, false},
      {{.name = "x",
        .shape = {3, 6, 8},
        .index = 2,
        .transposed = true,
        .first_row = 1,
        .row_step = 2},
       97,
       2,
       8,
       false},
      {{.name = "x", .shape = {4, 6}, .add = 1.0f}, 0, 6, 1, false},
      {{.name = "x", .shape = {10, 6}, .first_row = 1, .group_rows = 2, .group_stride = 5},
       6,
       6,
       1,
       false},
      {{.name = "x", .shape = {10, 6}, .first_row = 1, .group_rows = 4, .group_stride = 5}, 6},
      {{.name = "x", .shape = {4, 6}, .function = kLogOfNegative}, 0, 6, 1, false},
      {{.name = "x",
        .shape = {8, 6},
        .first_row = 4,
        .row_blocks = {.size = 1, .outer = 2, .inner = 2}},
       24,
       6,
       1,
       false},
      {{.name = "x", .column_blocks = {.size = 2, .outer = 3, .inner = 1}}, 0, 6, 1, false},
  };
  for (const Inside& i : inside) {
    const auto parts = StoredParts(FixedPlace(i.place), matrix);
    ASSERT_TRUE(parts.ok()) << parts.status();
    ASSERT_EQ(parts->size(), 1u);
    const StoredPart& part = (*parts)[0];
    EXPECT_EQ(part.first_element, i.first);
    EXPECT_EQ(part.row_stride, i.row_stride);
    EXPECT_EQ(part.column_stride, i.column_stride);
    EXPECT_EQ(part.contiguous, i.contiguous);
  }
  const std::vector<std::optional<TensorPlace>> outside = {
      std::nullopt,
      TensorPlace{.name = "x", .shape = {4}},
      TensorPlace{.name = "x", .shape = {6, 4}},
      TensorPlace{.name = "x", .shape = {3, 6}},
      TensorPlace{.name = "x", .shape = {12, 6}, .first_row = 9},
      TensorPlace{.name = "x", .shape = {12, 6}, .first_row = -1},
      TensorPlace{.name = "x", .shape = {4, 6}, .index = 0},
      TensorPlace{.name = "x", .shape = {3, 4, 6}},
      TensorPlace{.name = "x", .shape = {3, 4, 6}, .index = 3},
      TensorPlace{.name = "x", .shape = {3, 4, 6}, .index = -1},
      TensorPlace{.name = "x", .shape = {3, 4, 6}, .index = 2, .first_row = 1},
      TensorPlace{.name = "x", .shape = {4, 6}, .transposed = true},
      TensorPlace{.name = "x", .shape = {4}, .transposed = true},
      TensorPlace{.name = "x", .shape = {8, 6}, .first_row = 2, .row_step = 2},
      TensorPlace{.name = "x", .shape = {8, 6}, .row_step = 0},
      TensorPlace{.name = "x", .shape = {9, 6}, .first_row = 3, .group_rows = 2, .group_stride = 5},
      TensorPlace{.name = "x", .shape = {20, 6}, .group_rows = 3, .group_stride = 5},
      TensorPlace{.name = "x", .shape = {20, 6}, .group_rows = 2, .group_stride = 1},
      TensorPlace{.name = "x", .row_blocks = {.size = 1, .outer = 2, .inner = 3}},
      TensorPlace{.name = "x", .row_blocks = {.size = 3, .outer = 1, .inner = 1}},
      TensorPlace{.name = "x", .row_blocks = {.size = -1, .outer = 2, .inner = 2}},
      TensorPlace{.name = "x", .row_blocks = {.size = 1, .outer = 0, .inner = 4}},
      TensorPlace{.name = "x", .column_blocks = {.size = 1, .outer = 2, .inner = 2}},
      TensorPlace{.name = "x",
                  .shape = {8, 6},
                  .row_step = 2,
                  .row_blocks = {.size = 1, .outer = 2, .inner = 2}},
  };
  for (const auto& place : outside) {
    EXPECT_EQ(StoredParts(FixedPlace(place), matrix).status().code(), absl::StatusCode::kInternal);
  }
}

TEST(NameTableConfig, SpellsKeysAsTheFileDoes) {
  static constexpr KeyRule kKeys[] = {{"feed_forward.routing.select.k", "num_experts_per_tok"},
                                      {"attention.num_heads", "heads"}};
  const NameTableConfig config({}, kKeys, {});
  const std::map<std::string, std::string> cases = {
      {"", ""},
      {"feed_forward[12].routing.select.k: expected 1", "num_experts_per_tok: expected 1"},
      {"[2 * attention[0].num_heads * attention[0].head_dim, 4]",
       "[2 * heads * attention.head_dim, 4]"},
      {"feed_forward[1].routing.widths[3], x.", "feed_forward.routing.widths, x."},
      {"attention[", "attention["},
      {"attention[x].num_heads", "attention[x].num_heads"},
      {"a..b [1] \"c\"", "a..b [1] \"c\""},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(config.AsInFile(text), expected);
}

}  // namespace
}  // namespace moeserve
