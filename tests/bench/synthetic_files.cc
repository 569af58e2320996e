#include "tests/bench/synthetic_files.h"

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
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

// Returns an error for a shape that the architectures "qwen3moe" and "qwen3" cannot compute.
absl::Status CheckGguf(const ModelSpec& spec) {
  const AttentionSpec& a = spec.layers[0].attention;
  const FeedForwardSpec& f = spec.layers[0].feed_forward;
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
      "--gguf: expected dense attention with normed heads and gated experts of one width, top-k by "
      "dot product, found a shape that qwen3moe and qwen3 cannot express");
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
  const AttentionSpec& a = spec.layers[0].attention;
  const FeedForwardSpec& f = spec.layers[0].feed_forward;
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
  const AttentionSpec& a = spec.layers[0].attention;
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
    const FeedForwardSpec& f = spec.layers[i].feed_forward;
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

}  // namespace

absl::Status WriteNative(const ModelSpec& spec, WeightSource& weights, const fs::path& folder) {
  MOESERVE_RETURN_IF_ERROR(CheckTokens(spec));
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return absl::UnavailableError(folder.string() + ": " + error.message());
  nlohmann::json header = nlohmann::json::object();
  uint64_t offset = 0;
  const std::vector<TensorRequirement> tensors = RequiredTensors(spec);
  // The header, with types and offsets, precedes the data.
  for (const TensorRequirement& t : tensors) {
    const bool f32 = t.shape.size() == 1 || t.name.find(".router.") != std::string::npos;
    uint64_t bytes = f32 ? 4 : 2;
    for (const int64_t d : t.shape) bytes *= static_cast<uint64_t>(d);
    header[t.name] = {{"dtype", f32 ? "F32" : "BF16"},
                      {"shape", t.shape},
                      {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  const std::string text = header.dump();
  const uint64_t size = text.size();
  std::ofstream file(folder / "model.safetensors", std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  uint64_t written = 0;
  for (const TensorRequirement& t : tensors) {
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor tensor, weights.Get(t.name, t.shape));
    const uint64_t bytes = static_cast<uint64_t>(tensor.size()) * SizeOf(tensor.dtype);
    file.write(static_cast<const char*>(tensor.data), static_cast<std::streamsize>(bytes));
    written += bytes;
  }
  file.close();
  if (!file.good() || written != offset) {
    return absl::UnavailableError("cannot write " + (folder / "model.safetensors").string());
  }
  std::ofstream config(folder / "config.json");
  config << NativeConfig(spec, kEndOfText).dump(2) << "\n";
  std::ofstream tokenizer(folder / "tokenizer.json");
  tokenizer << TinyTokenizerJson();
  config.close();
  tokenizer.close();
  return config.good() && tokenizer.good()
             ? absl::OkStatus()
             : absl::UnavailableError("cannot write to " + folder.string());
}

absl::Status WriteGguf(const ModelSpec& spec, WeightSource& weights, const std::string& name,
                       const fs::path& path) {
  MOESERVE_RETURN_IF_ERROR(CheckTokens(spec));
  MOESERVE_RETURN_IF_ERROR(CheckGguf(spec));
  GgufWriter file;
  AddGgufMetadata(spec, name, file);
  AddGgufTensors(spec, file);
  return file.Write(path, weights);
}

}  // namespace moeserve::testing
