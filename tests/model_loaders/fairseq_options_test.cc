// The options of fairseq checkpoints: how they are read from pickles, and what is refused.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "model_loaders/architectures/fairseq/fairseq_config.h"
#include "model_loaders/architectures/fairseq/options.h"
#include "model_loaders/architectures/native/write_config.h"
#include "model_loaders/checkpoint/fairseq_checkpoint.h"
#include "model_loaders/checkpoint/fairseq_files.h"
#include "model_loaders/checkpoint/tensor_check.h"
#include "model_loaders/files/torch/pickle.h"
#include "model_loaders/files/torch/torch_file.h"
#include "nlohmann/json.hpp"
#include "tests/model_loaders/fairseq_support.h"
#include "tests/model_loaders/support.h"
#include "tests/model_loaders/torch_bytes.h"
#include "tests/support/family_cases.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

struct OptionRefusal {
  std::string model;
  Json options;
  std::vector<std::string> message;
};

TEST(FairseqRefusals, OptionsThatAreNotComputed) {
  const std::string dense = "dense-deepnorm";
  const std::string smoe = "smoe-one-file";
  const std::string fork = "mhmoe-four-heads";
  const std::string moa = "moa";
  const std::string plain = "transformer-lm-post-norm";
  const std::string bare = "transformer-lm-no-final-norm";
  const std::vector<OptionRefusal> refusals = {
      {dense,
       {{"xpos_rel_pos", true}},
       {"cfg.model: no_token_positional_embeddings: expected true beside xpos_rel_pos"}},
      {dense,
       {{"xpos_rel_pos", true}, {"no_token_positional_embeddings", true}, {"xpos_scale_base", 0}},
       {"xpos_scale_base: expected a number above 0, found 0"}},
      {dense,
       {{"xpos_rel_pos", true}, {"no_token_positional_embeddings", true}, {"xpos_scale_base", 0.5}},
       {"xpos_scale_base: expected 0 or a number >= "}},
      {dense,
       {{"rel_pos_buckets", 32}, {"max_rel_pos", 128}},
       {"relative_attention_bias.weight\" is missing"}},
      {dense,
       {{"rel_pos_buckets", 3}, {"max_rel_pos", 128}},
       {"rel_pos_buckets: expected an integer in [4, "}},
      {dense,
       {{"rel_pos_buckets", 32}, {"max_rel_pos", 8}},
       {"max_rel_pos: expected an integer in [9, ", "found 8"}},
      {fork, {{"rel_pos_buckets", 32}, {"max_rel_pos", 128}}, {"rel_pos_buckets: expected 0"}},
      {dense, {{"multiway", true}}, {"multiway: expected false", "found true"}},
      {dense, {{"no_output_layer", true}}, {"no_output_layer: expected false"}},
      {dense, {{"segment_length", "[2048]"}}, {"segment_length: expected \"\" (dilated"}},
      {dense, {{"dilated_ratio", "[1]"}}, {"dilated_ratio: expected \"\""}},
      {dense, {{"activation_fn", "tanh"}}, {"activation_fn: expected \"relu\", \"gelu\""}},
      {dense, {{"activation_fn", nullptr}}, {"activation_fn: expected", "found no such key"}},
      {dense, {{"decoder_layers", 0}}, {"decoder_layers: expected an integer in [1, "}},
      {dense, {{"decoder_layers", 2000000000}}, {"decoder_layers: expected an integer in [1, "}},
      {dense, {{"decoder_attention_heads", 5}}, {"a divisor of decoder_embed_dim, which is 16"}},
      {dense, {{"decoder_attention_heads", 0}}, {"decoder_attention_heads: expected"}},
      {dense, {{"layernorm_eps", -1}}, {"cfg.model: layernorm_eps: expected"}},
      {dense, {{"layernorm_embedding", true}}, {"layernorm_embedding.weight\" is missing"}},
      {dense, {{"subln", true}, {"deepnorm", false}}, {"subln: expected false (the files do not"}},
      {dense,
       {{"decoder_normalize_before", true}, {"deepnorm", false}},
       {"decoder_normalize_before: expected false (the files do not have decoder.layer_norm"}},
      {dense, {{"no_scale_embedding", "yes"}}, {"no_scale_embedding: expected true or false"}},
      {dense, {{"quant_noise_scalar", 0.5}}, {"quant_noise_scalar: expected 0"}},
      {dense, {{"decoder_shape", 5}}, {"decoder_shape: expected no such option", "found 5"}},
      {dense, {{"moe_freq", -1}}, {"moe_freq: expected an integer of at least 0"}},
      {dense,
       {{"moe_freq", 2}, {"moe_expert_count", 4}},
       {"moe_freq: expected a number with which layer 1 is dense", "decoder.layers.1.ffn.*"}},
      {dense, {{"max_target_positions", 0}}, {"max_target_positions: expected"}},
      {dense,
       {{"decoder_ffn_embed_dim", 25}},
       {"tensor \"decoder.layers.0.ffn.fc1.weight\": expected shape [25, 16]",
        "decoder_ffn_embed_dim", "found [24, 16]"}},
      {dense,
       {{"decoder_layers", 2}},
       {"layers.2.", "expected no such tensor", "decoder_layers is 2"}},
      {smoe, {{"deepnorm", true}}, {"args: deepnorm: expected false beside decoder.layer_norm"}},
      {smoe, {{"subln", false}}, {"subln: expected true (the files have"}},
      {smoe, {{"group_norm_size", 2}}, {"group_norm_size: expected 1"}},
      {smoe, {{"use_xmoe", true}}, {"use_xmoe: expected false (the files do not have"}},
      {smoe, {{"moe_freq", 0}}, {"moe_freq: expected a number with which layer 0 is routed"}},
      {smoe,
       {{"moe_second_expert_policy", "none"}},
       {"moe_second_expert_policy: expected \"all\""}},
      {smoe, {{"moe_expert_count", 0}}, {"moe_expert_count: expected an integer in [1, "}},
      {smoe, {{"moe_expert_count", 60000}}, {"moe_expert_count: expected an integer in [1, "}},
      {smoe,
       {{"moe_expert_count", 4}},
       {"experts.4.fc1.bias", "expected no such tensor", "moe_expert_count is 4"}},
      {smoe,
       {{"moe_expert_count", 6}},
       {"tensor \"decoder.layers.0.moe_layer.experts.5.fc1.weight\" is missing"}},
      {smoe, {{"moe_temperature", 0.5}}, {"moe_temperature: expected no such option"}},
      {fork, {{"use_xmoe", true}}, {"use_xmoe: expected false"}},
      {fork, {{"rotary_embed", false}, {"xpos_rel_pos", true}}, {"xpos_rel_pos: expected false"}},
      {fork,
       {{"no_token_positional_embeddings", false}},
       {"no_token_positional_embeddings: expected true beside rotary_embed"}},
      {fork, {{"partial_rotary_factor", 0.1}}, {"partial_rotary_factor: expected"}},
      {fork, {{"n_kv_heads", 3}}, {"n_kv_heads: expected a divisor of 4, found 3"}},
      {fork, {{"mhmoe_heads_number", 3}}, {"mhmoe_heads_number: expected a divisor of 16"}},
      {fork,
       {{"mhmoe_heads_number", 2}},
       {"tensor \"decoder.layers.1.moe_layer.gate.wg.weight\": expected shape [8, 8]",
        "mhmoe_heads_number"}},
      {fork, {{"mhmoe_heads_number", 1}}, {"gate.wg.weight\": expected shape [8, 16]"}},
      {fork, {{"moe_top_k", 9}}, {"moe_top_k: expected an integer in [1, 8], found 9"}},
      {fork, {{"moe_top_k", nullptr}}, {"moe_top_k: expected an integer, found no such key"}},
      {fork, {{"activation_fn", "leaky_relu"}}, {"activation_fn: expected"}},
      {fork, {{"activation_fn", "gelu"}}, {"fc3.weight", "expected no such tensor"}},
      {fork, {{"rms_norm", false}}, {"self_attn_layer_norm.bias\" is missing"}},
      {fork, {{"no_bias", false}}, {"self_attn.k_proj.bias\" is missing"}},
      {fork, {{"relu_squared", true}}, {"relu_squared: expected false"}},
      {fork, {{"negative_slope", 0.1}}, {"negative_slope: expected -1"}},
      {fork, {{"nozero_rmsnorm", true}}, {"nozero_rmsnorm: expected false"}},
      {fork, {{"model_parallel_size", 2}}, {"model_parallel_size: expected 1"}},
      {fork, {{"moe_lora_rank", 4}}, {"moe_lora_rank: expected -1"}},
      {fork, {{"weight_bits", 1}}, {"weight_bits: expected 32 (models with quantizers"}},
      {fork, {{"input_bits", 8}}, {"input_bits: expected 32"}},
      {fork, {{"ffn_bits", 4}}, {"ffn_bits: expected 32"}},
      {fork, {{"fc2_bits", 8}}, {"fc2_bits: expected 32"}},
      {fork, {{"binary_attn", true}}, {"binary_attn: expected false"}},
      {fork, {{"binary_query", true}}, {"binary_query: expected false"}},
      {fork, {{"use_quant_for_activation", true}}, {"use_quant_for_activation: expected false"}},
      {fork, {{"quant_ffn_output", true}}, {"quant_ffn_output: expected false"}},
      {fork,
       {{"input_quant_method", "absmax_per_token_relu2"}},
       {"input_quant_method: expected a method that changes nothing at 32 bits"}},
      {plain, {{"scale_fc", true}}, {"args: scale_fc: expected false"}},
      {plain, {{"character_embeddings", true}}, {"character_embeddings: expected false"}},
      {plain, {{"adaptive_softmax_cutoff", {10}}}, {"adaptive_softmax_cutoff: expected null"}},
      {plain, {{"deepnorm", true}}, {"deepnorm: expected false (layers of fairseq's"}},
      {plain, {{"moe_freq", 2}}, {"moe_freq: expected 0"}},
      {plain, {{"decoder_attention_heads", 3}}, {"expected a divisor of decoder_embed_dim, "}},
      {plain,
       {{"decoder_normalize_before", true}},
       {"decoder_normalize_before: expected false (the files do not have"}},
      {bare,
       {{"no_decoder_final_norm", false}},
       {"decoder_normalize_before: expected false (the files do not have"}},
      {plain, {{"activation_fn", "tanh"}}, {"activation_fn: expected \"relu\""}},
      {moa, {{"scale_heads", true}}, {"args: scale_heads: expected false"}},
      {moa, {{"adaptive_softmax_cutoff", {10}}}, {"adaptive_softmax_cutoff: expected null"}},
      {moa, {{"cross_self_attention", true}}, {"cross_self_attention: expected false"}},
      {moa, {{"base_layers", 1}}, {"base_layers: expected 0"}},
      {moa, {{"ffd_type", "other"}}, {"ffd_type: expected \"normal\" or \"moe\""}},
      {moa, {{"ffd_type", "moe"}}, {"ffd.w_gate\" is missing"}},
      {moa, {{"decoder_attention_heads", 6}}, {"decoder_attention_heads: expected", "found 6"}},
      {moa, {{"head_dim", 9}}, {"expected shape [5, 16, 9]", "found [5, 16, 8]"}},
      {moa, {{"num_expert", 4}}, {"q_proj.experts.w\": expected shape [4, 16, 8]"}},
      {moa, {{"num_expert", 70000}}, {"num_expert: expected an integer in [1, "}},
      {moa,
       {{"decoder_normalize_before", true}},
       {"decoder_normalize_before: expected false (the files do not have"}},
      {moa, {{"layernorm_embedding", true}}, {"decoder.layernorm_embedding.weight\" is missing"}},
  };
  for (const OptionRefusal& refusal : refusals) {
    SCOPED_TRACE(refusal.model + ": " + refusal.options.dump());
    FairseqCopy copy(refusal.model);
    copy.SetOptions(refusal.options);
    EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(), refusal.message));
  }
}

