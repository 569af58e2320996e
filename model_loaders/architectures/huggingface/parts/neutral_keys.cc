#include "model_loaders/architectures/huggingface/parts/neutral_keys.h"

#include <algorithm>
#include <iterator>

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

// Names, training, initial values, how other programs run the model, lengths of texts that they
// accept, heads of classifiers, and defaults of generation, which generation_config.json repeats.
// The tensors show which biases there are. In alphabetical order.
constexpr std::string_view kNeutral[] = {
    "activation_dropout",
    "add_bias_linear",
    "add_qkv_bias",
    "architectures",
    "attention_bias",
    "attention_dropout",
    "attention_implementation",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "attn_pdrop",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "base_model",
    "begin_suppress_tokens",
    "classifier_bias",
    "classifier_dropout",
    "classifier_dropout_prob",
    "cls_token_id",
    "custom_pipelines",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dropout",
    "dtype",
    "early_stopping",
    "embd_dropout",
    "embd_pdrop",
    "embedding_dropout",
    "encoder_no_repeat_ngram_size",
    "eod_id",
    "eod_token_id",
    "exponential_decay_length_penalty",
    "ffn_dropout",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "ignore_index",
    "init_method",
    "init_std",
    "initializer_factor",
    "initializer_range",
    "is_composition",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "label_smoothing",
    "length_penalty",
    "lm_head_bias",
    "loss_type",
    "mask_token_id",
    "max_length",
    "max_new_tokens",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "max_window_layers",
    "min_length",
    "mlp_bias",
    "model_max_length",
    "model_name",
    "model_type",
    "model_version",
    "n_ctx",
    "n_positions",
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_logits_to_keep",
    "num_return_sequences",
    "output_attentions",
    "output_dropout",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_to_multiple_of",
    "pad_token_id",
    "padding_side",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "qkv_bias",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "sep_token_id",
    "seq_len",
    "seq_length",
    "sequence_parallel",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tensor_parallel_degree",
    "tf_legacy_loss",
    "tokenizer_class",
    "tokenizer_model_max_length",
    "tokenizer_padding_side",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_bfloat16",
    "use_bias",
    "use_cache",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
    "use_gradient_checkpointing",
    "use_qkv_bias",
};
static_assert(std::is_sorted(std::begin(kNeutral), std::end(kNeutral)));

// Keys with one value, as JSON text, that says what a family without the key computes anyway. In
// alphabetical order.
struct FixedKey {
  std::string_view key;
  std::string_view value;
};
constexpr FixedKey kFixed[] = {
    {"add_cross_attention", "false"},
    {"causal", "true"},
    {"chunk_size_feed_forward", "0"},
    {"embedding_multiplier", "1.0"},
    {"is_causal", "true"},
    {"is_decoder", "false"},
    {"is_encoder_decoder", "false"},
    {"logit_scale", "1.0"},
    {"logits_scaling", "1.0"},
    {"position_embedding_type", "\"rope\""},
    {"qk_layernorm", "false"},
    {"qk_norm", "false"},
    {"residual_multiplier", "1.0"},
    {"rope_interleaved", "false"},
    {"tie_encoder_decoder", "false"},
    {"use_bidirectional_attention", "false"},
    {"use_dynamic_ntk", "false"},
    {"use_logn_attn", "false"},
    {"use_mrope", "false"},
    {"use_qk_norm", "false"},
    {"use_sliding_window", "false"},
};

const FixedKey* FindFixed(std::string_view key) {
  const auto found = std::find_if(std::begin(kFixed), std::end(kFixed),
                                  [&](const FixedKey& fixed) { return fixed.key == key; });
  return found == std::end(kFixed) ? nullptr : found;
}

}  // namespace

KeyEffect EffectOf(std::string_view key, const Json& value) {
  // A leading underscore marks a private member of a configuration class.
  if (key.starts_with('_') || key.starts_with("summary_") || key.starts_with("unsloth_") ||
      std::binary_search(std::begin(kNeutral), std::end(kNeutral), key)) {
    return KeyEffect::kNone;
  }
  if (key == "layer_types") {
    const bool full =
        value.is_array() && std::all_of(value.begin(), value.end(),
                                        [](const Json& t) { return t == "full_attention"; });
    return full ? KeyEffect::kNone : KeyEffect::kChanges;
  }
  const FixedKey* const fixed = FindFixed(key);
  if (fixed == nullptr) return KeyEffect::kUnknown;
  const Json harmless = Json::parse(fixed->value, nullptr, /*allow_exceptions=*/false);
  return value == harmless ? KeyEffect::kNone : KeyEffect::kChanges;
}

std::string_view HarmlessValue(std::string_view key) {
  if (key == "layer_types") return "\"full_attention\" for every layer";
  const FixedKey* const fixed = FindFixed(key);
  return fixed == nullptr ? "null" : fixed->value;
}

}  // namespace moeserve::huggingface
