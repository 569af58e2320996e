#include "tests/bench/synthetic_files.h"

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tests/bench/gguf_writer.h"
#include "tests/bench/native_config.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

constexpr int32_t kEndOfText = 256;  // follows the tokens of single bytes

absl::Status CheckTokens(const ModelSpec& spec) {
  if (spec.vocab_size > kEndOfText) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "vocab_size: expected at least 257 for a tokenizer of bytes, found " +
      std::to_string(spec.vocab_size));
}

// Returns an error, which starts with `option`, for a shape that the architectures "qwen3moe" and
// "qwen3" cannot compute.
absl::Status CheckQwen3(const ModelSpec& spec, std::string_view option) {
  const AttentionSpec& a = spec.attention(0);
  const FeedForwardSpec& f = spec.feed_forward(0);
  bool same = !a.routed() && a.qk_norm == QkNorm::kHead && !a.window &&
              a.group_order == GroupOrder::kInterleave && f.expert.form == ExpertForm::kGated &&
              f.expert.activation == ActivationKind::kSilu && f.shared_width == 0;
  if (f.routed()) {
    const RoutedLayerSpec& r = *f.routing;
    same = same && r.split.heads == 1 && r.score.kind == ScoreKind::kDot && r.renormalize &&
           r.select.kind == SelectKind::kTopK && r.gate == GateKind::kSoftmax && r.scale == 1.0;
    for (const int width : r.widths) same = same && width == r.widths[0];
  }
  if (same) return absl::OkStatus();
  return absl::InvalidArgumentError(
      std::string(option) +
      ": expected dense attention with normed heads and gated experts of one width, top-k by dot "
      "product, found a shape that qwen3moe and qwen3 cannot express");
}

// Returns the token texts in the order of their ids: bytes, the end of text, unused tokens.
std::vector<std::string> TokenTexts(int vocab_size) {
  std::vector<std::string> texts(static_cast<size_t>(vocab_size));
  const nlohmann::json tokenizer = nlohmann::json::parse(TinyTokenizerJson());
  for (const auto& [text, id] : tokenizer["model"]["vocab"].items()) {
    texts[id.get<size_t>()] = text;
  }
  texts[kEndOfText] = "<|endoftext|>";
  for (int i = kEndOfText + 1; i < vocab_size; ++i) {
    texts[static_cast<size_t>(i)] = "tok" + std::to_string(i - kEndOfText - 1);
  }
  return texts;
}

void AddGgufMetadata(const ModelSpec& spec, const std::string& name, GgufWriter& file) {
  const AttentionSpec& a = spec.attention(0);
  const FeedForwardSpec& f = spec.feed_forward(0);
  const std::string arch = f.routed() ? "qwen3moe" : "qwen3";
  file.AddString("general.architecture", arch);
  file.AddString("general.name", name);
  file.AddU32("general.file_type", 32);  // mostly bf16
  const auto add = [&](const char* key, int value) {
    file.AddU32(arch + "." + key, static_cast<uint32_t>(value));
  };
  add("block_count", spec.num_layers());
  add("context_length", spec.max_position_embeddings);
  add("embedding_length", spec.hidden_size);
  add("vocab_size", spec.vocab_size);
  add("attention.head_count", a.num_heads);
  add("attention.head_count_kv", a.num_kv_heads);
  add("attention.key_length", a.head_dim);
  add("attention.value_length", a.head_dim);
  add("rope.dimension_count", a.head_dim);
  if (f.routed()) {
    add("feed_forward_length", f.routing->widths[0]);
    add("expert_feed_forward_length", f.routing->widths[0]);
    add("expert_count", f.routing->num_experts);
    add("expert_used_count", f.routing->select.k);
  } else {
    add("feed_forward_length", f.width);
  }
  file.AddF32(arch + ".attention.layer_norm_rms_epsilon", spec.norm.eps);
  file.AddF32(arch + ".rope.freq_base", static_cast<float>(spec.position.theta));
  file.AddString("tokenizer.ggml.model", "gpt2");
  file.AddString("tokenizer.ggml.pre", "gpt-2");
  const std::vector<std::string> tokens = TokenTexts(spec.vocab_size);
  std::vector<int32_t> kinds(tokens.size(), 1);  // normal
  kinds[kEndOfText] = 3;                         // control
  file.AddStrings("tokenizer.ggml.tokens", tokens);
  file.AddI32s("tokenizer.ggml.token_type", kinds);
  // Readers require at least one merge. The result of this merge is not a token, so it has no
  // effect.
  file.AddStrings("tokenizer.ggml.merges", {tokens[0] + " " + tokens[1]});
  file.AddU32("tokenizer.ggml.bos_token_id", kEndOfText);
  file.AddU32("tokenizer.ggml.eos_token_id", kEndOfText);
  file.AddBool("tokenizer.ggml.add_bos_token", false);
}

