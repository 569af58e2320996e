#!/usr/bin/env python3
"""Writes tiny random models of Hugging Face families, with their answers, to tests/golden/families.

Needs torch and transformers, which the tests do not need; transformers 5.23 wrote the stored files
of cases.py, 5.24 those of the other files.

    make_family_goldens.py [--only SUBSTRING] [--out FOLDER]

Each case is a folder in the family's own format, and golden.safetensors beside its files:

    tokens    I32 [P, T]     prompts
    logprobs  F32 [P, T, V]  log-probabilities after each token, computed in f32
    greedy    I32 [P, G]     greedy continuation of each prompt
    margin    F32 [P, G]     difference of the two largest log-probabilities at each of its tokens
    prediction F32 [P, T - 1, V]  with prediction layers: log-probabilities of the tokens after the
                             next ones

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
import hybrid_cases  # noqa: F401  adds cases to CASES
import k2_horizon
import prediction
import prediction_cases  # noqa: F401  adds cases to CASES
import renormalized_deepseek
import replaced_experts
import setting_cases  # noqa: F401  adds cases to CASES
import step3
import wrapped_cases  # noqa: F401  adds cases to CASES
from cases import CASES

PROMPTS, LENGTH, GREEDY = 2, 24, 64
# Families that are not a part of transformers, or not with all settings.
OWN = {"dynamic_moe": dynamic_moe, "bailing_moe_v2": bailing, "step3p5": step3,
       "k2_horizon": k2_horizon,
       "renormalized_deepseek_v2": renormalized_deepseek}
# Classes whose norms have weights that are offsets from 1.
OFFSET_NORMS = ("GemmaFor", "Gemma2", "Gemma3", "MiniMaxM3", "Qwen3Next", "Qwen3_5", "Step3")

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
            # The weight of such a norm is an offset from 1.
            offset = type(model).__name__.startswith(OFFSET_NORMS)
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


def wrapped(case, folder, text):
    """Gives the tensors the names of a wrapper, and returns its configuration."""
    kind, prefix, other = case.wrap
    path = folder / "model.safetensors"
    state = {other + "weight": torch.ones(2, 3, dtype=torch.bfloat16)}
    for name, value in load_file(path).items():
        if name.startswith("model."):
            name = prefix + name.removeprefix("model.")
        elif prefix.startswith("language_model."):
            name = "language_model." + name
        state[name] = value.contiguous()
    save_file(state, path, metadata={"format": "pt"})
    return {"architectures": [], "model_type": kind, "text_config": text,
            "vision_config": {"hidden_size": 3}}


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
        # A wrapper has a part for images, too.
        kind = (transformers.AutoModelForImageTextToText if "text_config" in case.config
                else NOT_AUTO.get(case.family, transformers.AutoModelForCausalLM))
        make = kind._from_config if case.family in NOT_AUTO else kind.from_config
        model = make(config).float().eval()
    randomize(model, case.seed)
    for name, value in case.set.items():
        tensor = model.state_dict()[name]  # a parameter or a buffer
        tensor.copy_(torch.as_tensor(value))
    blocks = {}
    if case.fp8:
        blocks = block_scaled.apply_fp8(model, case.fp8)
    if case.mxfp4:
        blocks = block_scaled.apply_mxfp4(model)
    vectors = replaced_experts.replace(model, case.replaced, case.seed + 2)
    text = case.config.get("text_config", case.config)
    predictor = None
    if case.prediction:
        predictor = prediction.Prediction(model, case.seed + 2, case.prediction == "separate")
    tensors = golden(model, text["vocab_size"], case.seed + 1)
    if predictor:
        tensors["prediction"] = predictor.logprobs(tensors["tokens"].long())
        predictor.put_back()
    model.bfloat16()
    if own:
        save_file(own.state_dict(model), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(stored))
    else:
        model.save_pretrained(folder, **case.save)
    if predictor:
        predictor.write(folder)
    if vectors:
        file = folder / "model.safetensors"
        state = replaced_experts.edit(load_file(file), vectors, case.named_vectors)
        save_file(state, file, metadata={"format": "pt"})
    if case.edit:
        file = folder / "model.safetensors"
        state = {name: value.contiguous() for name, value in case.edit(load_file(file)).items()}
        save_file(state, file, metadata={"format": "pt"})
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
    if vectors:
        experts = len(model.model.layers[min(case.replaced)].mlp.experts.down_proj)
        stored.update(replaced_experts.config_keys(vectors, experts, case.named_vectors))
    stored.update(case.file_config)
    for key in case.drop:
        stored.pop(key, None)
    for part in ("text_config", "vision_config"):
        stored.get(part, {}).pop("transformers_version", None)
    if case.wrap:
        stored = wrapped(case, folder, stored)
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
    for case in CASES:
        if args.only in case.name:
            write(case, args.out)


if __name__ == "__main__":
    main()
