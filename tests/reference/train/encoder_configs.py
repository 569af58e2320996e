"""The configurations of the bundled masked language models and translators.

Each routed model has a dense twin, which is trained on the same batches for equally many steps.
dense-mlm activates as many parameters per token as x-moe-mlm: it has one expert where x-moe-mlm
selects one of many, so only the router is missing. dense-translator takes as many multiply-adds per
token as moa-translator at lengths of 32 tokens (MoA eq. 18 and 19): the feed-forward layers make up
for the difference of the attention.
"""

from bundled_configs import EMBEDDING_SCALE, HIDDEN, Config

PAD, BOS, EOS, UNKNOWN, MASK = "<pad>", "<s>", "</s>", "<unk>", "<mask>"
SPECIAL_TOKENS = {"masked-lm": [BOS, PAD, EOS, UNKNOWN, MASK], "pairs": [BOS, PAD, EOS]}
VOCABULARIES = {"masked-lm": 3072, "pairs": 4096}
BOS_ID, PAD_ID, EOS_ID, MASK_ID = 0, 1, 2, 4

POST_NORM = {"kind": "layer", "eps": 1e-5, "placement": "post"}
HEADS, HEAD_DIM = 4, 32

MLM_POSITIONS = 128
MLM_EXPERTS, MLM_EXPERT_WIDTH, MLM_DEPTH = 12, 64, 3

PAIR_POSITIONS = 256
PAIR_EXPERTS, PAIR_SELECTED, PAIR_HEAD_DIM = 6, 3, 64
# Hidden units of the dense twin's feed-forward layers in encoder and decoder.
ENCODER_WIDTH, DECODER_WIDTH = 182, 172
# The length of both texts at which the twins' multiply-adds are equal.
EQUAL_LENGTH = 32


def _dense_attention(bias: bool) -> Config:
    return {"kind": "dense", "num_heads": HEADS, "head_dim": HEAD_DIM, "bias": bias,
            "out_bias": bias}


def _plain(activation: str, **more: object) -> Config:
    return {"form": "plain", "activation": activation, "bias": True, **more}


def _masked_lm(middle: Config) -> Config:
    """X-MoE's encoder: `middle` is a layer without attention in the middle of the others."""
    attention = _dense_attention(bias=True)
    feed_forward = {"kind": "dense", "expert": _plain("gelu"), "width": 128}
    return {
        "model_type": "routed_encoder", "format_version": 2,
        "vocab_size": VOCABULARIES["masked-lm"], "hidden_size": HIDDEN, "num_hidden_layers": 5,
        "max_position_embeddings": MLM_POSITIONS, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID,
        "norm": POST_NORM, "position": {"kind": "rope", "theta": 10000}, "embedding_norm": True,
        "tie_word_embeddings": True, "head_bias": True,
        "head": {"kind": "masked_lm", "layer": {"activation": "gelu", "norm": True}},
        "attention": [attention, attention, {"kind": "none"}, attention, attention],
        "feed_forward": [feed_forward, feed_forward, {**middle, "norm_placement": "none"},
                         feed_forward, feed_forward],
    }


_STACKED = _plain("relu", sublayer="residual", depth=MLM_DEPTH)


def _stack(attention: Config, width: int) -> Config:
    return {
        "num_hidden_layers": 3, "max_position_embeddings": PAIR_POSITIONS, "norm": POST_NORM,
        "position": {"kind": "sinusoidal", "first": 2}, "embedding_scale": EMBEDDING_SCALE,
        "attention": attention,
        "feed_forward": {"kind": "dense", "expert": _plain("relu"), "width": width},
    }


def _pair(attention: Config, encoder_width: int, decoder_width: int) -> Config:
    return {
        "model_type": "routed_encoder_decoder", "format_version": 2,
        "vocab_size": VOCABULARIES["pairs"], "hidden_size": HIDDEN, "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID, "decoder_start_token_id": BOS_ID, "tie_word_embeddings": True,
        "encoder": _stack(attention, encoder_width),
        "decoder": {**_stack(attention, decoder_width), "cross_attention": attention},
    }


_ATTENTION_EXPERTS = {
    "kind": "routed", "num_kv_heads": 1, "head_dim": PAIR_HEAD_DIM, "routing": {
        "num_experts": PAIR_EXPERTS, "score": {"kind": "dot"}, "gate": "softmax",
        "select": {"kind": "top_k", "k": PAIR_SELECTED}, "renormalize": True}}

MASKED_LMS: dict[str, Config] = {
    "x-moe-mlm": _masked_lm({"kind": "routed", "expert": _STACKED, "routing": {
        "num_experts": MLM_EXPERTS, "widths": MLM_EXPERT_WIDTH,
        "score": {"kind": "cosine", "dim": MLM_EXPERTS // 2, "temperature": "divide"},
        "gate": "softmax", "select": {"kind": "top_k", "k": 1}}}),
    "dense-mlm": _masked_lm({"kind": "dense", "expert": _STACKED, "width": MLM_EXPERT_WIDTH}),
}


def attention_cost(attention: Config, length: int) -> int:
    """Multiply-adds of one attention for one row and `length` keys (MoA eq. 18 and 19, with the
    products of weights and values, and with the router)."""
    head = attention["head_dim"]
    if attention["kind"] == "dense":
        heads = keys = attention["num_heads"]
        router = 0
    else:
        heads, keys = attention["routing"]["select"]["k"], 1
        router = attention["routing"]["num_experts"] * HIDDEN
    return 2 * (heads + keys) * head * HIDDEN + 2 * heads * head * length + router


def translator_cost(config: Config, length: int) -> int:
    """Multiply-adds of one source token and one target token, without the head, if both texts have
    `length` tokens."""
    total = 0
    for stack in ("encoder", "decoder"):
        part = config[stack]
        layer = attention_cost(part["attention"], length)
        if "cross_attention" in part:
            layer += attention_cost(part["cross_attention"], length)
        layer += 2 * HIDDEN * part["feed_forward"]["width"]
        total += part["num_hidden_layers"] * layer
    return total


_DENSE = _dense_attention(bias=False)
# By how many hidden units of a feed-forward layer a dense attention costs more than a routed one.
_EXCESS = (attention_cost(_DENSE, EQUAL_LENGTH)
           - attention_cost(_ATTENTION_EXPERTS, EQUAL_LENGTH)) // (2 * HIDDEN)
TRANSLATORS: dict[str, Config] = {
    "moa-translator": _pair(_ATTENTION_EXPERTS, ENCODER_WIDTH + _EXCESS,
                            DECODER_WIDTH + 2 * _EXCESS),
    "dense-translator": _pair(_DENSE, ENCODER_WIDTH, DECODER_WIDTH),
}
ENCODERS = {**MASKED_LMS, **TRANSLATORS}


if __name__ == "__main__":
    for name, config in TRANSLATORS.items():
        print(f"{name}: {translator_cost(config, EQUAL_LENGTH):,} multiply-adds")
