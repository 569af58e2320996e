"""Compares names of the native format with the names that modules give to the same tensors."""

import difflib
import functools
import re

# What the parts of usual names may mean, as words of the native format. The first pattern that
# matches a whole part counts.
_MEANINGS = (
    (r"encoder", ("encoder",)),
    (r"(cross|encoder|enc_dec|src)_?(attn|attention)|multihead_attn", ("cross_attention",)),
    (r"(cross|encoder|enc_dec|src)_?(attn|attention)_?((layer|rms)_?)?norm",
     ("cross_attention", "norm")),
    (r"(self_)?(attn|attention|att|mha|sa)", ("attention",)),
    (r"mlp|ffn?|feed_?forward|s?moe|block_sparse_moe|moe_layer|smoe_layer", ("feed_forward",)),
    (r"experts?", ("experts",)),
    (r"shared_(experts?|mlp)|shared", ("shared",)),
    (r"shared_(expert_)?gate", ("shared_gate",)),
    (r"e_score_correction_bias|choice_bias|expert_bias", ("choice_bias",)),
    (r"router|gating|switch|router_proj|gate_network", ("router",)),
    (r"wg", ("router", "gate")),
    (r"gate", ("gate", "router")),
    (r"gate_(proj|up)|gate_up_proj|w13", ("gate", "up")),
    (r"w_?q|q|query|q_?(proj|lin|linear)|to_q|query_proj|query_key_value|qkv|qkv_proj|c_attn"
     r"|w_?qkv|w_?pack|in_proj(_weight|_bias)?", ("q", "k", "v")),
    (r"w_?k|k|key|k_?(proj|lin|linear)|to_k|key_proj", ("k",)),
    (r"w_?v|v|values?|v_?(proj|lin|linear)|to_v|value_proj", ("v",)),
    (r"w_?kv|kv(_proj)?|to_kv", ("k", "v")),
    (r"w_?o|o|o_?(proj|lin)|out_proj|to_out|out|attn_out", ("o", "down")),
    (r"c_proj|proj|projection|dense", ("o", "down", "projection")),
    (r"w1", ("gate", "up")),
    (r"w3|up|up_proj|w_?up|fc1|c_fc|w_?in|w_?i|lin(ear)?_?1|dense_h_to_4h|fc_in|intermediate",
     ("up",)),
    (r"w2|down|down_proj|w_?down|fc2|w_?out|lin(ear)?_?2|dense_4h_to_h|fc_out", ("down",)),
    (r"w_?gate", ("gate",)),
    (r"(lm_?)?head|unembed(ding)?|output|output_layer|to_logits", ("head",)),
    (r"wpe|pos(ition)?_?emb(ed)?(ding)?s?|embed_positions?|position(al)?_embeddings?",
     ("embed_position",)),
    (r"wte|emb|embed|embeddings?|embed_tokens|embed_in|tok(en)?_?emb(ed)?(ding)?s?|word_embeddings",
     ("embed",)),
    (r"embed_tokens_per_layer", ("embed_layers",)),
    (r"per_layer_model_projection", ("layer_input",)),
    (r"per_layer_projection_norm", ("layer_input", "norm")),
    (r"per_layer_input_gate", ("input", "gate")),
    (r"per_layer_projection", ("input", "down")),
    (r"post_per_layer_input_norm", ("input", "norm")),
    (r"q_?(layer)?norm|q_ln", ("q_norm",)),
    (r"k_?(layer)?norm|k_ln", ("k_norm",)),
    (r"(pre_?|self_?)?(attn|attention|input)_?((layer|rms)_?)?norm|ln_?1|norm_?1|ln_attn|attn_ln",
     ("attention", "norm")),
    (r"(pre_?)?(ffn?|mlp|moe|feed_?forward|post_attention)_?((layer|rms)_?)?norm|ln_?2|norm_?2"
     r"|ln_ffn?|(ffn?|mlp)_ln", ("feed_forward", "norm")),
    (r"final_?((layer|rms)_?)?norm|ln_?f|norm_?f|ln_out|out_norm", ("final", "norm")),
    (r"((layer|rms)_?)?norm|ln", ("norm",)),
    (r"temperature|temp|tau|log_temperature", ("temperature",)),
    (r"(expert_)?(centroids?|embeddings?|keys)", ("experts",)),
    (r"sinks?", ("sinks",)),
    (r"split|multi_?head_?(layer|in)|head_split", ("split",)),
    (r"merge|merge_?(layer|head)|head_merge", ("merge",)),
    (r"scale", ("scale", "norm")),  # also the name of a norm's weight
    (r"heads", ("heads", "attention", "experts")),
    (r"latent", ("latent", "latent_down", "latent_up")),
    (r"latent_norm", ("latent_norm", "norm")),
    (r"q_down", ("q_down", "q")),
    (r"latent_down|latent_up|relative_bias|expert_scale|inner_norm|output_norm|embed_norm"
     r"|embed_layers|layer_input|input"
     r"|shared_norm|shared_output_norm|experts_norm|embed_type|classifier|pooling"
     r"|constant|table|choice_bias|out_bias|conv|[qkv]_conv|beta|decay|decay_down|decay_log"
     r"|decay_bias|gate_down|step|step_bias|skip", None),  # words of the format itself
)
_CONTAINERS = {"model", "transformer", "decoder", "layers", "layer", "h", "blocks", "block", "net",
               "module", "base_model", "gpt", "backbone", "sublayer", "weight", "bias"}


@functools.lru_cache(maxsize=None)
def _meanings(part):
    """Returns the words that a part of a module's name may stand for; None if it is unknown."""
    for pattern, words in _MEANINGS:
        if re.fullmatch(pattern, part):
            return frozenset(words or (part,))
    return None


def _is_bias(name):
    return re.search(r"(^|[._])(bias|b)$", name.split("[")[0]) is not None


def _words(pattern):
    """Returns the words of a name of the native format."""
    words = [part for part in pattern.split(".")
             if part not in ("blocks", "decoder", "weight", "bias") and not part.startswith("{")]
    return ["final", "norm"] if words == ["norm"] else words


@functools.lru_cache(maxsize=None)
def similarity(wanted, source):
    """Returns how well a module's name fits a name of the format: 1 if every word is found, 2 if they
    are the same."""
    if wanted == source:
        return 2.0
    words = _words(wanted)
    parts = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower() for part in source.split(".")]
    parts = [part for part in parts
             if part not in _CONTAINERS and not part.startswith("{") and not part.isdigit()]
    meanings = [_meanings(part) for part in parts]
    weights = {word: 1.0 for word in words}
    if words:
        weights[words[-1]] = 2.0
    total = sum(weights.values()) or 1.0
    score = 0.0
    for word, weight in weights.items():
        # A part that can mean only this is the better match.
        sure = max((1 / len(meaning) ** 0.25 for meaning in meanings
                    if meaning is not None and word in meaning), default=0.0)
        score += weight * sure
    for meaning in meanings:
        if meaning is not None and not meaning & set(words):
            score -= 0.7
    likeness = difflib.SequenceMatcher(None, wanted, source).ratio()
    apart = 0.5 if _is_bias(wanted) != _is_bias(source) else 0.0
    return score / total + 0.1 * likeness - apart
