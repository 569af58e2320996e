"""Dynamic_MoE ("Harder Tasks Need More Experts"), which transformers does not have.

The model is transformers' Llama with routed feed-forward layers, written from the paper (section 3.1)
and the description of the published code: experts are added in descending order of their probability
until the sum exceeds a threshold, and the probabilities are the weights.
"""

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP


class DynamicMoe(torch.nn.Module):
    def __init__(self, config, experts, threshold):
        super().__init__()
        self.threshold = threshold
        self.router = torch.nn.Linear(config.hidden_size, experts, bias=False)
        self.experts = torch.nn.ModuleList(LlamaMLP(config) for _ in range(experts))

    def forward(self, x):
        share = torch.softmax(self.router(x), -1)
        ordered, index = share.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = before <= self.threshold  # the expert that crosses the threshold is kept
        kept[..., 0] = True
        weight = torch.zeros_like(share).scatter(-1, index, ordered * kept)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weight.unsqueeze(-2)).sum(-1)


class Dense(torch.nn.Module):
    """A feed-forward whose tensors are called mlp.mlp.* in the files."""

    def __init__(self, config):
        super().__init__()
        self.mlp = LlamaMLP(config)

    def forward(self, x):
        return self.mlp(x)


def build(settings):
    """Returns the model and the configuration that belongs into config.json."""
    own = {key: settings[key] for key in ("num_experts", "top_p_threshold", "expert_frequency")}
    config = transformers.LlamaConfig(**{k: v for k, v in settings.items() if k not in own})
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config)
    for i, layer in enumerate(model.model.layers):
        routed = i % own["expert_frequency"] == 0
        layer.mlp = (DynamicMoe(config, own["num_experts"], own["top_p_threshold"]) if routed
                     else Dense(config))
    return model, {**config.to_dict(), **own}


def state_dict(model):
    """Returns the tensors under the names of the published checkpoints."""
    return {name.replace("input_layernorm", "input_norm")
                .replace("post_attention_layernorm", "post_attention_norm"): tensor.contiguous()
            for name, tensor in model.state_dict().items()}
