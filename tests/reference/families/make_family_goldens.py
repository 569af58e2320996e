#!/usr/bin/env python3
"""Writes tiny random models of Hugging Face families, with their answers, to tests/golden/families.

Needs torch and transformers, which the tests do not need; transformers 5.23 wrote the stored files.

    make_family_goldens.py [--only SUBSTRING] [--out FOLDER]

Each case is a folder in the family's own format, and golden.safetensors beside its files:

    tokens    I32 [P, T]     prompts
    logprobs  F32 [P, T, V]  log-probabilities after each token, computed in f32
    greedy    I32 [P, G]     greedy continuation of each prompt
    margin    F32 [P, G]     difference of the two largest log-probabilities at each of its tokens

The weights are rounded to bf16 first and stored as bf16, so files are small and f32 is exact.
"""

import argparse
import json
import math
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import load_file, save_file

import bailing
import block_scaled
import dynamic_moe
import hybrid_cases
import k2_horizon
import renormalized_deepseek
import setting_cases
import step3
from cases import CASES

PROMPTS, LENGTH, GREEDY = 2, 24, 64
# Families that are not a part of transformers, or not with all settings.
OWN = {"dynamic_moe": dynamic_moe, "bailing_moe_v2": bailing, "step3p5": step3,
       "k2_horizon": k2_horizon,
       "renormalized_deepseek_v2": renormalized_deepseek}

# Classes that are not among those of AutoModelForCausalLM.
NOT_AUTO = {"mistral4": transformers.Mistral4ForCausalLM}


def randomize(model, seed):
    """Fills the parameters so that layers, routers and biases all matter to the answers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape, std):
        return torch.randn(shape, generator=generator) * std

    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            fan_in = parameter.shape[-1]
            # A tied head with larger values would only ever repeat the last token.
            embedding = 0.2 if model.config.tie_word_embeddings else 1.0
            std = embedding if "embed" in name else 1.0 / math.sqrt(fan_in)
            if "router" in name or name.endswith("gate.weight") or "gate.wg" in name:
                std *= 2.0
            value = normal(parameter.shape, std)
        elif "norm" in name and name.endswith("weight"):
            # The weights of some families' norms are offsets from 1.
            kind = type(model).__name__
            offset = any(part in kind for part in ("Gemma", "Qwen3Next", "Qwen3_5", "Step3"))
            offset = offset and "Gemma4" not in kind
            center = 0.0 if offset and "linear_attn.norm" not in name else 1.0
            value = center + normal(parameter.shape, 0.2)
        else:
            value = normal(parameter.shape, 0.3)
        parameter.data.copy_(value.bfloat16().float())
    for name, buffer in model.named_buffers():
        if "bias" in name:  # selection biases of routers
            buffer.data.copy_(normal(buffer.shape, 0.2).bfloat16().float())
        if name.endswith("layer_scalar"):
            buffer.data.copy_((0.8 + normal(buffer.shape, 0.2)).bfloat16().float())


@torch.no_grad()
def golden(model, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocab, (PROMPTS, LENGTH), generator=generator)
    logprobs = torch.log_softmax(model(tokens, use_cache=False).logits.double(), -1).float()
    sequence, greedy, margin = tokens, [], []
    for _ in range(GREEDY):
        last = torch.log_softmax(model(sequence, use_cache=False).logits[:, -1].double(), -1)
        top = last.topk(2, -1)
        greedy.append(top.indices[:, 0])
        margin.append((top.values[:, 0] - top.values[:, 1]).float())
        sequence = torch.cat([sequence, top.indices[:, :1]], 1)
    return {"tokens": tokens.int().contiguous(), "logprobs": logprobs.contiguous(),
            "greedy": torch.stack(greedy, 1).int().contiguous(),
            "margin": torch.stack(margin, 1).contiguous()}


def replace_blocks(case, folder, blocks):
    """Replaces matrices in the written files by their blocks and scales."""
    if not blocks:
        return
    for path in folder.glob("*.safetensors"):
        state = load_file(path)
        state = {name: value.contiguous() for name, value in state.items()}
        here = {name: packed for name, packed in blocks.items()
                if name in state or any(k.startswith(name.rsplit(".", 1)[0] + ".0.") for k in state)}
        if case.mxfp4:
            state = block_scaled.mxfp4_state(state, here)
        else:
            state = block_scaled.fp8_state(state, here)
        save_file(state, path, metadata={"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.exists():
            listing = json.loads(index.read_text())
            others = {k: v for k, v in listing["weight_map"].items() if v != path.name}
            listing["weight_map"] = {**others, **{name: path.name for name in state}}
            listing["metadata"].pop("total_size", None)
            index.write_text(json.dumps(listing, indent=1, sort_keys=True) + "\n")


def write(case, out):
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = OWN.get(case.family)
    if own:
        model, stored = own.build(case.config)
        model = model.float().eval()
    else:
        config = transformers.AutoConfig.for_model(case.family, **case.config)
        config._attn_implementation = "eager"
        kind = NOT_AUTO.get(case.family, transformers.AutoModelForCausalLM)
        make = kind._from_config if case.family in NOT_AUTO else kind.from_config
        model = make(config).float().eval()
    randomize(model, case.seed)
    for name, value in case.set.items():
        model.get_parameter(name).data.copy_(value)
    blocks = {}
    if case.fp8:
        blocks = block_scaled.apply_fp8(model, case.fp8)
    if case.mxfp4:
        blocks = block_scaled.apply_mxfp4(model)
    tensors = golden(model, case.config["vocab_size"], case.seed + 1)
    model.bfloat16()
    if own:
        save_file(own.state_dict(model), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(stored))
    else:
        model.save_pretrained(folder, **case.save)
    for extra in ("generation_config.json",):
        (folder / extra).unlink(missing_ok=True)
    if case.torch_file:
        state = load_file(folder / "model.safetensors")
        torch.save(state, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    replace_blocks(case, folder, blocks)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored.pop("transformers_version", None)
    if case.fp8:
        stored["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": list(case.fp8), "modules_to_not_convert": ["lm_head"]}
    if case.mxfp4:
        stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    stored.update(case.file_config)
    for key in case.drop:
        stored.pop(key, None)
    path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    save_file(tensors, folder / "golden.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    margin = tensors["margin"]
    print(f"{case.name}: {size / 1024:.0f} KiB, smallest greedy margin {margin.min():.1e}, "
          f"entropy {-(tensors['logprobs'].exp() * tensors['logprobs']).sum(-1).mean():.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="writes only cases whose name contains this text")
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).parents[2] / "golden" / "families")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for case in CASES + hybrid_cases.CASES + setting_cases.CASES:
        if args.only in case.name:
            write(case, args.out)


if __name__ == "__main__":
    main()
