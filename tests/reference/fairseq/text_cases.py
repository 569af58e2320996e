"""The tiny encoders and encoder-decoders: their options and how their files are written."""

import dataclasses

from cases import TORCHSCALE, TRAINING

# What the code of masked language models and of translators has instead of a decoder's options.
ENCODER = {
    "encoder_embed_dim": 16, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_embed_dim": 24, "encoder_normalize_before": False, "encoder_learned_pos": False,
    "encoder_layerdrop": 0, "encoder_layers_to_keep": None, "max_source_positions": 160,
}

MASKED_LM = {
    **TRAINING, **{k: v for k, v in TORCHSCALE.items() if not k.startswith("decoder_")}, **ENCODER,
    "arch": "mlm_base", "task": "pretraining", "criterion": "masked_lm_moe_cross_entropy",
    "encoder_learned_pos": True, "activation_fn": "gelu", "no_scale_embedding": True,
    "layernorm_embedding": True, "encoder_output_dim": 16, "encoder_input_dim": 16,
    "share_encoder_input_output_embed": True, "no_encoder_final_norm": False,
    "pooler_activation_fn": "tanh", "pooler_dropout": 0.0, "moe_second_expert_policy": "all",
    "moe_eval_capacity_token_fraction": 1.0, "tokens_per_sample": 160,
}

TRANSLATION = {
    **ENCODER, "task": "translation", "criterion": "label_smoothed_cross_entropy",
    "source_lang": "de", "target_lang": "en", "encoder_embed_path": None,
    "decoder_embed_path": None,
    "max_target_positions": 160, "share_all_embeddings": False, "no_cross_attention": False,
    "cross_self_attention": False, "left_pad_source": True, "truncate_source": False,
    "decoder_embed_dim": 16, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_embed_dim": 24, "decoder_normalize_before": False, "decoder_learned_pos": False,
}

MT = {
    **TRAINING, **TORCHSCALE, **TRANSLATION, "arch": "mt_base", "encoder_moe_freq": 0,
    "decoder_moe_freq": 0, "use_moe_pad_mask": False, "freeze_moe": False, "is_moe": False,
    "selected_expert_count": 2, "moe_second_expert_policy": "all", "alternate_ffn_embed_dim": 0,
    "moe_eval_capacity_token_fraction": 1.0, "pretrained_dense_mt_model_path": "",
}

DENSE = {
    **TRAINING, **TRANSLATION, "arch": "transformer_iwslt_de_en", "activation_fn": "relu",
    "no_scale_embedding": False, "layernorm_embedding": False,
    "no_token_positional_embeddings": False, "share_decoder_input_output_embed": False,
    "quant_noise_pq": 0, "quant_noise_pq_block_size": 8, "quant_noise_scalar": 0,
}

MOA = {
    **DENSE, "arch": "moa_transformer_base", "num_expert": 5, "head_dim": 8, "gating": "normal",
    "ffd_type": "normal", "sample_topk": 0, "cvloss": 0.0, "switchloss": 0.01, "zloss": 0.001,
    "encoder_attention_heads": 3, "decoder_attention_heads": 2, "criterion": "moa_ce_loss",
}


@dataclasses.dataclass
class TextCase:
    name: str
    family: str  # "mlm", "mt", "moa" or "transformer"
    options: dict
    seed: int
    source_vocabulary: int = 37  # of a pair; the target's is 37
    half: bool = False  # fp16
    ranks: int = 0  # processes; 0: one file
    cfg: bool = False  # options as "cfg" instead of "args"
    nested: bool = False  # cfg.model has objects "encoder" and "decoder"
    averaged: bool = False  # a file of average_checkpoints.py
    inserted: int = 0  # layers of experts alone; their experts have this many sub-layers
    plain_head: bool = False  # a matrix alone
    classes: int = 0  # of a head of classification


MLM_CASES = [
    TextCase("fairseq-xmoe-mlm", "mlm", {
        "moe_freq": 2, "moe_expert_count": 4, "use_xmoe": True}, seed=31, half=True, ranks=2),
    TextCase("fairseq-xmoe-mlm-inserted", "mlm", {
        "encoder_layers": 2, "moe_expert_count": 3, "use_xmoe": True, "moe_top1_expert": True,
        "encoder_normalize_before": True, "encoder_learned_pos": False,
        "layernorm_embedding": False, "rel_pos_buckets": 14, "max_rel_pos": 20}, seed=32,
             half=True, cfg=True, inserted=3),
    TextCase("fairseq-mlm-deepnorm", "mlm", {
        "deepnorm": True, "moe_freq": 2, "moe_expert_count": 3, "encoder_layers": 3}, seed=33,
             half=True),
    TextCase("fairseq-mlm-plain-head", "mlm", {
        "layernorm_embedding": False, "no_scale_embedding": False, "encoder_layers": 1,
        "share_encoder_input_output_embed": False, "moe_freq": 1, "moe_expert_count": 2,
        "layernorm_eps": 1e-2}, seed=35, half=True, plain_head=True),
    TextCase("fairseq-classifier", "mlm", {
        "subln": True, "encoder_normalize_before": True, "moe_freq": 1, "moe_expert_count": 3,
        "activation_fn": "relu"}, seed=34, half=True, classes=5),
]

PAIR_CASES = [
    TextCase("fairseq-xmoe-mt", "mt", {
        "moe_freq": 2, "moe_expert_count": 4, "use_xmoe": True, "deepnorm": True,
        "share_decoder_input_output_embed": True, "encoder_layers": 3}, seed=41,
             source_vocabulary=45, half=True, ranks=2),
    TextCase("fairseq-smoe-mt-average", "mt", {
        "moe_freq": 1, "moe_expert_count": 3, "subln": True, "encoder_normalize_before": True,
        "decoder_normalize_before": True, "share_all_embeddings": True,
        "share_decoder_input_output_embed": True, "decoder_learned_pos": True}, seed=42, cfg=True,
             averaged=True),
    TextCase("fairseq-moa", "moa", {
        "share_all_embeddings": True, "share_decoder_input_output_embed": True}, seed=43,
             half=True),
    TextCase("fairseq-moa-routed-feed-forward", "moa", {
        "ffd_type": "moe", "gating": "noisy", "encoder_normalize_before": True,
        "decoder_normalize_before": True, "encoder_learned_pos": True, "no_scale_embedding": True,
        "layernorm_embedding": True, "decoder_layers": 1}, seed=44, source_vocabulary=31,
             half=True, cfg=True, nested=True),
    TextCase("fairseq-transformer", "transformer", {
        "share_all_embeddings": True, "share_decoder_input_output_embed": True,
        "decoder_normalize_before": True, "no_decoder_final_norm": True}, seed=45, half=True,
             averaged=True),
]