// Declares every tensor of the file, and the source tensors of its values.
void AddGgufTensors(const ModelSpec& spec, GgufWriter& file) {
  const AttentionSpec& a = spec.attention(0);
  const int64_t d = spec.hidden_size;
  const int64_t queries = int64_t{a.num_heads} * a.head_dim;
  const int64_t keys = int64_t{a.num_kv_heads} * a.head_dim;
  const auto bf16 = [&](const std::string& name, const std::string& source,
                        std::vector<int64_t> shape) {
    file.AddTensor({name, GgufType::kBF16, std::move(shape), {source}});
  };
  const auto norm = [&](const std::string& name, const std::string& source, int64_t n) {
    file.AddTensor({name, GgufType::kF32, {n}, {source}});
  };
  bf16("token_embd.weight", "embed.weight", {spec.vocab_size, d});
  norm("output_norm.weight", "norm.weight", d);
  bf16("output.weight", "head.weight", {spec.vocab_size, d});
  for (int i = 0; i < spec.num_layers(); ++i) {
    const std::string to = "blk." + std::to_string(i) + ".";
    const std::string attention = "blocks." + std::to_string(i) + ".attention.";
    const std::string ff = "blocks." + std::to_string(i) + ".feed_forward.";
    norm(to + "attn_norm.weight", attention + "norm.weight", d);
    norm(to + "attn_q_norm.weight", attention + "q_norm.weight", a.head_dim);
    norm(to + "attn_k_norm.weight", attention + "k_norm.weight", a.head_dim);
    bf16(to + "attn_q.weight", attention + "q.weight", {queries, d});
    bf16(to + "attn_k.weight", attention + "k.weight", {keys, d});
    bf16(to + "attn_v.weight", attention + "v.weight", {keys, d});
    bf16(to + "attn_output.weight", attention + "o.weight", {d, queries});
    norm(to + "ffn_norm.weight", ff + "norm.weight", d);
    const FeedForwardSpec& f = spec.feed_forward(i);
    if (!f.routed()) {
      bf16(to + "ffn_gate.weight", ff + "gate.weight", {f.width, d});
      bf16(to + "ffn_up.weight", ff + "up.weight", {f.width, d});
      bf16(to + "ffn_down.weight", ff + "down.weight", {d, f.width});
      continue;
    }
    const int64_t experts = f.routing->num_experts;
    const int64_t width = f.routing->widths[0];
    file.AddTensor(
        {to + "ffn_gate_inp.weight", GgufType::kF32, {experts, d}, {ff + "router.weight"}});
    for (const char* matrix : {"gate", "up", "down"}) {
      const bool down = std::strcmp(matrix, "down") == 0;
      GgufTensor stacked{to + "ffn_" + matrix + "_exps.weight",
                         GgufType::kBF16,
                         {experts, down ? d : width, down ? width : d},
                         {}};
      for (int64_t e = 0; e < experts; ++e) {
        stacked.sources.push_back(ff + "experts." + std::to_string(e) + "." + matrix + ".weight");
      }
      file.AddTensor(std::move(stacked));
    }
  }
}

absl::Status CreateFolder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return absl::UnavailableError(folder.string() + ": " + error.message());
  return absl::OkStatus();
}

absl::Status WriteText(std::string_view text, const fs::path& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  return file.good() ? absl::OkStatus() : absl::UnavailableError("cannot write " + path.string());
}

// A tensor of a safetensors file and the name of its values in a WeightSource.
struct StoredTensor {
  std::string name;
  std::string source;
  std::vector<int64_t> shape;
  DType dtype = DType::kBF16;  // kBF16 or kF32
};

