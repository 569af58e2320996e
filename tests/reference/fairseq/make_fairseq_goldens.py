#!/usr/bin/env python3
"""Writes tiny random models as fairseq writes them, with their answers, to tests/golden/fairseq.

Needs only torch; 2.15 wrote the stored files.

    make_fairseq_goldens.py [--only SUBSTRING] [--out FOLDER]

Each case is a folder with .pt files, and golden.safetensors beside them, which has the tensors of
tests/reference/families/make_family_goldens.py. decoders.py computes the answers in f64.
"""

import argparse
import json
import math
import pathlib
import shutil
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import decoders  # noqa: E402
import safetensors_io  # noqa: E402
from cases import CASES, FORK, MOA, TORCHSCALE, TRAINING, TRANSFORMER_LM  # noqa: E402

VOCAB, PROMPTS, LENGTH, GREEDY = 37, 2, 12, 24


def all_options(case):
    if case.family == "moa":
        options = {**TRAINING, **MOA}
        options["task"] = "translation"
    elif case.family == "transformer-lm":
        options = {**TRAINING, **TRANSFORMER_LM}
    elif case.family == "mh-moe":
        options = {**TRAINING, **TORCHSCALE, **FORK}
    else:
        options = {**TRAINING, **TORCHSCALE}
    return {**options, **case.options}


class Weights:
    """Makes random tensors; their values are those of the stored type."""

    def __init__(self, case):
        self.generator = torch.Generator().manual_seed(case.seed)
        self.type = torch.float16 if case.half else torch.float32
        self.state = {}

    def add(self, name, *shape, std, center=0.0):
        value = center + torch.randn(shape, generator=self.generator) * std
        self.state[name] = value.to(self.type)

    def linear(self, name, rows, columns, bias):
        self.add(name + ".weight", rows, columns, std=1 / math.sqrt(columns))
        if bias:
            self.add(name + ".bias", rows, std=0.3)

    def norm(self, name, size, bias):
        self.add(name + ".weight", size, std=0.2, center=1.0)
        if bias:
            self.add(name + ".bias", size, std=0.3)


def shared_weights(w, o, rms=False, final_norm=False):
    """Embeddings, positions, last norm and LM head."""
    d = o["decoder_embed_dim"]
    tied = o["share_decoder_input_output_embed"] or o.get("share_all_embeddings", False)
    w.state["decoder.version"] = torch.tensor([3.0])
    w.add("decoder.embed_tokens.weight", VOCAB, d, std=0.25 if not o["no_scale_embedding"] else 0.6)
    w.state["decoder.embed_tokens.weight"][1] = 0
    if not o["no_token_positional_embeddings"]:
        if o["decoder_learned_pos"]:
            rows = (o["max_target_positions"] or o["tokens_per_sample"]) + 2
            w.add("decoder.embed_positions.weight", rows, d, std=0.4)
        else:
            w.state["decoder.embed_positions._float_tensor"] = torch.zeros(1, dtype=w.type)
    if o["layernorm_embedding"]:
        w.norm("decoder.layernorm_embedding", d, not rms)
    before = o["decoder_normalize_before"] and not o["no_decoder_final_norm"]
    if before or final_norm:
        w.norm("decoder.layer_norm", d, not rms)
    if tied:  # the same storage under both names
        w.state["decoder.output_projection.weight"] = w.state["decoder.embed_tokens.weight"]
    else:
        w.add("decoder.output_projection.weight", VOCAB, d, std=2 / math.sqrt(d))


