"""The configurations of the seven bundled models, and their numbers of activated parameters.

All models have width 128, four layers, tied embeddings, RMS pre-norm and RoPE, and share the
tokenizer, the stream of training tokens and the number of training steps. They differ in their
routing. The numbers of activated parameters per token of dense, smoe, x-moe and moa lie within 3 %
of each other. mh-moe has as many parameters as smoe, which its paper's beta is for, and activates
more, because each of its two sub-tokens selects two experts. Those of the HMoE models result from
training: the parameter penalty and the entropy loss reduce them.
"""

from typing import Any

Config = dict[str, Any]

HIDDEN = 128
LAYERS = 4
VOCAB = 4096
# sqrt(hidden size). Tied embeddings are small; without this factor, the outputs of the residual
# branches would dominate them early in training.
EMBEDDING_SCALE = 11.313708498984761
GATED_SILU = {"form": "gated", "activation": "silu"}
ATTENTION = {"kind": "dense", "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
HMOE_WIDTHS = [8 * ratio for ratio in (9, 11, 13, 15, 17, 19, 21, 23)]
TOP_2 = {"kind": "top_k", "k": 2}


def _routed(routing: Config) -> Config:
    return {"kind": "routed", "expert": GATED_SILU, "routing": routing}


def _config(feed_forward: Config, attention: Config = ATTENTION) -> Config:
    return {
        "model_type": "routed_decoder", "format_version": 1, "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "max_position_embeddings": 8192,
        "bos_token_id": 0, "eos_token_id": 0,
        "norm": {"kind": "rms", "eps": 1e-5, "placement": "pre"},
        "position": {"kind": "rope", "theta": 10000, "pairing": "half", "fraction": 1.0},
        "embedding_scale": EMBEDDING_SCALE, "tie_word_embeddings": True,
        "attention": attention, "feed_forward": feed_forward,
    }


BUNDLED: dict[str, Config] = {
    "dense": _config({"kind": "dense", "expert": GATED_SILU, "width": 256}),
    "smoe": _config(_routed({
        "num_experts": 8, "widths": 128, "score": {"kind": "dot"}, "gate": "softmax",
        "select": TOP_2, "renormalize": True})),
    "x-moe": _config(_routed({
        "num_experts": 8, "widths": 128,
        "score": {"kind": "cosine", "dim": 4, "temperature": "divide"}, "gate": "softmax",
        "select": TOP_2, "renormalize": True})),
    # MH-MoE, appendix B: experts of the inner width that gives the parameters of smoe, and X-MoE's
    # router with 16/h dimensions.
    "mh-moe": _config(_routed({
        "num_experts": 8, "widths": 232, "split": {"heads": 2, "residual": True},
        "score": {"kind": "cosine", "dim": 8, "temperature": "divide"}, "gate": "softmax",
        "select": TOP_2, "renormalize": False})),
    "moa": _config(
        {"kind": "dense", "expert": GATED_SILU, "width": 272},
        {"kind": "routed", "num_kv_heads": 1, "head_dim": 32, "routing": {
            "num_experts": 32, "score": {"kind": "dot"}, "gate": "softmax",
            "select": {"kind": "top_k", "k": 4}, "renormalize": True}}),
    "hmoe-topk": _config(_routed({
        "num_experts": 8, "widths": HMOE_WIDTHS, "score": {"kind": "dot"}, "gate": "softmax",
        "select": TOP_2, "renormalize": True})),
    "hmoe-topp": _config(_routed({
        "num_experts": 8, "widths": HMOE_WIDTHS, "score": {"kind": "dot"}, "gate": "softmax",
        "select": {"kind": "top_p", "p": 0.6, "compare": "ge", "max": 8}, "renormalize": True})),
}


def expert_widths(routing: Config) -> list[int]:
    widths = routing["widths"]
    return [widths] * routing["num_experts"] if isinstance(widths, int) else list(widths)


def router_cost(routing: Config, width: int) -> int:
    """Returns the number of multiplications that the router takes for one row of `width` values."""
    experts, score = routing["num_experts"], routing["score"]
    if score["kind"] == "cosine":
        return score["dim"] * (width + experts)
    return experts * width


def activated_parameters(config: Config, selected_width: float | None = None) -> float:
    """Returns the number of activated parameters per token, without embeddings and LM head.

    A weight counts once for each use (models.md 8.9): each of a token's h sub-tokens uses the
    router and k experts. `selected_width` is the measured sum of the selected experts' widths,
    averaged over rows and layers. It is required if experts have unequal widths or the number of
    selected experts varies.
    """
    d = config["hidden_size"]
    attention, feed_forward = config["attention"], config["feed_forward"]
    total = 2.0 * d
    head = attention["head_dim"]
    kv = attention.get("num_kv_heads", 1)
    total += 2 * d * kv * head
    if attention["kind"] == "dense":
        total += 2 * d * attention["num_heads"] * head
    else:
        routing = attention["routing"]
        total += router_cost(routing, d) + routing["select"]["k"] * 2 * d * kv * head
    if feed_forward["kind"] == "dense":
        total += 3 * d * feed_forward["width"]
    else:
        routing = feed_forward["routing"]
        heads = routing.get("split", {}).get("heads", 1)
        row = d // heads
        if heads > 1:
            total += 2 * d * (d + 1)
        if selected_width is None:
            selected_width = routing["select"]["k"] * routing["widths"]
        total += heads * (router_cost(routing, row) + 3 * row * selected_width)
    return config["num_hidden_layers"] * total + d


if __name__ == "__main__":
    for name, config in BUNDLED.items():
        measured = 256.0 if name.startswith("hmoe") else None
        print(f"{name:10s} {activated_parameters(config, measured):9.0f}")