// Writes the bytes of a tensor, which is f32 or bf16, as `dtype`. Only f32 can be rounded.
absl::Status WriteValues(const HostTensor& tensor, DType dtype, std::ofstream& file) {
  if (tensor.dtype == dtype) {
    file.write(
        static_cast<const char*>(tensor.data),
        static_cast<std::streamsize>(tensor.size()) * static_cast<std::streamsize>(SizeOf(dtype)));
    return absl::OkStatus();
  }
  if (tensor.dtype != DType::kF32 || dtype != DType::kBF16) {
    return absl::InternalError("a tensor can be rounded from f32 to bf16 only");
  }
  const float* values = static_cast<const float*>(tensor.data);
  std::vector<Bf16> rounded(static_cast<size_t>(tensor.size()));
  for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = Bf16FromF32(values[i]);
  file.write(reinterpret_cast<const char*>(rounded.data()),
             static_cast<std::streamsize>(rounded.size() * sizeof(Bf16)));
  return absl::OkStatus();
}

// Writes a safetensors file, reading one source tensor after the other.
absl::Status WriteSafetensors(const std::vector<StoredTensor>& tensors, WeightSource& weights,
                              const fs::path& path) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  uint64_t offset = 0;
  for (const StoredTensor& t : tensors) {
    uint64_t bytes = SizeOf(t.dtype);
    for (const int64_t d : t.shape) bytes *= static_cast<uint64_t>(d);
    header[t.name] = {{"dtype", t.dtype == DType::kF32 ? "F32" : "BF16"},
                      {"shape", t.shape},
                      {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the data
  const uint64_t size = text.size();
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const StoredTensor& t : tensors) {
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor tensor, weights.Get(t.source, t.shape));
    MOESERVE_RETURN_IF_ERROR(WriteValues(tensor, t.dtype, file));
  }
  const bool complete =
      file.good() && static_cast<uint64_t>(file.tellp()) == sizeof(size) + size + offset;
  file.close();
  return complete && file.good() ? absl::OkStatus()
                                 : absl::UnavailableError("cannot write " + path.string());
}

// The tensors of a "qwen3_moe" folder.
std::vector<StoredTensor> HuggingFaceTensors(const ModelSpec& spec) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"attention.norm.", "input_layernorm."},
      {"attention.q_norm.", "self_attn.q_norm."},
      {"attention.k_norm.", "self_attn.k_norm."},
      {"attention.q.", "self_attn.q_proj."},
      {"attention.k.", "self_attn.k_proj."},
      {"attention.v.", "self_attn.v_proj."},
      {"attention.o.", "self_attn.o_proj."},
      {"feed_forward.norm.", "post_attention_layernorm."},
      {"feed_forward.router.", "mlp.gate."}};
  std::vector<StoredTensor> tensors;
  const auto add = [&](const TensorRequirement& t, std::string name) {
    tensors.push_back({std::move(name), t.name, t.shape});
  };
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    const std::string_view name = t.name;
    if (name == "embed.weight") add(t, "model.embed_tokens.weight");
    if (name == "norm.weight") add(t, "model.norm.weight");
    if (name == "head.weight") add(t, "lm_head.weight");
    constexpr std::string_view kBlocks = "blocks.";
    if (!name.starts_with(kBlocks)) continue;
    const std::string_view inner = name.substr(kBlocks.size());
    const size_t dot = inner.find('.') + 1;
    const std::string layer = "model.layers." + std::string(inner.substr(0, dot));
    const std::string_view part = inner.substr(dot);
    for (const auto& [ours, theirs] : kNames) {
      if (!part.starts_with(ours)) continue;
      add(t, layer + std::string(theirs) + std::string(part.substr(ours.size())));
    }
    // "feed_forward.experts.3.gate.weight" is "mlp.experts.3.gate_proj.weight".
    constexpr std::string_view kExperts = "feed_forward.experts.";
    if (!part.starts_with(kExperts)) continue;
    const size_t suffix = part.rfind('.');
    const size_t from = std::string_view("feed_forward.").size();
    add(t, layer + "mlp." + std::string(part.substr(from, suffix - from)) + "_proj" +
               std::string(part.substr(suffix)));
  }
  return tensors;
}

