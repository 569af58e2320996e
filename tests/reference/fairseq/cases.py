"""The tiny models: their options and how their files are written."""

import dataclasses

# Options of every model of torchscale's task "language_modeling" that have nothing to do with the
# model, as an old version of fairseq stores them.
TRAINING = {
    "no_progress_bar": False, "log_interval": 100, "log_format": "simple", "seed": 1, "cpu": False,
    "fp16": True, "memory_efficient_fp16": True, "fp16_init_scale": 4, "fp16_scale_window": None,
    "user_dir": "unilm", "criterion": "moe_cross_entropy", "moe_gate_loss_wt": 0.01,
    "moe_gate_loss_combine_method": "sum", "moe_normalize_expert_grad": "sqrt_world_size",
    "optimizer": "adam", "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "clip_norm": 0.1,
    "weight_decay": 0.01, "lr": [0.0005], "lr_scheduler": "polynomial_decay", "update_freq": [4],
    "warmup_updates": 750, "max_update": 50000, "data": "/data/text", "save_dir": "/checkpoints",
    "task": "language_modeling", "sample_break_mode": "none", "tokens_per_sample": 40,
    "batch_size": 8, "num_workers": 2, "ddp_backend": "no_c10d", "distributed_world_size": 2,
    "distributed_rank": 0, "distributed_port": -1, "device_id": 0, "local_rank": 0,
    "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.0, "relu_dropout": 0.0,
    "decoder_output_dim": 16, "decoder_input_dim": 16, "checkpoint_activations": False,
    "offload_activations": False, "min_params_to_wrap": 100000000, "decoder_layerdrop": 0.0,
    "decoder_layers_to_keep": None, "base_layers": 0, "base_sublayers": 1, "base_shuffle": False,
    "adaptive_softmax_cutoff": None, "adaptive_softmax_dropout": 0, "adaptive_softmax_factor": 4,
    "adaptive_input": False, "adaptive_input_factor": 4, "adaptive_input_cutoff": None,
    "tie_adaptive_weights": False, "tie_adaptive_proj": False, "character_embeddings": False,
    "no_decoder_final_norm": False, "add_bos_token": False, "max_target_positions": None,
    "record_a2a_perf_stats": False, "dummy_a2a": False, "moe_batch_prioritized_routing": False,
    "moe_expert_ffn_dim": None, "tpu": False, "eos": 2, "pad": 1, "unk": 3, "no_seed_provided": False,
}

# The options of torchscale's decoders at their defaults.
TORCHSCALE = {
    "arch": "lm_base", "decoder_embed_dim": 16, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_embed_dim": 24, "decoder_normalize_before": True, "activation_fn": "relu",
    "no_scale_embedding": False, "layernorm_embedding": False, "decoder_learned_pos": False,
    "no_token_positional_embeddings": False, "share_decoder_input_output_embed": False,
    "moe_freq": 0, "moe_expert_count": 0, "moe_gating_use_fp32": True, "moe_top1_expert": False,
    "moe_second_expert_policy": "random", "moe_normalize_gate_prob_before_dropping": True,
    "moe_eval_capacity_token_fraction": -1.0, "use_xmoe": False, "subln": False, "deepnorm": False,
    "rel_pos_buckets": 0, "max_rel_pos": 0, "xpos_rel_pos": False, "xpos_scale_base": 512,
    "flash_attention": False, "seq_parallel": False, "segment_length": "", "dilated_ratio": "",
}