TEST(FairseqOptions, ConfigJsonReplacesOptionsAndSaysSo) {
  FairseqCopy copy("dense-deepnorm");
  copy.SetOptions({{"max_target_positions", 20},
                   {"activation_fn", "relu"},
                   {"decoder_shape", nullptr},
                   {"seed", nullptr}});
  const auto checkpoint = LoadModel(copy.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->spec.max_position_embeddings, 20);
  EXPECT_EQ(checkpoint->spec.feed_forward(0).expert.activation, ActivationKind::kRelu);
  EXPECT_TRUE(Contains(checkpoint->notes,
                       "option activation_fn: \"relu\" from config.json, "
                       "instead of \"gelu\" in cfg.model"));
  EXPECT_TRUE(Contains(checkpoint->notes,
                       "option max_target_positions: 20 from config.json, "
                       "instead of none in cfg.model"));
  EXPECT_TRUE(Contains(checkpoint->notes, "option seed: removed by config.json"));
  EXPECT_FALSE(Contains(checkpoint->notes, "decoder_shape"));
  // Another model's config.json does not describe .pt files.
  WriteFile(copy / "config.json", R"({"model_type": "llama"})");
  EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(), {"config.json: "}));
  EXPECT_TRUE(Mentions(LoadModel(copy / "checkpoint_best.pt").status(),
                       {"config.json: model_type: expected \"torchscale\""}));
}

