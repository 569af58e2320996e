"""Prediction layers (multi-token prediction) for models of transformers, which have none.

The last layer of a model becomes the prediction layer; the others are the model. DeepSeek-V3,
equations 21 to 23: the row of position j is join [norm(embedding of token j + 1); norm(output of
the model for token j, which the head reads)], goes through the layer, a norm and the model's head,
and predicts token j + 2.
"""

import json

import torch
from safetensors.torch import load_file, save_file

# The names in files beside the layer's own: DeepSeek-V3 and its relatives; Qwen3-Next and Qwen3.5.
NUMBERED = {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj",
            "norm": "shared_head.norm"}
SEPARATE = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden",
            "join": "fc", "norm": "norm"}
LAYER_LISTS = ("layer_types", "mlp_layer_types", "indexer_types")


class Prediction:
    """Takes the last layer from `model`; put_back() returns it."""

    def __init__(self, model, seed, separate):
        self.model, self.separate = model, separate
        config = model.config
        self.layers = model.model.layers
        self.lists = {k: getattr(config, k) for k in LAYER_LISTS if getattr(config, k, None)}
        width = config.hidden_size
        generator = torch.Generator().manual_seed(seed)
        norm = type(model.model.norm)
        self.norms = {}
        for name in ("embed_norm", "hidden_norm", "norm"):
            self.norms[name] = norm(width, eps=config.rms_norm_eps)
            center = 0.0 if separate else 1.0  # Qwen's weights are offsets from 1
            value = center + torch.randn(width, generator=generator) * 0.2
            self.norms[name].weight.data = value.bfloat16().float()
        self.join = (torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5
                     ).bfloat16().float()
        self.use(self.layers[:-1], {k: v[:-1] for k, v in self.lists.items()})

    def use(self, layers, lists):
        self.model.model.layers = layers
        self.model.config.num_hidden_layers = len(layers)
        for key, value in lists.items():
            setattr(self.model.config, key, list(value))

    @torch.no_grad()
    def logprobs(self, tokens):
        """Returns the log-probabilities [P, T - 1, V] of the tokens after the next ones."""
        base = self.model.model
        hidden = base(tokens, use_cache=False).last_hidden_state[:, :-1]
        embedded = base.embed_tokens(tokens[:, 1:])
        rows = torch.cat([self.norms["embed_norm"](embedded), self.norms["hidden_norm"](hidden)], -1)
        own, norm = base.layers, base.norm
        lists = {k: list(getattr(self.model.config, k)) for k in self.lists}
        self.use(self.layers[-1:], {k: v[-1:] for k, v in self.lists.items()})
        base.norm = self.norms["norm"]
        output = base(inputs_embeds=rows @ self.join.T, use_cache=False).last_hidden_state
        base.norm = norm
        self.use(own, lists)
        return torch.log_softmax(self.model.lm_head(output).double(), -1).float().contiguous()

    def put_back(self):
        self.use(self.layers, self.lists)

    def write(self, folder):
        """Gives the last layer in the folder's files its names as a prediction layer."""
        path = folder / "model.safetensors"
        last = len(self.layers) - 1
        own = f"model.layers.{last}."
        state = {}
        for name, value in load_file(path).items():
            if name.startswith(own) and self.separate:
                name = "mtp.layers.0." + name.removeprefix(own)
            state[name] = value.contiguous()
        prefix = "mtp." if self.separate else own
        names = SEPARATE if self.separate else NUMBERED
        for name, norm in self.norms.items():
            state[f"{prefix}{names[name]}.weight"] = norm.weight.data.bfloat16()
        state[f"{prefix}{names['join']}.weight"] = self.join.bfloat16()
        if not self.separate:  # copies, which nobody needs
            state[own + "embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
            head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
            state[own + "shared_head.head.weight"] = head.clone()
        save_file(state, path, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] = last
        for key in LAYER_LISTS:
            if config.get(key):
                config[key] = config[key][:last]
        config["mtp_num_hidden_layers" if self.separate else "num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