# The options that the fork with MH-MoE adds, as its script sets them.
FORK = {
    "arch": "gpt_small_v2", "activation_fn": "silu", "no_scale_embedding": True,
    "no_token_positional_embeddings": True, "decoder_learned_pos": True, "flash_attention": True,
    "sope_rel_pos": False, "scale_length": 2048, "input_bits": 32, "weight_bits": 32,
    "input_quant_method": "absmax_per_token", "weight_quant_method": "absmean",
    "weight_featurewise": False, "bmt": False, "model_parallel_size": 1, "group_norm_size": 1,
    "quant_ffn_only": False, "hadamard_group": -1, "blockwise_quant": False,
    "resume_from_fp16": False, "smoothquant": False, "smoothquant_alpha": 0.5, "binary_attn": False,
    "weight_blocksize": "-1,-1", "grad_act": False, "weight_blockscale": "none",
    "smoothquant_bitnet": False, "input_bits_post": 8, "cal_input_stat": "none",
    "rotary_embed": True, "no_bias": True, "rms_norm": True, "binary_query": False,
    "binary_key": False, "moe_second_expert_threshold": 0.0, "moe_second_expert_threshold_warmup": 0,
    "moe_second_expert_threshold_init": 1e-07, "key_bits": 1, "key_quant_method": "bwn",
    "moe_expert_noise_threshold_warmup": 0, "moe_expert_noise_threshold_init": 1e-07,
    "moe_expert_noise_threshold": 1e-07, "moe_ffn_dim": -1, "moe_top_k": 2, "n_kv_heads": 4,
    "pretrained_dense_ckpt_path": "", "binary_routing": False, "key_norm": False, "ffn_bits": -1,
    "ffn_quant_method": "", "attn_bits": 32, "attn_quant_method": "attn_absmax_per_token",
    "fp8": False, "quip_sharp": False, "codebook": "E8P12", "codebook_version": 0, "codesz": 8,
    "no_fused": False, "idx_dtype": "torch.int16", "lora_rank": 0, "model_version": 0,
    "outlier_channel_split": False, "packsz": 1, "rescale_WH": False, "binary_kv": False,
    "absmean_alpha": 1.0, "fc2_bits": -1, "quant_ffn_output": False, "input_absmean_alpha": 1.0,
    "fc2_quant_method": "", "quant_before_rope": False, "query_bits": 32,
    "attn_input_absmean_scale": 1.0, "attn_quant_symmetric": False,
    "use_quant_for_activation": False, "fc2_input_absmean_scale": -1.0, "negative_slope": -1.0,
    "sparse_blocksize": 16, "fc2_sparse_blocksize": -1, "sparse_ratio": 0.4,
    "fc2_sparse_ratio": -1.0, "relu_squared": False, "glu": False, "nozero_rmsnorm": False,
    "sparse_alpha": 1.0, "sparse_before_quant": False, "moe_lora_rank": -1,
    "partial_rotary_factor": 1.0, "kv_quant_group": 1, "mhmoe_heads_number": 1,
    "mhmoe_head_proj": False, "mhmoe_merge_proj": False, "head_ffn_num": 1, "ffn_head_proj": False,
    "ffn_merge_proj": False, "moe_ffn_dim_1": -1, "moe_ffn_dim_2": -1, "pyra_dim": "",
    "spm_model": "sentencepiece.bpe.model", "tiktoken_model": "", "dict_path": "",
}

# The options of fairseq's transformer_lm at their defaults.
TRANSFORMER_LM = {
    "arch": "transformer_lm", "decoder_embed_dim": 16, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_embed_dim": 24, "decoder_normalize_before": True,
    "activation_fn": "relu", "no_scale_embedding": False, "layernorm_embedding": False,
    "decoder_learned_pos": False, "no_token_positional_embeddings": False,
    "share_decoder_input_output_embed": False, "char_embedder_highway_layers": 2,
    "character_embedding_dim": 4, "scale_fc": False, "scale_attn": False, "scale_heads": False,
    "scale_resids": False, "quant_noise_pq": 0, "quant_noise_pq_block_size": 8,
    "quant_noise_scalar": 0, "decoder_xformers_att_config": None,
}

MOA = {
    "arch": "moa_transformer_base", "decoder_embed_dim": 16, "decoder_layers": 2,
    "decoder_attention_heads": 3, "num_expert": 5, "head_dim": 8, "decoder_ffn_embed_dim": 24,
    "decoder_normalize_before": False, "activation_fn": "relu", "gating": "normal",
    "ffd_type": "normal", "sample_topk": 0, "cvloss": 0.0, "switchloss": 0.01, "zloss": 0.001,
    "no_scale_embedding": False, "layernorm_embedding": False, "decoder_learned_pos": False,
    "no_token_positional_embeddings": False, "share_decoder_input_output_embed": True,
    "share_all_embeddings": True, "max_target_positions": 40, "max_source_positions": 40,
    "no_cross_attention": True, "cross_self_attention": False, "decoder_embed_path": None,
    "encoder_embed_dim": 16, "encoder_layers": 2, "encoder_attention_heads": 3,
    "quant_noise_pq": 0, "quant_noise_pq_block_size": 8, "quant_noise_scalar": 0,
}


@dataclasses.dataclass
class Case:
    name: str
    family: str  # "torchscale", "mh-moe", "moa" or "transformer-lm"
    options: dict
    seed: int
    half: bool = False  # fp16
    ranks: int = 0  # processes; 0: one file
    cfg: bool = False  # options as "cfg" instead of "args"
    nested: bool = False  # cfg.model has an object "decoder"
    bare: bool = False  # only the tensors, without "decoder."; options in config.json
    wrapper: tuple = ()  # (what names begin with, what they begin with in wrapped modules)
    strided: bool = False  # views, transposed and shared storages
    final_norm: bool = False  # a last norm also if norms are after layers


