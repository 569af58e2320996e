"""The tiny models of make_family_goldens.py.

Each family has several configurations: a head_dim that is not hidden_size / heads, one kv head, as
many selected experts as there are, dense layers before routed ones, shared experts, tied and untied
embeddings, every rope scaling that the family ships, windows shorter than the prompts, fused and
separate tensors, and shards.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass
class Case:
    name: str
    family: str
    config: dict
    seed: int = 0
    save: dict = dataclasses.field(default_factory=dict)  # options of save_pretrained()
    set: dict = dataclasses.field(default_factory=dict)  # parameters with given values
    file_config: dict = dataclasses.field(default_factory=dict)  # keys replaced in config.json
    drop: tuple = ()  # keys removed from config.json
    torch_file: bool = False  # writes pytorch_model.bin
    fp8: tuple = ()  # stores the layers' matrices as FP8 with a scale for blocks of [rows, columns]
    # Writes a wrapper: its model_type, what its tensors' names have in the place of "model.", and how
    # the name of a tensor of another part begins.
    wrap: tuple = ()
    mxfp4: bool = False  # stores the experts of gpt-oss as MXFP4
    # If set, the last layer is a prediction layer (prediction.py) whose names in files are numbered
    # like those of layers ("numbered") or have a prefix of their own ("separate").
    prediction: str = ""
    replaced: dict = dataclasses.field(default_factory=dict)  # experts that are vectors, by layer
    named_vectors: bool = False  # these vectors have names of their own
    edit: Callable | None = None  # returns {name: tensor} of the file, given that of transformers


BASE = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
            pad_token_id=0)
FUSED = dict(save_original_format=False)
SHARDS = dict(max_shard_size="20KB")

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 1000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "rope_theta": 10000.0}
YARN_FREE = {**YARN, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
             "attention_factor": 1.25}


def rope(parameters):
    return {"rope_parameters": parameters}


CASES = []


def add(name, family, save=None, seed=None, **config):
    """Adds a case. Without a seed, its place in this file decides its weights; other files give one.
    """
    extra = {key: config.pop(key) for key in ("set", "file_config", "drop", "torch_file", "fp8",
                                              "mxfp4", "edit", "wrap", "replaced", "named_vectors",
                                              "prediction")
             if key in config}
    base = {**BASE, **config}
    base = {key: value for key, value in base.items() if value is not ...}
    CASES.append(Case(name, family, base, seed=seed or len(CASES) + 1, save=save or {}, **extra))


# Dense models.
DENSE = dict(intermediate_size=48)
add("llama", "llama", **DENSE)
add("llama-biases-tied", "llama", **DENSE, attention_bias=True, mlp_bias=True, head_dim=12,
    num_key_value_heads=1, tie_word_embeddings=True, **rope(LINEAR))
add("llama-llama3-shards", "llama", SHARDS, **DENSE, num_key_value_heads=4, **rope(LLAMA3))
add("llama-old-keys", "llama", **DENSE, drop=("rope_parameters", "dtype"),
    file_config={"rope_theta": 5000.0, "torch_dtype": "bfloat16",
                 "rope_scaling": {"type": "linear", "factor": 2.0}},
    **rope({"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}))
add("mistral", "mistral", **DENSE, sliding_window=None)
add("mistral-window", "mistral", **DENSE, sliding_window=8, head_dim=16)
add("mistral-yarn", "mistral", **DENSE, sliding_window=None, **rope(YARN))
add("granite", "granite", **DENSE, embedding_multiplier=3.0, attention_multiplier=0.2,
    residual_multiplier=0.4, logits_scaling=2.0)
add("granite-biases-tied", "granite", **DENSE, attention_bias=True, mlp_bias=True,
    tie_word_embeddings=True, attention_multiplier=0.125)
add("qwen2", "qwen2", **DENSE)
add("qwen2-window-tied", "qwen2", **DENSE, use_sliding_window=True, sliding_window=6,
    max_window_layers=1, num_hidden_layers=3, tie_word_embeddings=True)
add("qwen2-yarn", "qwen2", **DENSE, num_key_value_heads=1, **rope(YARN_FREE))
add("qwen3", "qwen3", **DENSE, head_dim=12)
add("qwen3-window-biases", "qwen3", **DENSE, head_dim=8, attention_bias=True,
    use_sliding_window=True, sliding_window=6, max_window_layers=1)
add("qwen3-yarn-tied", "qwen3", **DENSE, head_dim=16, num_key_value_heads=1,
    tie_word_embeddings=True, **rope(YARN))
add("olmo2", "olmo2", **DENSE)
add("olmo2-linear-tied", "olmo2", **DENSE, num_key_value_heads=4, tie_word_embeddings=True,
    **rope(LINEAR))
add("olmo3", "olmo3", **DENSE, num_hidden_layers=4, sliding_window=6)
add("olmo3-yarn", "olmo3", **DENSE, num_hidden_layers=3, sliding_window=8,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    rope_parameters={"full_attention": YARN,
                     "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})

# Mixtures of experts.
add("mixtral", "mixtral", intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
add("mixtral-fused-window", "mixtral", FUSED, intermediate_size=24, num_local_experts=4,
    num_experts_per_tok=4, sliding_window=8, head_dim=12, num_key_value_heads=1)
add("mixtral-shards-tied", "mixtral", SHARDS, intermediate_size=16, num_local_experts=6,
    num_experts_per_tok=1, tie_word_embeddings=True, **rope(LINEAR))
add("olmoe", "olmoe", intermediate_size=16, num_experts=8, num_experts_per_tok=3)
add("olmoe-renormalized-fused", "olmoe", FUSED, intermediate_size=16, num_experts=4,
    num_experts_per_tok=2, norm_topk_prob=True, num_key_value_heads=1)
add("olmoe-all-biases", "olmoe", intermediate_size=16, num_experts=4, num_experts_per_tok=4,
    attention_bias=True, tie_word_embeddings=True)
QWEN2_MOE = dict(intermediate_size=48, moe_intermediate_size=16,
                 shared_expert_intermediate_size=24, num_experts=6, num_experts_per_tok=3)
add("qwen2-moe", "qwen2_moe", **QWEN2_MOE)
add("qwen2-moe-dense-first-window", "qwen2_moe", **QWEN2_MOE, num_hidden_layers=3,
    mlp_only_layers=[0], norm_topk_prob=True, use_sliding_window=True, sliding_window=6,
    max_window_layers=2)
add("qwen2-moe-every-second-fused", "qwen2_moe", FUSED, **QWEN2_MOE, decoder_sparse_step=2,
    qkv_bias=False, num_key_value_heads=1, tie_word_embeddings=True, **rope(YARN))
QWEN3_MOE = dict(intermediate_size=48, moe_intermediate_size=16, num_experts=8,
                 num_experts_per_tok=2, head_dim=12)
add("qwen3-moe", "qwen3_moe", **QWEN3_MOE, norm_topk_prob=True)
add("qwen3-moe-dense-first", "qwen3_moe", SHARDS, **QWEN3_MOE, mlp_only_layers=[0],
    attention_bias=True, num_key_value_heads=1)
add("qwen3-moe-yarn-fused", "qwen3_moe", FUSED, **QWEN3_MOE, norm_topk_prob=True,
    tie_word_embeddings=True, use_sliding_window=True, sliding_window=8, **rope(YARN))
GRANITE = dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
               logits_scaling=2.0, intermediate_size=16, num_local_experts=6,
               num_experts_per_tok=2)
add("granitemoe", "granitemoe", **GRANITE)
add("granitemoe-all", "granitemoe", **{**GRANITE, "num_experts_per_tok": 6}, attention_bias=True,
    num_key_value_heads=1, tie_word_embeddings=True)
add("granitemoe-fused", "granitemoe", FUSED, **GRANITE, **rope(LINEAR))
add("granitemoeshared", "granitemoeshared", **GRANITE, shared_intermediate_size=24)
add("granitemoeshared-none", "granitemoeshared", **GRANITE, shared_intermediate_size=0)
add("granitemoehybrid", "granitemoehybrid", **GRANITE, shared_intermediate_size=24,
    layer_types=["attention", "attention"], mamba_n_heads=4, mamba_expand=2,
    position_embedding_type="rope")
add("granitemoehybrid-nope", "granitemoehybrid", **GRANITE, shared_intermediate_size=24,
    layer_types=["attention", "attention"], mamba_n_heads=4, mamba_expand=2)
add("granitemoehybrid-dense", "granitemoehybrid", **{**GRANITE, "num_local_experts": 0},
    shared_intermediate_size=40, layer_types=["attention", "attention"], mamba_n_heads=4,
    mamba_expand=2, tie_word_embeddings=True)
add("flex-olmo", "flex_olmo", intermediate_size=16, num_experts=5, num_experts_per_tok=3)
add("flex-olmo-renormalized", "flex_olmo", FUSED, intermediate_size=16, num_experts=4,
    num_experts_per_tok=4, norm_topk_prob=True, num_key_value_heads=4)
JETMOE = dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, kv_channels=8,
              num_attention_heads=...)
add("jetmoe", "jetmoe", **JETMOE)
add("jetmoe-one-head-eps", "jetmoe", **{**JETMOE, "num_experts_per_tok": 1}, rms_norm_eps=1e-3,
    num_key_value_heads=1, tie_word_embeddings=False)
add("jetmoe-all", "jetmoe", SHARDS, **{**JETMOE, "num_experts_per_tok": 4}, num_key_value_heads=4)
GLM = dict(intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8,
           num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, num_mtp_layers=0,
           head_dim=8)
add("glm4-moe", "glm4_moe", **GLM, routed_scaling_factor=2.5)
add("glm4-moe-groups", "glm4_moe", **{**GLM, "first_k_dense_replace": 0, "n_shared_experts": 2},
    n_group=4, topk_group=2, attention_bias=True, use_qk_norm=True, norm_topk_prob=False)
add("glm4-moe-tied-yarn", "glm4_moe", FUSED, **GLM, tie_word_embeddings=True,
    num_key_value_heads=1, rope_parameters={**YARN, "partial_rotary_factor": 0.5})
DOTS = dict(intermediate_size=48, moe_intermediate_size=16, n_routed_experts=6,
            num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=1,
            sliding_window=None)
add("dots1", "dots1", **DOTS, norm_topk_prob=True, routed_scaling_factor=2.5)
add("dots1-window", "dots1", SHARDS, **{**DOTS, "sliding_window": 6}, max_window_layers=1,
    head_dim=12, n_group=3, topk_group=2)
add("dots1-all", "dots1", **{**DOTS, "num_experts_per_tok": 6, "first_k_dense_replace": 0},
    tie_word_embeddings=True, attention_bias=True, **rope(LINEAR))
MINIMAX = dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=3, head_dim=12)
add("minimax-m2", "minimax_m2", **MINIMAX)
add("minimax-m2-partial-fused", "minimax_m2", FUSED, **MINIMAX, num_key_value_heads=1,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})
add("minimax-m2-all-tied", "minimax_m2", **{**MINIMAX, "num_experts_per_tok": 8},
    tie_word_embeddings=True)
add("ernie4-5", "ernie4_5", **DENSE, head_dim=12)
add("ernie4-5-biases", "ernie4_5", **DENSE, head_dim=8, use_bias=True, tie_word_embeddings=False,
    num_key_value_heads=1)
ERNIE = dict(intermediate_size=48, moe_intermediate_size=16, moe_num_experts=6, moe_k=2,
             moe_num_shared_experts=2, moe_layer_start_index=1)
add("ernie4-5-moe", "ernie4_5_moe", **ERNIE, tie_word_embeddings=False)
add("ernie4-5-moe-none-shared", "ernie4_5_moe",
    **{**ERNIE, "moe_num_shared_experts": 0, "moe_layer_start_index": 0}, use_bias=False)
add("ernie4-5-moe-interval", "ernie4_5_moe", FUSED, **{**ERNIE, "moe_layer_start_index": 0},
    num_hidden_layers=4, moe_layer_interval=2, moe_layer_end_index=2, num_key_value_heads=1)
add("gemma", "gemma", **DENSE, head_dim=12)
add("gemma-biases-one-head", "gemma", **DENSE, head_dim=8, attention_bias=True,
    num_key_value_heads=1, tie_word_embeddings=False)
add("gemma-old-gelu", "gemma", **DENSE, head_dim=16, file_config={"hidden_act": "gelu"})
GEMMA3 = dict(intermediate_size=48, head_dim=12, sliding_window=6, query_pre_attn_scalar=10)
add("gemma3", "gemma3_text", **GEMMA3, num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"])
add("gemma3-linear", "gemma3_text", **GEMMA3, num_hidden_layers=2, num_key_value_heads=1,
    layer_types=["full_attention", "sliding_attention"],
    rope_parameters={"full_attention": {**LINEAR, "rope_theta": 1000.0},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}})
add("gemma3-old-keys", "gemma3_text", **GEMMA3, num_hidden_layers=6,
    drop=("rope_parameters", "layer_types", "dtype"), tie_word_embeddings=False,
    file_config={"rope_theta": 1000.0, "rope_local_base_freq": 300.0, "sliding_window_pattern": 3,
                 "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    rope_parameters={"full_attention": {**LINEAR, "rope_theta": 1000.0},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}})
add("phi3", "phi3", **DENSE)
add("phi3-window-partial", "phi3", **DENSE, sliding_window=8, num_key_value_heads=1,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5})
add("phi3-tied", "phi3", SHARDS, **DENSE, num_key_value_heads=4, tie_word_embeddings=True)

# The older container.
add("mixtral-torch-file", "mixtral", intermediate_size=24, num_local_experts=4,
    num_experts_per_tok=2, torch_file=True)

# Not a part of transformers: see dynamic_moe.py.
DYNAMIC = dict(intermediate_size=16, num_key_value_heads=4, num_experts=6, top_p_threshold=0.5,
               expert_frequency=2, num_hidden_layers=3)
add("dynamic-moe", "dynamic_moe", **DYNAMIC)
add("dynamic-moe-every-layer", "dynamic_moe", **{**DYNAMIC, "expert_frequency": 1,
                                                 "top_p_threshold": 0.75})
add("dynamic-moe-one-expert", "dynamic_moe", **{**DYNAMIC, "top_p_threshold": 0.05})

# Third configurations.
add("granite-one-head-linear", "granite", SHARDS, **DENSE, num_key_value_heads=1,
    attention_multiplier=0.3, logits_scaling=0.5, **rope(LINEAR))
add("olmo2-one-head-yarn", "olmo2", **DENSE, num_key_value_heads=1, **rope(YARN))
add("olmo3-tied-full", "olmo3", **DENSE, num_key_value_heads=1, tie_word_embeddings=True,
    layer_types=["full_attention", "full_attention"])
add("granitemoeshared-all-fused", "granitemoeshared", FUSED,
    **{**GRANITE, "num_experts_per_tok": 6}, shared_intermediate_size=16, attention_bias=True,
    num_key_value_heads=1, tie_word_embeddings=True)
add("flex-olmo-one-head-linear", "flex_olmo", SHARDS, intermediate_size=16, num_experts=4,
    num_experts_per_tok=1, num_key_value_heads=1, tie_word_embeddings=True, **rope(LINEAR))
add("ernie4-5-linear", "ernie4_5", **DENSE, head_dim=16, num_key_value_heads=4, **rope(LINEAR))

# Soft caps, sinks, clamped activations, block-scaled weights.
GEMMA2 = dict(intermediate_size=48, head_dim=12, sliding_window=6, query_pre_attn_scalar=10)
add("gemma2", "gemma2", **GEMMA2, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
add("gemma2-one-head-untied", "gemma2", **GEMMA2, num_key_value_heads=1,
    tie_word_embeddings=False, num_hidden_layers=3, attn_logit_softcapping=None,
    final_logit_softcapping=2.0)
add("gemma2-all-sliding-linear", "gemma2", SHARDS, **GEMMA2, attn_logit_softcapping=1.0,
    final_logit_softcapping=None, layer_types=["sliding_attention", "sliding_attention"],
    file_config={"final_logit_softcapping": None}, **rope(LINEAR))
add("gemma3-caps", "gemma3_text", **GEMMA3, layer_types=["sliding_attention", "full_attention"],
    final_logit_softcapping=3.0)
GPT_OSS = dict(intermediate_size=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=6,
               head_dim=8, swiglu_limit=0.8, rope_parameters=YARN_FREE)
add("gpt-oss", "gpt_oss", **GPT_OSS)
add("gpt-oss-all-experts-one-head", "gpt_oss", SHARDS, **{**GPT_OSS, "num_experts_per_tok": 6},
    num_key_value_heads=1, attention_bias=False, swiglu_alpha=1.1, tie_word_embeddings=True,
    num_hidden_layers=3)
add("gpt-oss-mxfp4", "gpt_oss", SHARDS, mxfp4=True, hidden_size=96, **{**GPT_OSS, "intermediate_size": 32},
    layer_types=["full_attention", "sliding_attention"])
add("qwen3-moe-fp8", "qwen3_moe", fp8=(12, 12), intermediate_size=40, moe_intermediate_size=24,
    num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, head_dim=12, decoder_sparse_step=2)
add("llama-fp8-shards", "llama", SHARDS, fp8=(128, 128), **DENSE, attention_bias=True)

# Latent attention.
MLA = dict(intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8,
           num_experts_per_tok=3, n_shared_experts=1, kv_lora_rank=20, q_lora_rank=24,
           qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, num_key_value_heads=4,
           first_k_dense_replace=1, num_hidden_layers=3, routed_scaling_factor=1.5)
YARN_ALL = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
add("deepseek-v3", "deepseek_v3", **MLA, n_group=4, topk_group=2, **rope(YARN_ALL))
add("deepseek-v3-direct-query-half", "deepseek_v3", SHARDS, **{**MLA, "q_lora_rank": None},
    n_group=1, topk_group=1, rope_interleave=False, tie_word_embeddings=True,
    norm_topk_prob=False, num_nextn_predict_layers=1)
add("deepseek-v3-biases-fp8", "deepseek_v3", fp8=(8, 8), **{**MLA, "first_k_dense_replace": 0},
    n_group=2, topk_group=1, attention_bias=True)
add("kimi-k2", "deepseek_v3", **{**MLA, "num_experts_per_tok": 8, "v_head_dim": 16},
    n_group=1, topk_group=1, file_config={"model_type": "kimi_k2", "seq_aux": True,
                                          "scoring_func": "sigmoid", "topk_method": "noaux_tc"})
add("deepseek-v2", "deepseek_v2", **{**MLA, "n_shared_experts": 2}, topk_method="greedy",
    **rope(YARN_ALL))
add("deepseek-v2-groups", "deepseek_v2", **MLA, topk_method="group_limited_greedy", n_group=4,
    topk_group=2)
add("deepseek-v2-lite", "deepseek_v2", SHARDS, **{**MLA, "q_lora_rank": None}, topk_method="greedy",
    attention_bias=True, tie_word_embeddings=True)

# Norms after the rotation; gated attention.
HUNYUAN = dict(intermediate_size=24, num_experts=6, moe_topk=2, head_dim=12)
add("hunyuan", "hunyuan_v1_moe", **HUNYUAN)
add("hunyuan-alpha-biases", "hunyuan_v1_moe", SHARDS, **{**HUNYUAN, "moe_topk": 6},
    num_key_value_heads=1, attention_bias=True,
    **rope({"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}))
add("hunyuan-tied-linear", "hunyuan_v1_moe", FUSED, **HUNYUAN, tie_word_embeddings=True,
    **rope(LINEAR))
AFMOE = dict(intermediate_size=48, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2,
             num_shared_experts=1, head_dim=12, sliding_window=6, num_hidden_layers=4,
             global_attn_every_n_layers=2)
add("afmoe", "afmoe", **AFMOE, mup_enabled=True, route_scale=1.8)
add("afmoe-all-experts-one-head", "afmoe", SHARDS, **{**AFMOE, "num_experts_per_tok": 6},
    num_key_value_heads=1, num_dense_layers=0, tie_word_embeddings=True)
add("afmoe-two-shared", "afmoe", **{**AFMOE, "num_shared_experts": 2, "num_hidden_layers": 3},
    num_dense_layers=2, layer_types=["full_attention", "sliding_attention", "full_attention"],
    **rope(YARN))

# Not a part of transformers: see bailing.py.
BAILING = dict(intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8, head_dim=12,
               num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1,
               num_hidden_layers=3)
add("bailing-groups", "bailing_moe_v2", **BAILING, n_group=4, topk_group=2,
    routed_scaling_factor=2.5)
add("bailing-biases-one-head", "bailing_moe_v2", **{**BAILING, "num_experts_per_tok": 8},
    n_group=1, topk_group=1, attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True,
    **rope({"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}))
add("bailing-two-shared", "bailing_moe_v2", **{**BAILING, "n_shared_experts": 2,
                                                "first_k_dense_replace": 0}, n_group=2,
    topk_group=2, num_nextn_predict_layers=0)

# With `original` 16, all prompts are long; with 128, none is, not even with its continuation.
def long_rope(pairs, original, **more):
    return {"rope_type": "longrope", "rope_theta": 10000.0,
            "original_max_position_embeddings": original,
            "short_factor": [1.0 + 0.25 * i for i in range(pairs)],
            "long_factor": [2.0 + i for i in range(pairs)], **more}


add("phi3-longrope-short", "phi3", **DENSE, rope_parameters=long_rope(4, 128),
    original_max_position_embeddings=128)
add("phi3-longrope-long", "phi3", **DENSE, num_key_value_heads=1,
    rope_parameters=long_rope(4, 16, attention_factor=1.25),
    original_max_position_embeddings=16)
PHIMOE = dict(intermediate_size=24, num_local_experts=4, attention_bias=True, lm_head_bias=True,
              router_jitter_noise=0.3)
add("phimoe", "phimoe", **PHIMOE,
    rope_parameters=long_rope(4, 128, short_mscale=1.25, long_mscale=1.5))
add("phimoe-plain", "phimoe", FUSED, **{**PHIMOE, "num_local_experts": 7, "attention_bias": False,
                                        "lm_head_bias": False, "router_jitter_noise": 0.05},
    num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
add("phimoe-shards-window", "phimoe", SHARDS, **{**PHIMOE, "num_local_experts": 2},
    num_key_value_heads=4, sliding_window=9,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0})

# Short convolutions beside attention.
LFM2 = dict(intermediate_size=48, num_hidden_layers=4, block_auto_adjust_ff_dim=False,
            full_attn_idxs=[2])
add("lfm2", "lfm2", **LFM2, tie_word_embeddings=True)
add("lfm2-adjusted-biases-four-taps", "lfm2",
    **{**LFM2, "block_auto_adjust_ff_dim": True, "full_attn_idxs": [0, 3]}, conv_bias=True,
    conv_L_cache=4, block_multiple_of=8, block_ffn_dim_multiplier=1.25, num_key_value_heads=1,
    tie_word_embeddings=False)
add("lfm2-attention-only-old-keys", "lfm2", **{**LFM2, "full_attn_idxs": ..., "num_hidden_layers": 2},
    file_config={"block_ff_dim": 48, "intermediate_size": 12288, "tie_embedding": True},
    drop=("layer_types", "full_attn_idxs", "rope_parameters", "tie_word_embeddings"),
    tie_word_embeddings=True)
LFM2_MOE = dict(intermediate_size=48, moe_intermediate_size=16, num_experts=8,
                num_experts_per_tok=3, num_dense_layers=1, num_hidden_layers=4,
                layer_types=["conv", "conv", "full_attention", "conv"])
add("lfm2-moe", "lfm2_moe", **LFM2_MOE, tie_word_embeddings=True)
add("lfm2-moe-plain-gates-one-head", "lfm2_moe", SHARDS,
    **{**LFM2_MOE, "num_dense_layers": 0, "num_experts_per_tok": 2}, use_expert_bias=False,
    norm_topk_prob=False, routed_scaling_factor=1.5, num_key_value_heads=1, conv_L_cache=2,
    tie_word_embeddings=False)
add("lfm2-moe-fused-two-taps-biases", "lfm2_moe", FUSED,
    **{**LFM2_MOE, "layer_types": ["full_attention", "conv", "full_attention", "conv"]},
    conv_bias=True, tie_word_embeddings=True, **rope({"rope_type": "default",
                                                     "rope_theta": 5000.0}))

# Limits of queries, keys and values; weights of experts that are divided by their sum.
add("olmoe-clip", "olmoe", intermediate_size=16, num_experts=4, num_experts_per_tok=2, clip_qkv=0.6,
    num_key_value_heads=1)
add("deepseek-v2-renormalized", "renormalized_deepseek_v2", **MLA, topk_method="group_limited_greedy",
    n_group=4, topk_group=2)

# A head in the file although the configuration says that it is the embedding matrix.
add("llama-tied-flag-own-head", "llama", **DENSE, file_config={"tie_word_embeddings": True})
add("mixtral-tied-flag-own-head", "mixtral", SHARDS, intermediate_size=16, num_local_experts=3,
    num_experts_per_tok=2, file_config={"tie_word_embeddings": True})