TEST(FairseqOptions, NumbersThatNobodySetAreMinusOne) {
  FairseqCopy copy("mhmoe-four-heads");
  const auto plain = LoadModel(copy.path());
  ASSERT_TRUE(plain.ok()) << plain.status();
  copy.SetOptions(
      {{"n_kv_heads", -1}, {"rel_pos_buckets", -1}, {"max_rel_pos", -1}, {"window_of_a_fork", -1}});
  const auto checkpoint = LoadModel(copy.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(NativeConfigJson(checkpoint->spec), NativeConfigJson(plain->spec));
  EXPECT_EQ(checkpoint->spec.attention(0).num_kv_heads, checkpoint->spec.attention(0).num_heads);
  EXPECT_FALSE(checkpoint->spec.relative_bias.has_value());
}

TEST(FairseqOptions, AreReadWithoutIgnoredOnes) {
  FairseqCopy copy("dense-deepnorm");
  copy.SetOptions({{"window_of_a_fork", 5}});
  EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(), {"--ignore-config window_of_a_fork"}));
  const auto checkpoint = LoadCheckpoint(
      copy.path(), {.require_tokenizer = false, .ignored_keys = {"window_of_a_fork"}});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE(Contains(checkpoint->notes, "read without these keys"));
}

TEST(FairseqOptions, TensorsAloneNeedThem) {
  FairseqCopy copy("dense-bare");
  fs::remove(copy / "config.json");
  EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(),
                       {"model.pt: expected the options of the model (args or cfg), found only",
                        "config.json", "decoder_attention_heads", "moe_expert_count"}));
  copy.SetOptions(Json::object());
  EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(),
                       {"config.json: ", "problems", "decoder_layers: expected an integer"}));
}