CASES = [
    Case("xmoe-two-ranks", "torchscale", {
        "moe_freq": 2, "moe_expert_count": 4, "use_xmoe": True, "moe_second_expert_policy":
        "random", "share_decoder_input_output_embed": True}, seed=1, half=True, ranks=2),
    Case("xmoe-top1-subln-learned", "torchscale", {
        "moe_freq": 1, "moe_expert_count": 4, "use_xmoe": True, "moe_top1_expert": True,
        "subln": True, "activation_fn": "gelu", "decoder_learned_pos": True,
        "layernorm_embedding": True, "moe_eval_capacity_token_fraction": 0.25}, seed=2, ranks=4,
         cfg=True),
    Case("smoe-more-ranks-than-experts", "torchscale", {
        "moe_freq": 2, "moe_expert_count": 2, "moe_second_expert_policy": "all",
        "activation_fn": "swish", "no_scale_embedding": True,
        "moe_eval_capacity_token_fraction": 1.0}, seed=3, half=True, ranks=4),
    Case("smoe-post-norm-one-rank", "torchscale", {
        "moe_freq": 2, "moe_expert_count": 3, "decoder_normalize_before": False,
        "decoder_layers": 3, "no_token_positional_embeddings": True,
        "moe_second_expert_policy": "sampling", "moe_gating_use_fp32": False}, seed=4, ranks=1,
         wrapper=("decoder.", "module.decoder."), strided=True),
    Case("smoe-one-file", "torchscale", {
        "moe_freq": 1, "moe_expert_count": 5, "subln": True, "activation_fn": "gelu",
        "share_decoder_input_output_embed": True}, seed=5, half=True, strided=True),
    Case("dense-deepnorm", "torchscale", {
        "deepnorm": True, "decoder_normalize_before": False, "decoder_layers": 3,
        "activation_fn": "gelu"}, seed=6, cfg=True, wrapper=(
             "decoder.layers.0.", "decoder.layers.0._fsdp_wrapped_module._fpw_module.")),
    Case("dense-bare", "torchscale", {
        "subln": True, "no_scale_embedding": True, "share_decoder_input_output_embed": True,
        "decoder_learned_pos": True, "layernorm_eps": 1e-3, "max_target_positions": 40}, seed=7,
         bare=True),
    Case("mhmoe-four-heads", "mh-moe", {
        "mhmoe_heads_number": 4, "moe_freq": 2, "moe_expert_count": 8, "moe_top_k": 2,
        "share_decoder_input_output_embed": True}, seed=8, half=True, ranks=2, strided=True),
    Case("mhmoe-xmoe-kv-heads", "mh-moe", {
        "mhmoe_heads_number": 2, "moe_freq": 1, "moe_expert_count": 4, "moe_top_k": 3,
        "use_xmoe": True, "n_kv_heads": 2, "partial_rotary_factor": 0.5, "rms_norm": False,
        "no_bias": False, "activation_fn": "gelu", "moe_ffn_dim": 10}, seed=9, half=True, ranks=4,
         cfg=True),
    Case("mhmoe-one-head-relu", "mh-moe", {
        "moe_freq": 2, "moe_expert_count": 3, "moe_top_k": 1, "activation_fn": "relu",
        "rotary_embed": False, "subln": True, "decoder_attention_heads": 2, "n_kv_heads": 1},
         seed=10, ranks=1),
    Case("mhmoe-dense-glu", "mh-moe", {"activation_fn": "gelu", "glu": True}, seed=11, half=True),
    Case("moa", "moa", {}, seed=12, strided=True),
    Case("moa-routed-feed-forward", "moa", {
        "ffd_type": "moe", "num_expert": 6, "decoder_attention_heads": 2, "gating": "noisy",
        "decoder_normalize_before": True, "decoder_learned_pos": True,
        "activation_fn": "gelu_accurate", "share_all_embeddings": False,
        "share_decoder_input_output_embed": False, "layernorm_embedding": True,
        "no_scale_embedding": True}, seed=13, half=True, cfg=True, nested=True),
    Case("xmoe-xpos", "torchscale", {
        "xpos_rel_pos": True, "xpos_scale_base": 8, "no_token_positional_embeddings": True,
        "moe_freq": 2, "moe_expert_count": 4, "use_xmoe": True, "subln": True,
        "activation_fn": "gelu"}, seed=14, half=True),
    Case("dense-relative-bias", "torchscale", {
        "rel_pos_buckets": 14, "max_rel_pos": 20, "activation_fn": "gelu"}, seed=15, cfg=True),
    Case("smoe-deepnorm-final", "torchscale", {
        "deepnorm": True, "decoder_normalize_before": False, "moe_freq": 2, "moe_expert_count": 3,
        "layernorm_eps": 1e-2}, seed=16, half=True, final_norm=True),
    Case("transformer-lm-gpt", "transformer-lm", {
        "activation_fn": "gelu", "share_decoder_input_output_embed": True,
        "decoder_learned_pos": True}, seed=17, half=True, cfg=True),
    Case("transformer-lm-no-final-norm", "transformer-lm", {
        "no_decoder_final_norm": True, "layernorm_embedding": True}, seed=18),
    Case("transformer-lm-post-norm", "transformer-lm", {
        "decoder_normalize_before": False, "activation_fn": "gelu_fast"}, seed=19, strided=True),
]
