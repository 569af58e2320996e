"""More tiny models of make_family_goldens.py: models with a prediction layer (prediction.py).

The last of a case's layers is the prediction layer. The name of a case decides its weights.
"""

import cases
from hybrid_cases import DELTA, QWEN_EXPERTS, add
from wrapped_cases import MLA

FULL = "full_attention"
LINEAR = "linear_attention"


def case(name, family, save=None, **config):
    add(name, family, save, prediction="separate" if family.startswith("qwen") else "numbered",
        **config)


case("qwen3-5-mtp", "qwen3_5_text", **{**DELTA, "num_hidden_layers": 4}, intermediate_size=48,
     layer_types=[LINEAR, FULL, LINEAR, FULL])
case("qwen3-5-mtp-tied", "qwen3_5_text", **{**DELTA, "num_hidden_layers": 3}, intermediate_size=40,
     num_key_value_heads=1, tie_word_embeddings=True, layer_types=[LINEAR, LINEAR, FULL])
case("qwen3-5-moe-mtp", "qwen3_5_moe_text", **{**DELTA, "num_hidden_layers": 3}, **QWEN_EXPERTS,
     layer_types=[LINEAR, FULL, FULL])
case("qwen3-next-mtp", "qwen3_next", **{**DELTA, "num_hidden_layers": 3}, **QWEN_EXPERTS,
     intermediate_size=48, layer_types=[LINEAR, FULL, FULL], mlp_only_layers=[0])
LATENT = {**MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1}
case("deepseek-v3-mtp", "deepseek_v3", **LATENT, n_group=4, topk_group=2)
case("deepseek-v3-mtp-direct-tied", "deepseek_v3",
     **{**LATENT, "q_lora_rank": None, "num_experts_per_tok": 8}, n_group=1, topk_group=1,
     tie_word_embeddings=True, rope_interleave=False)
GLM = dict(intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8,
           num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, num_hidden_layers=3)
case("glm4-moe-mtp", "glm4_moe", **GLM, n_group=2, topk_group=1, use_qk_norm=True,
     attention_bias=True)
case("glm4-moe-lite-mtp", "glm4_moe_lite", **{**MLA, "num_hidden_layers": 3},
     mlp_layer_types=["dense", "sparse", "sparse"])