// Pickles of values, without the frame of a whole pickle.
std::string Dict(const std::vector<PickleItem>& items) {
  std::string bytes = "}(";
  for (const PickleItem& item : items) bytes += PickleString(item.name) + item.value;
  return bytes + "u";
}
std::string Object(std::string_view module, std::string_view name, const std::string& state) {
  return PickleGlobal(module, name) + ")\x81" + state + "b";
}
std::string Namespace(const std::vector<PickleItem>& items) {
  return Object("argparse", "Namespace", Dict(items));
}

Result<std::optional<FairseqOptions>> ReadOptions(const std::vector<PickleItem>& root) {
  const std::string bytes = PickleDict(root);
  const auto tree = PickleTree::Parse(bytes);
  if (!tree.ok()) return tree.status();
  return ReadFairseqOptions(tree->root());
}

Json ValuesOf(const std::vector<PickleItem>& root) {
  const auto options = ReadOptions(root);
  EXPECT_TRUE(options.ok()) << options.status();
  if (!options.ok() || !options->has_value()) return nullptr;
  return (*options)->values;
}

const std::string kNone = "N";
const std::string kTrue = "\x88";

TEST(FairseqOptions, AreReadFromArgsOrCfg) {
  const std::string options = Namespace({{"a", PickleInt(1)}, {"b", kNone}, {"c", kTrue}});
  const Json expected = {{"a", 1}, {"c", true}};
  EXPECT_EQ(ValuesOf({{"args", options}}), expected);
  EXPECT_EQ(ValuesOf({{"args", Dict({{"a", PickleInt(1)}, {"c", kTrue}})}}), expected);
  EXPECT_EQ(ValuesOf({{"args", kNone}, {"cfg", Dict({{"model", options}})}}), expected);
  // "args" counts if there are both.
  EXPECT_EQ(ValuesOf({{"args", options}, {"cfg", PickleInt(5)}}), expected);
  EXPECT_EQ(ValuesOf({{"cfg", kNone}}), nullptr);
  EXPECT_EQ(ValuesOf({{"cfg", Dict({{"model", Dict({})},
                                    {"task", Dict({{"tokens_per_sample", PickleInt(7)},
                                                   {"seed", PickleInt(8)}})}})}}),
            (Json{{"tokens_per_sample", 7}}));
  EXPECT_TRUE(Mentions(ReadOptions({{"args", PickleInt(3)}}).status(),
                       {"args: expected a Namespace or a dict, found 3"}));
  EXPECT_TRUE(Mentions(ReadOptions({{"cfg", PickleInt(3)}}).status(), {"cfg: expected a dict"}));
  EXPECT_TRUE(Mentions(ReadOptions({{"cfg", Dict({{"model", kNone}})}}).status(),
                       {"cfg.model: expected a dict or a Namespace, found None"}));
}

