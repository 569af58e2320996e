"""DeepSeek-V2 with "norm_topk_prob".

transformers does not read the key. In the authors' code, the weights of the selected experts are
divided by their sum then, and "routed_scaling_factor" is not applied.
"""

import json

import transformers


def renormalized(module, arguments, output):
    """A hook of the router that replaces its weights."""
    logits, weights, experts = output
    # The router has multiplied by the scaling factor, which the division removes.
    return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), experts


def build(config):
    """Returns the model and its config.json."""
    kind = transformers.AutoConfig.for_model("deepseek_v2", **config, norm_topk_prob=True)
    kind._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(kind)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(renormalized)
    stored = json.loads(kind.to_json_string())
    stored["architectures"] = ["DeepseekV2ForCausalLM"]
    stored.pop("_attn_implementation", None)
    return model, stored


def state_dict(model):
    return {name: value.contiguous() for name, value in model.state_dict().items()}