def torchscale_weights(case, o):
    w = Weights(case)
    d, f = o["decoder_embed_dim"], o["decoder_ffn_embed_dim"]
    heads = o["decoder_attention_heads"]
    fork = case.family == "mh-moe"
    rms, bias = o.get("rms_norm", False), not o.get("no_bias", False)
    act = o["activation_fn"]
    gated = fork and (o["glu"] or act == "silu" or (act == "relu" and not o["relu_squared"]))
    shared_weights(w, o, rms, case.final_norm)

    def network(name, size, inner):
        for matrix in ("fc1", "fc3") if gated else ("fc1",):
            w.linear(name + matrix, inner, size, bias)
        w.linear(name + "fc2", size, inner, bias)
        if o["subln"]:
            w.norm(name + "ffn_layernorm", inner, not rms)

    if o["rel_pos_buckets"] > 0:
        w.add("decoder.self_attn_relative_position.relative_attention_bias.weight",
              o["rel_pos_buckets"], heads, std=1.5)
    for i in range(o["decoder_layers"]):
        p = f"decoder.layers.{i}."
        kv = o.get("n_kv_heads", heads) * (d // heads)
        for matrix, rows in (("q", d), ("k", kv), ("v", kv), ("out", d)):
            w.linear(f"{p}self_attn.{matrix}_proj", rows, d, bias)
        if o.get("rotary_embed", False):
            w.state[p + "self_attn.rotary_emb.inv_freq"] = torch.ones(d // heads // 2, dtype=w.type)
        if o["xpos_rel_pos"]:
            w.state[p + "self_attn.xpos.scale"] = torch.ones(d // heads // 2, dtype=w.type)
        if o["subln"]:
            w.norm(p + "self_attn.inner_attn_ln", d, not rms)
        w.norm(p + "self_attn_layer_norm", d, not rms)
        w.norm(p + "final_layer_norm", d, not rms)
        if o["moe_freq"] == 0 or (i + 1) % o["moe_freq"] != 0:
            network(p + "ffn.", d, f)
            continue
        split = o.get("mhmoe_heads_number", 1)
        c, experts = d // split, o["moe_expert_count"]
        if split > 1:
            w.linear(p + "moe_layer.multi_heads", d, d, True)
            w.linear(p + "moe_layer.out_proj", d, d, True)
        gate = p + "moe_layer.gate.wg"
        if o["use_xmoe"]:
            w.add(gate + "_reduction.weight", 16, c, std=2 / math.sqrt(c))
            w.add(gate, experts, 16, std=0.375)  # norms near 1.5
        else:
            w.add(gate + ".weight", experts, c, std=2 / math.sqrt(c))
        inner = o.get("moe_ffn_dim", -1)
        for e in range(experts):
            network(f"{p}moe_layer.experts.{e}.", c, f if inner == -1 else inner)
    return w.state


def transformer_lm_weights(case, o):
    w = Weights(case)
    d, f = o["decoder_embed_dim"], o["decoder_ffn_embed_dim"]
    shared_weights(w, o)
    for i in range(o["decoder_layers"]):
        p = f"decoder.layers.{i}."
        for matrix in ("q", "k", "v", "out"):
            w.linear(f"{p}self_attn.{matrix}_proj", d, d, True)
        w.norm(p + "self_attn_layer_norm", d, True)
        w.linear(p + "fc1", f, d, True)
        w.linear(p + "fc2", d, f, True)
        w.norm(p + "final_layer_norm", d, True)
    return w.state


def moa_weights(case, o):
    w = Weights(case)
    d, f, experts, head = (o[k] for k in ("decoder_embed_dim", "decoder_ffn_embed_dim",
                                          "num_expert", "head_dim"))
    shared_weights(w, o)
    for i in range(o["decoder_layers"]):
        p = f"decoder.layers.{i}."
        for matrix in ("k", "v"):
            w.linear(f"{p}self_attn.{matrix}_proj", head, d, False)
        q = p + "self_attn.q_proj."
        w.add(q + "w_gate", d, experts, std=2 / math.sqrt(d))
        if "noisy" in o["gating"]:
            w.add(q + "w_noise", d, experts, std=1.0)
        w.add(q + "experts.w", experts, d, head, std=1 / math.sqrt(d))
        w.add(q + "output_experts.w", experts, head, d, std=2 / math.sqrt(head))
        w.norm(p + "self_attn_layer_norm", d, True)
        w.norm(p + "final_layer_norm", d, True)
        if o["ffd_type"] == "normal":
            w.linear(p + "fc1", f, d, True)
            w.linear(p + "fc2", d, f, True)
            for number, name in ((0, "fc1"), (2, "fc2")):  # second names of the same storages
                for part in ("weight", "bias"):
                    w.state[f"{p}ffd.{number}.{part}"] = w.state[f"{p}{name}.{part}"]
        else:
            w.add(p + "ffd.w_gate", d, experts, std=2 / math.sqrt(d))
            w.add(p + "ffd.w_noise", d, experts, std=1.0)
            w.add(p + "ffd.experts.w", experts, d, d, std=1 / math.sqrt(d))
            w.add(p + "ffd.output_experts.w", experts, d, d, std=1 / math.sqrt(d))
    return w.state


def golden(model, case):
    generator = torch.Generator().manual_seed(case.seed + 1000)
    tokens = torch.randint(4, VOCAB, (PROMPTS, LENGTH), generator=generator)
    logprobs = torch.stack([torch.log_softmax(model.logits(t), -1) for t in tokens])
    greedy, margin = [], []
    for prompt in tokens:
        sequence = prompt
        for _ in range(GREEDY):
            last = torch.log_softmax(model.logits(sequence)[-1], -1).topk(2)
            margin.append((last.values[0] - last.values[1]).item())
            greedy.append(last.indices[0].item())
            sequence = torch.cat([sequence, last.indices[:1]])
    return {"tokens": tokens.int(), "logprobs": logprobs.float(),
            "greedy": torch.tensor(greedy, dtype=torch.int32).view(PROMPTS, GREEDY),
            "margin": torch.tensor(margin).view(PROMPTS, GREEDY)}


def stride(state):
    """Stores matrices transposed or as parts of one storage, and tied ones twice."""
    out = dict(state)
    head = "decoder.output_projection.weight"
    out[head] = state[head].clone()
    for name, value in state.items():
        if name.endswith("q_proj.weight") or name.endswith("q_proj.bias"):
            names = [name.replace("q_proj", x + "_proj") for x in "qkv"]
            names = [n for n in names if n in state]
            joined = torch.cat([state[n] for n in names])
            for n, part in zip(names, joined.split([len(state[n]) for n in names])):
                out[n] = part
        elif name.endswith("fc2.weight") or name.endswith("gate.wg.weight"):
            out[name] = value.t().contiguous().t()
        elif name.endswith("fc1.weight"):
            wide = torch.zeros(value.shape[0], value.shape[1] + 3, dtype=value.dtype)
            wide[:, 2:-1] = value
            out[name] = wide[:, 2:-1]
    for name in state:
        for number, original in ((0, "fc1"), (2, "fc2")):
            name_of_copy = name.replace(original + ".", f"ffd.{number}.")
            if original in name and name_of_copy in state:
                out[name_of_copy] = out[name]
    return out


def contents(case, options, state, rank):
    """The dict that fairseq saves."""
    options = dict(options, distributed_rank=rank)
    whole = {
        "args": None, "cfg": None, "model": state,
        "criterion": {}, "optimizer_history": [{"criterion_name": "CrossEntropyCriterion",
                                                "optimizer_name": "FP16Optimizer",
                                                "lr_scheduler_state": {"best": None},
                                                "num_updates": 50000}],
        "task_state": {}, "extra_state": {"epoch": 3, "val_loss": 2.5,
                                          "train_iterator": {"epoch": 3}},
        "last_optimizer_state": {"state": {0: {"step": 1, "exp_avg": torch.zeros(4)}},
                                 "param_groups": [{"lr": 0.0, "betas": (0.9, 0.98)}]},
    }
    if not case.cfg:
        whole["args"] = argparse.Namespace(**options)
        return whole
    task = {k: options.pop(k) for k in ("tokens_per_sample", "sample_break_mode", "data")}
    task["max_target_positions"] = options.get("max_target_positions")
    model = dict(options, _name=options["arch"])
    if case.nested:
        for part in ("encoder", "decoder", "quant_noise"):
            inner = {k[len(part) + 1:]: v for k, v in model.items() if k.startswith(part + "_")}
            model = {k: v for k, v in model.items() if not k.startswith(part + "_")}
            model[part] = inner
        model["decoder"]["num_expert"] = 12  # a default that nothing reads
    whole["cfg"] = {"_name": None, "common": {"fp16": True, "seed": 1}, "task": task,
                    "model": model, "distributed_training": {"distributed_world_size": 2}}
    return whole


def local_name(name, local):
    """A tensor of an expert as the process that has the expert names it; None for others."""
    before, found, after = name.partition(".moe_layer.experts.")
    if not found:
        return None
    number, rest = after.split(".", 1)
    return f"{before}{found}{int(number) % local}.{rest}"


def write_files(case, options, state, folder):
    if case.strided:
        state = stride(state)
    if case.wrapper:
        plain, wrapped = case.wrapper
        state = {wrapped + k.removeprefix(plain) if k.startswith(plain) else k: v
                 for k, v in state.items()}
    if case.bare:
        torch.save({k.removeprefix("decoder."): v for k, v in state.items()}, folder / "model.pt")
        known = {k: v for k, v in options.items()
                 if v is not None and (k in TORCHSCALE or k in case.options)}
        text = {"model_type": "torchscale", **known}
        (folder / "config.json").write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")
        return
    if case.ranks == 0:
        torch.save(contents(case, options, state, 0), folder / "checkpoint_best.pt")
        return
    experts = options["moe_expert_count"]
    local = max(experts // case.ranks, 1)
    others = {k: v for k, v in state.items() if local_name(k, 1) is None}
    torch.save(contents(case, options, others, 0), folder / "checkpoint_last-shared.pt")
    for rank in range(case.ranks):
        mine = {}
        for name, value in state.items():
            if local_name(name, local) is None:
                continue
            number = int(name.partition(".moe_layer.experts.")[2].split(".")[0])
            if number // local == rank % (experts // local):
                mine[local_name(name, local)] = value.clone()
        torch.save(contents(case, options, mine, rank), folder / f"checkpoint_last-rank-{rank}.pt")


def write(case, out):
    options = all_options(case)
    make = {"moa": moa_weights, "transformer-lm": transformer_lm_weights}
    state = make.get(case.family, torchscale_weights)(case, options)
    decoder = decoders.Moa if case.family == "moa" else decoders.Torchscale
    model = decoder(state, options)
    tensors = golden(model, case)
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_files(case, options, state, folder)
    safetensors_io.save(folder / "golden.safetensors", tensors)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{case.name}: {size / 1024:.0f} KiB, smallest margin {tensors['margin'].min():.1e}, "
          f"of experts {model.gap:.1e}, "
          f"entropy {-(tensors['logprobs'].exp() * tensors['logprobs']).sum(-1).mean():.2f}")
    assert model.gap > 1e-4, "a near tie of experts"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="writes only cases whose name contains this text")
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).parents[2] / "golden" / "fairseq")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        if args.only in case.name:
            write(case, args.out)


if __name__ == "__main__":
    main()