TEST(FairseqOptions, NestedOnesBecomeFlat) {
  const std::string nested = Dict({{"decoder", Dict({{"layers", PickleInt(6)}})}});
  EXPECT_EQ(ValuesOf({{"args", nested}}), (Json{{"decoder_layers", 6}}));
  const std::string twice =
      Dict({{"decoder", Dict({{"layers", PickleInt(6)}})}, {"decoder_layers", PickleInt(7)}});
  EXPECT_TRUE(Mentions(ReadOptions({{"args", twice}}).status(),
                       {"args: decoder_layers: expected one value, found "}));
}

TEST(FairseqOptions, ObjectsOfOmegaConfAndEnums) {
  const auto node = [](const std::string& value) {
    return Object("omegaconf.nodes", "AnyNode", Dict({{"_val", value}, {"_parent", kNone}}));
  };
  const auto config = [](const std::vector<PickleItem>& items) {
    return Object("omegaconf.dictconfig", "DictConfig",
                  Dict({{"_metadata", kNone}, {"_content", Dict(items)}}));
  };
  const std::string choice = PickleGlobal("fairseq.dataclass.constants", "Choices") +
                             PickleTuple({PickleString("gelu")}) + "R";
  const std::string cfg =
      config({{"model", config({{"a", node(PickleInt(4))},
                                {"activation_fn", choice},
                                {"decoder", config({{"layers", node(PickleInt(2))}})}})}});
  EXPECT_EQ(ValuesOf({{"cfg", cfg}}),
            (Json{{"a", 4}, {"activation_fn", "gelu"}, {"decoder_layers", 2}}));
}

TEST(FairseqOptions, OddValuesBecomeDescriptions) {
  const std::string infinite = std::string("G\x7f\xf0") + std::string(6, '\0');
  const std::string device =
      PickleGlobal("torch", "device") + PickleTuple({PickleString("cpu")}) + "R";
  const std::string bytes = PickleString("\xff\n");
  const Json values =
      ValuesOf({{"args", Namespace({{"infinite", infinite},
                                    {"device", device},
                                    {"text", bytes},
                                    {"big", "\x8a\x09" + std::string(9, '\x11')}})}});
  EXPECT_TRUE(values["infinite"].is_string());
  EXPECT_EQ(values["device"], "(an object of torch.device)");
  EXPECT_EQ(values["text"], "\\xff\\x0a");
  EXPECT_EQ(values["big"], "(an integer beyond 64 bits)");
  EXPECT_NO_THROW(values.dump());
}

// Lists of the same list ten times, eight levels deep, in some hundred bytes.
TEST(FairseqOptions, SharedValuesDoNotGrow) {
  std::string bytes = "(";
  for (char level = 0; level < 8; ++level) {
    bytes += std::string("]q") + level + "(";
    for (int i = 0; i < 10; ++i) {
      bytes += level == 0 ? std::string("N") : std::string("h") + static_cast<char>(level - 1);
    }
    bytes += "e";
  }
  bytes += "t";
  EXPECT_TRUE(Mentions(ReadOptions({{"args", Namespace({{"a", bytes}})}}).status(),
                       {"args: expected at most 50000 values, found more"}));
  // An object that is its own attribute.
  const std::string cycle =
      PickleGlobal("argparse", "Namespace") + ")\x81q\x01}(" + PickleString("a") + "h\x01ub";
  const auto options = ReadOptions({{"args", cycle}});
  EXPECT_TRUE(options.ok()) << options.status();
}

