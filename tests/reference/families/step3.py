"""Step 3.5, whose text model has no causal language model of its own in transformers. With
biases, keys and tensors have the names of the files on the hub."""

import torch
import transformers
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

HUB_TENSORS = ((".mlp.gate.weight", ".moe.gate.weight"),
               (".mlp.gate.e_score_correction_bias", ".moe.router_bias"),
               (".mlp.shared_experts.", ".share_expert."))


class Step3p7CausalLM(torch.nn.Module):
    def __init__(self, config, hub):
        super().__init__()
        self.config, self.hub = config, hub
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens, use_cache=False):
        hidden = self.model(tokens, use_cache=use_cache).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(hidden))


def hub_config(config):
    types, layers = config["layer_types"], range(config["num_hidden_layers"])
    rope = config["rope_parameters"]
    full = rope["full_attention"]
    stored = {key: config[key] for key in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "intermediate_size", "moe_intermediate_size", "max_position_embeddings", "bos_token_id",
        "eos_token_id", "share_expert_dim", "sliding_window", "moe_router_scaling_factor",
        "attention_bias")}
    # Lists have an element for one layer that predicts further tokens.
    stored.update(
        num_nextn_predict_layers=1, moe_num_experts=config["n_routed_experts"],
        moe_top_k=config["num_experts_per_tok"],
        num_attention_groups=config["num_key_value_heads"],
        attention_other_setting={"attention_type": "sliding_attention",
                                 "num_attention_heads": config["num_sliding_attention_heads"]},
        layer_types=types + ["sliding_attention"],
        moe_layers_enum=",".join(str(i) for i in layers if config["mlp_layer_types"][i] == "sparse"),
        swiglu_limits=config["swiglu_limits"] + [0],
        swiglu_limits_shared=config["swiglu_limits_shared"] + [0],
        rope_theta=[rope[t]["rope_theta"] for t in types] + [100.0],
        partial_rotary_factors=[rope[t].get("partial_rotary_factor", 1.0) for t in types] + [1.0],
        rope_scaling={key: full[key] for key in full
                      if key not in ("rope_theta", "partial_rotary_factor")},
        yarn_only_types=["full_attention"], rms_norm_eps=1e-5, use_qk_norm=True, sink=False,
        zero_centered=True, use_head_wise_attn_gate=True, moe_router_activation="sigmoid")
    return stored


def build(config):
    """Returns the model and its config.json."""
    made = transformers.AutoConfig.for_model("step3p5", **config)
    made._attn_implementation = "eager"
    hub = config.get("attention_bias", False)
    stored = hub_config(config) if hub else made.to_dict()
    stored.update(model_type="step3p5", architectures=["Step3p5ForCausalLM"])
    stored.pop("transformers_version", None)
    return Step3p7CausalLM(made, hub), stored


def state_dict(model):
    """Returns the tensors under the names of transformers or of the hub."""
    out = {}
    for name, value in model.state_dict().items():
        if model.hub and name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, 1)
            prefix = name.replace("mlp.experts.gate_up_proj", "moe.")
            out[f"{prefix}gate_proj.weight"] = gate.contiguous()
            out[f"{prefix}up_proj.weight"] = up.contiguous()
            continue
        if model.hub:
            name = name.replace("mlp.experts.down_proj", "moe.down_proj.weight")
            for old, new in HUB_TENSORS:
                name = name.replace(old, new)
        out[name] = value.contiguous()
    return out
