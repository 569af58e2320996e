"""The tiny encoders of make_encoder_family_goldens.py."""

import dataclasses


@dataclasses.dataclass
class Case:
    name: str
    family: str
    # The class: "MaskedLM", "SequenceClassification", "TokenClassification", "Model", or
    # "TextEncoding", which is the encoder of an encoder-decoder.
    kind: str
    config: dict
    pooling: str = "mean"  # of "Model"
    types: int = 1


BERT = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=48, max_position_embeddings=160, pad_token_id=0)
ROBERTA = {**BERT, "max_position_embeddings": 162, "pad_token_id": 1, "type_vocab_size": 1,
           "bos_token_id": 0, "eos_token_id": 2}
MODERN = dict(vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
              intermediate_size=40, max_position_embeddings=160, pad_token_id=0, bos_token_id=1,
              eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=10)
NOMIC = dict(model_type="nomic_bert", vocab_size=96, n_embd=32, n_layer=4, n_head=4, n_inner=48,
             n_positions=160, type_vocab_size=2, layer_norm_epsilon=1e-5, rotary_emb_base=1000,
             rotary_emb_fraction=1.0, rotary_emb_interleaved=False, qkv_proj_bias=True,
             mlp_fc1_bias=True, mlp_fc2_bias=True, activation_function="gelu", prenorm=False)
PRIVACY = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=2, head_dim=8, intermediate_size=16, num_local_experts=6,
               num_experts_per_tok=2, sliding_window=7, max_position_embeddings=160,
               pad_token_id=0, eos_token_id=2, bos_token_id=1)
QWEN = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, intermediate_size=48, max_position_embeddings=160,
            bos_token_id=1, eos_token_id=2, pad_token_id=0)
QWEN_MOE = {**QWEN, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
T5 = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
          relative_attention_num_buckets=8, relative_attention_max_distance=20, pad_token_id=0,
          eos_token_id=1)
GEMMA = {**QWEN, "use_bidirectional_attention": True, "sliding_window": 12,
         "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}

CASES = [
    Case("bert-masked-lm", "bert", "MaskedLM", BERT, types=2),
    Case("bert-classifier", "bert", "SequenceClassification",
         {**BERT, "num_labels": 3, "hidden_act": "relu"}, types=2),
    Case("bert-vectors", "bert", "Model", {**BERT, "hidden_act": "gelu_new"}, types=2),
    Case("bert-answers", "bert", "QuestionAnswering", BERT, types=2),
    Case("roberta-masked-lm", "roberta", "MaskedLM", ROBERTA),
    Case("roberta-cross-encoder", "roberta", "SequenceClassification", {**ROBERTA, "num_labels": 1}),
    Case("xlm-roberta-names", "xlm-roberta", "TokenClassification", {**ROBERTA, "num_labels": 5}),
    Case("xlm-roberta-vectors", "xlm-roberta", "Model", ROBERTA),
    Case("camembert-masked-lm", "camembert", "MaskedLM", ROBERTA),
    Case("camembert-classifier", "camembert", "SequenceClassification", {**ROBERTA, "num_labels": 2}),
    Case("modernbert-masked-lm", "modernbert", "MaskedLM", MODERN),
    Case("modernbert-mean-classifier", "modernbert", "SequenceClassification",
         {**MODERN, "classifier_pooling": "mean", "num_labels": 4, "norm_bias": True,
          "mlp_bias": True, "attention_bias": True, "classifier_bias": True}),
    Case("modernbert-names", "modernbert", "TokenClassification", {**MODERN, "num_labels": 3}),
    Case("modernbert-vectors", "modernbert", "Model", MODERN),
    Case("nomic-experts", "nomic", "Model",
         {**NOMIC, "num_experts": 6, "moe_top_k": 2, "moe_every_n_layers": 2}, types=2),
    Case("nomic-experts-third-layer", "nomic", "Model",
         {**NOMIC, "num_experts": 4, "moe_top_k": 1, "moe_every_n_layers": 3, "qkv_proj_bias": False,
          "rotary_emb_fraction": 0.5}, types=2),
    Case("nomic-dense", "nomic", "Model",
         {**NOMIC, "activation_function": "swiglu", "qkv_proj_bias": False, "mlp_fc1_bias": False,
          "mlp_fc2_bias": False}, types=2),
    Case("nomic-transformers", "nomic_bert", "Model",
         {**BERT, "hidden_act": "silu", "rope_parameters": {"rope_type": "default",
                                                            "rope_theta": 1000.0}}, types=2),
    Case("privacy-filter", "openai_privacy_filter", "TokenClassification",
         {**PRIVACY, "num_labels": 9}),
    Case("privacy-filter-one-head", "openai_privacy_filter", "TokenClassification",
         {**PRIVACY, "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 3,
          "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "num_labels": 3}),
    Case("gemma3-bidirectional", "gemma3_text", "Model", GEMMA),
    Case("gemma3-bidirectional-caps", "gemma3_text", "Model",
         {**GEMMA, "num_key_value_heads": 1, "sliding_window": 20}),
    Case("qwen3-vectors", "qwen3", "Model", QWEN, pooling="last"),
    Case("qwen3-reranker", "qwen3", "SequenceClassification", {**QWEN, "num_labels": 1}),
    Case("qwen3-moe-classifier", "qwen3_moe", "SequenceClassification",
         {**QWEN_MOE, "num_labels": 3}),
    Case("qwen3-moe-names", "qwen3_moe", "TokenClassification", {**QWEN_MOE, "num_labels": 4}),
    Case("t5-encoder", "t5", "TextEncoding", {**T5, "feed_forward_proj": "relu"}),
    Case("umt5-encoder", "umt5", "TextEncoding", {**T5, "feed_forward_proj": "gated-gelu"}),
]