nlohmann::json HuggingFaceConfig(const ModelSpec& spec) {
  const AttentionSpec& a = spec.attention(0);
  const RoutedLayerSpec& r = *spec.feed_forward(0).routing;
  return {{"architectures", {"Qwen3MoeForCausalLM"}},
          {"model_type", "qwen3_moe"},
          {"torch_dtype", "bfloat16"},
          {"vocab_size", spec.vocab_size},
          {"hidden_size", spec.hidden_size},
          {"num_hidden_layers", spec.num_layers()},
          {"max_position_embeddings", spec.max_position_embeddings},
          {"num_attention_heads", a.num_heads},
          {"num_key_value_heads", a.num_kv_heads},
          {"head_dim", a.head_dim},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"use_sliding_window", false},
          {"rope_theta", spec.position.theta},
          {"rms_norm_eps", static_cast<double>(spec.norm.eps)},
          {"hidden_act", "silu"},
          {"num_experts", r.num_experts},
          {"num_experts_per_tok", r.select.k},
          {"norm_topk_prob", true},
          {"moe_intermediate_size", r.widths[0]},
          {"intermediate_size", r.widths[0]},
          {"decoder_sparse_step", 1},
          {"mlp_only_layers", nlohmann::json::array()},
          {"output_router_logits", false},
          {"router_aux_loss_coef", 0.001},
          {"initializer_range", 0.02},
          {"tie_word_embeddings", false},
          {"use_cache", true},
          {"bos_token_id", kEndOfText},
          {"eos_token_id", kEndOfText}};
}

// The tokens of TokenTexts() in the format of Hugging Face's tokenizers.
nlohmann::json HuggingFaceTokenizer(int vocab_size) {
  nlohmann::json tokenizer = nlohmann::json::parse(TinyTokenizerJson());
  nlohmann::json& vocab = tokenizer["model"]["vocab"];
  const std::vector<std::string> texts = TokenTexts(vocab_size);
  for (size_t id = 0; id < texts.size(); ++id) vocab[texts[id]] = id;
  return tokenizer;
}

}  // namespace

absl::Status WriteNative(const ModelSpec& spec, WeightSource& weights, const fs::path& folder) {
  MOESERVE_RETURN_IF_ERROR(CheckTokens(spec));
  MOESERVE_RETURN_IF_ERROR(CreateFolder(folder));
  std::vector<StoredTensor> tensors;
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    const bool f32 = t.shape.size() == 1 || t.name.find(".router.") != std::string::npos;
    tensors.push_back({t.name, t.name, t.shape, f32 ? DType::kF32 : DType::kBF16});
  }
  MOESERVE_RETURN_IF_ERROR(WriteSafetensors(tensors, weights, folder / "model.safetensors"));
  MOESERVE_RETURN_IF_ERROR(
      WriteText(NativeConfig(spec, kEndOfText).dump(2) + "\n", folder / "config.json"));
  return WriteText(TinyTokenizerJson(), folder / "tokenizer.json");
}

absl::Status WriteGguf(const ModelSpec& spec, WeightSource& weights, const std::string& name,
                       const fs::path& path) {
  MOESERVE_RETURN_IF_ERROR(CheckTokens(spec));
  MOESERVE_RETURN_IF_ERROR(CheckQwen3(spec, "--gguf"));
  GgufWriter file;
  AddGgufMetadata(spec, name, file);
  AddGgufTensors(spec, file);
  return file.Write(path, weights);
}

absl::Status WriteHuggingFace(const ModelSpec& spec, WeightSource& weights,
                              const fs::path& folder) {
  MOESERVE_RETURN_IF_ERROR(CheckTokens(spec));
  MOESERVE_RETURN_IF_ERROR(CheckQwen3(spec, "--hugging-face"));
  if (!spec.feed_forward(0).routed()) {
    return absl::InvalidArgumentError(
        "--hugging-face: expected routed feed-forward layers, found dense ones");
  }
  const std::vector<StoredTensor> tensors = HuggingFaceTensors(spec);
  if (tensors.size() != RequiredTensors(spec).size()) {
    return absl::InternalError("--hugging-face: a tensor has no name in the format");
  }
  MOESERVE_RETURN_IF_ERROR(CreateFolder(folder));
  MOESERVE_RETURN_IF_ERROR(WriteSafetensors(tensors, weights, folder / "model.safetensors"));
  MOESERVE_RETURN_IF_ERROR(
      WriteText(HuggingFaceConfig(spec).dump(2) + "\n", folder / "config.json"));
  MOESERVE_RETURN_IF_ERROR(
      WriteText(HuggingFaceTokenizer(spec.vocab_size).dump(), folder / "tokenizer.json"));
  const nlohmann::json tokenizer = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                    {"bos_token", "<|endoftext|>"},
                                    {"eos_token", "<|endoftext|>"},
                                    {"model_max_length", spec.max_position_embeddings}};
  return WriteText(tokenizer.dump(2) + "\n", folder / "tokenizer_config.json");
}

}  // namespace moeserve::testing