TEST(FairseqOptions, OtherFilesAreRefused) {
  TempFolder folder;
  const fs::path path = folder.path() / "a.pt";
  const auto status = [&](const std::string& pickle) {
    WriteFile(path, TorchBytes(pickle, {}));
    return LoadModel(path).status();
  };
  EXPECT_TRUE(Mentions(status("\x80\x02]."), {"a.pt: expected a checkpoint of fairseq"}));
  EXPECT_TRUE(Mentions(status(PickleDict({{"model", kNone}})), {"a.pt: ", "state dict"}));
  EXPECT_TRUE(Mentions(status(PickleDict({{"model", Dict({})}})), {"found only tensors"}));
  EXPECT_TRUE(Mentions(status(PickleDict({{"model", Dict({})}, {"args", Dict({})}})),
                       {"a.pt: args: ", "decoder_layers: expected an integer"}));
  EXPECT_TRUE(Mentions(status(PickleDict({{"weights", PickleInt(1)}})), {"\"weights\""}));
  WriteFile(path, "no archive");
  EXPECT_TRUE(Mentions(LoadModel(path).status(), {"a.pt: "}));
}

// Values that a hostile or damaged option may have.
std::vector<Json> OddOptionValues() {
  return {true,  false,   0,   -1, 1,      3,  2147483647,    int64_t{1} << 40,
          1e308, -1e-300, 0.5, "", "gelu", {}, Json::array(), Json::array({1, "x"}),
          16,    1000000, "16"};
}

// Every option is removed and replaced by odd values, one at a time. The reader must answer with a
// valid model, whose tensors can be checked, or with an error that names the options' place.
class FairseqOddOptions : public ::testing::TestWithParam<FamilyCase> {};

TEST_P(FairseqOddOptions, AreRefusedOrRead) {
  const auto files = FindFairseq(GetParam().folder);
  ASSERT_TRUE(files.ok() && files->has_value()) << files.status();
  const auto opened = OpenFairseq(**files);
  ASSERT_TRUE(opened.ok()) << opened.status();
  FairseqOptions options{Json::object(), "config.json", {}};
  if (opened->config_text.empty()) {
    const auto file = TorchFile::Open((*files)->folder / (*files)->main);
    ASSERT_TRUE(file.ok()) << file.status();
    options = **ReadFairseqOptions((*file)->root());
  } else {
    options.values = Json::parse(opened->config_text);
    options.values.erase("model_type");
  }
  int refused = 0;
  const auto read = [&](const Json& values, const std::string& what) {
    const FairseqOptions changed{values, options.place, {}};
    const auto config = ReadFairseqConfig({"file.pt", changed, opened->files});
    if (config.ok()) {
      EXPECT_TRUE(Validate((*config)->spec).ok()) << what;
      refused += CheckTensors(**config, opened->files).ok() ? 0 : 1;
      return;
    }
    ++refused;
    const std::string place(options.place);
    EXPECT_EQ(config.status().message().find(place == "config.json" ? place : "file.pt: " + place),
              0u)
        << what << ": " << config.status();
  };
  const Json original = options.values;
  for (const auto& [key, unused] : original.items()) {
    Json changed = original;
    changed.erase(key);
    read(changed, "without " + key);
    for (const Json& value : OddOptionValues()) {
      changed[key] = value;
      read(changed, key + " = " + value.dump());
    }
  }
  EXPECT_GT(refused, 100);
}

INSTANTIATE_TEST_SUITE_P(FairseqTexts, FairseqOddOptions, ::testing::ValuesIn(FairseqTextCases()),
                         [](const auto& info) { return TestName(info.param); });
INSTANTIATE_TEST_SUITE_P(Fairseq, FairseqOddOptions, ::testing::ValuesIn(FairseqCases()),
                         [](const auto& info) { return TestName(info.param); });

}  // namespace
}  // namespace moeserve::testing
