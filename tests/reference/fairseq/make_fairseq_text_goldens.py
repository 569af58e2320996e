#!/usr/bin/env python3
"""Writes tiny random encoders and encoder-decoders as fairseq writes them, with their answers, to
tests/golden/encoders and tests/golden/pairs.

Needs only torch; 2.15 wrote the stored files.

    make_fairseq_text_goldens.py [--only SUBSTRING] [--out FOLDER]

Each case is a folder with .pt files, and golden.safetensors beside them, which has the tensors of
make_encoder_goldens.py or make_pair_goldens.py. decoders.py computes the answers in f64.
"""

import argparse
import math
import pathlib
import shutil
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import decoders  # noqa: E402
import make_fairseq_goldens as files  # noqa: E402
import routed_pair  # noqa: E402
import safetensors_io  # noqa: E402
from text_cases import DENSE, MASKED_LM, MLM_CASES, MOA, MT, PAIR_CASES  # noqa: E402

VOCAB = 37
LENGTHS = (1, 2, 5, 9, 16, 17, 33, 50)
PAIR_LENGTHS = ((1, 1), (5, 1), (12, 3), (20, 1), (40, 12))
TOP, GREEDY, BEAM, BEAM_TOKENS = 8, 20, 4, 10
OPTIONS = {"mlm": MASKED_LM, "mt": MT, "moa": MOA, "transformer": DENSE}


class Builder(files.Weights):
    """The tensors of one stack after the other."""

    def __init__(self, case, o):
        super().__init__(case)
        self.case, self.o = case, o
        self.pair = case.family != "mlm"
        sides = ("encoder", "decoder") if self.pair else ("encoder",)
        for side in sides:
            self.stack(side)

    def own(self, side, name):
        return self.o[f"{side}_{name}"]

    def stack(self, side):
        o, d = self.o, self.own(side, "embed_dim")
        self.state[f"{side}.version"] = torch.tensor([3.0])
        table = f"{side}.embed_tokens.weight"
        if side == "decoder" and o["share_all_embeddings"]:
            self.state[table] = self.state["encoder.embed_tokens.weight"]
        else:
            rows = self.case.source_vocabulary if self.pair and side == "encoder" else VOCAB
            self.add(table, rows, d, std=0.6 if o["no_scale_embedding"] else 0.25)
            self.state[table][1] = 0
        if o["no_token_positional_embeddings"]:
            pass
        elif self.own(side, "learned_pos"):
            longest = o["max_source_positions" if side == "encoder" else "max_target_positions"]
            self.add(f"{side}.embed_positions.weight", longest + 2, d, std=0.4)
        else:
            self.state[f"{side}.embed_positions._float_tensor"] = torch.zeros(1, dtype=self.type)
        if o["layernorm_embedding"]:
            self.norm(f"{side}.layernorm_embedding", d, True)
        without = side == "decoder" and o["no_decoder_final_norm"]
        if self.own(side, "normalize_before") and not without:
            self.norm(f"{side}.layer_norm", d, True)
        self.head(side, table, d)
        layers = {"moa": self.moa_layer, "transformer": self.dense_layer}
        layer = layers.get(self.case.family, self.torchscale_layer)
        if o.get("rel_pos_buckets", 0):
            self.add(f"{side}.relative_position.relative_attention_bias.weight",
                     o["rel_pos_buckets"], self.own(side, "attention_heads"), std=1.5)
        count = self.own(side, "layers")
        for i in range(count + bool(self.case.inserted)):
            layer(side, f"{side}.layers.{i}.", i, d)

    def head(self, side, table, d):
        head = f"{side}.output_projection"
        if self.case.plain_head:
            self.add(head + ".weight", VOCAB, d, std=2 / math.sqrt(d))
        elif not self.pair:
            self.linear(head + ".dense", d, d, True)
            self.norm(head + ".layer_norm", d, True)
            self.state[head + ".weight"] = self.state[table]
            self.add(head + ".bias", VOCAB, std=0.3)
            if self.case.classes:
                name = "classification_heads.sentence_classification_head"
                self.linear(name + ".dense", d, d, True)
                self.linear(name + ".out_proj", self.case.classes, d, True)
        elif side == "decoder":
            shared = self.o["share_decoder_input_output_embed"]
            if shared:
                self.state[head + ".weight"] = self.state[table]
            else:
                self.add(head + ".weight", VOCAB, d, std=2 / math.sqrt(d))

    def attentions(self, side):
        """The attentions of a layer and the norms that belong to them."""
        yield "self_attn", "self_attn_layer_norm"
        if side == "decoder":
            yield "encoder_attn", "encoder_attn_layer_norm"

    def dense_attention(self, side, p, d):
        for name, norm in self.attentions(side):
            for matrix in ("q", "k", "v", "out"):
                self.linear(f"{p}{name}.{matrix}_proj", d, d, True)
            if self.o.get("subln", False) and name == "self_attn":
                self.norm(f"{p}{name}.inner_attn_ln", d, True)
            self.norm(p + norm, d, True)

    def network(self, name, d, inner):
        self.linear(name + "fc1", inner, d, True)
        self.linear(name + "fc2", d, inner, True)
        if self.o.get("subln", False):
            self.norm(name + "ffn_layernorm", inner, True)

    def torchscale_layer(self, side, p, i, d):
        o, inner = self.o, self.own(side, "ffn_embed_dim")
        inserted = bool(self.case.inserted) and i == self.own(side, "layers") // 2
        if not inserted:
            self.dense_attention(side, p, d)
            self.norm(p + "final_layer_norm", d, True)
        routed = o["moe_freq"] > 0 and (i + 1) % o["moe_freq"] == 0
        if not routed and not inserted:
            self.network(p + "ffn.", d, inner)
            return
        gate, experts = p + "moe_layer.gate.wg", o["moe_expert_count"]
        if o["use_xmoe"]:
            self.add(gate + "_reduction.weight", 16, d, std=2 / math.sqrt(d))
            self.add(gate, experts, 16, std=0.375)
        else:
            self.add(gate + ".weight", experts, d, std=2 / math.sqrt(d))
        for e in range(experts):
            name = f"{p}moe_layer.experts.{e}."
            if not inserted:
                self.network(name, d, inner)
                continue
            for k in range(self.case.inserted):
                self.norm(f"{name}{k}.norm", d, True)
                self.linear(f"{name}{k}.ff1", inner, d, True)
                self.linear(f"{name}{k}.ff2", d, inner, True)

    def dense_layer(self, side, p, _i, d):
        self.dense_attention(side, p, d)
        self.network(p, d, self.own(side, "ffn_embed_dim"))
        self.norm(p + "final_layer_norm", d, True)

    def moa_layer(self, side, p, _i, d):
        o, experts, head = self.o, self.o["num_expert"], self.o["head_dim"]
        for name, norm in self.attentions(side):
            for matrix in ("k", "v"):
                self.linear(f"{p}{name}.{matrix}_proj", head, d, False)
            q = f"{p}{name}.q_proj."
            self.add(q + "w_gate", d, experts, std=2 / math.sqrt(d))
            if "noisy" in o["gating"]:
                self.add(q + "w_noise", d, experts, std=1.0)
            self.add(q + "experts.w", experts, d, head, std=1 / math.sqrt(d))
            self.add(q + "output_experts.w", experts, head, d, std=2 / math.sqrt(head))
            self.norm(p + norm, d, True)
        self.norm(p + "final_layer_norm", d, True)
        if o["ffd_type"] == "moe":
            self.add(p + "ffd.w_gate", d, experts, std=2 / math.sqrt(d))
            if side == "decoder":
                self.add(p + "ffd.w_noise", d, experts, std=1.0)
            self.add(p + "ffd.experts.w", experts, d, d, std=1 / math.sqrt(d))
            self.add(p + "ffd.output_experts.w", experts, d, d, std=1 / math.sqrt(d))
            return
        self.network(p, d, self.own(side, "ffn_embed_dim"))
        # Second names of the same storages.
        for number, name in ((0, "fc1"), (3 if side == "encoder" else 2, "fc2")):
            for part in ("weight", "bias"):
                self.state[f"{p}ffd.{number}.{part}"] = self.state[f"{p}{name}.{part}"]


def joined(out, lists):
    return {key: torch.stack(v) if key in lists else torch.cat(v) for key, v in out.items()}


def typed(tensors):
    return {key: (value.float() if value.is_floating_point() else value.int()).contiguous()
            for key, value in tensors.items()}


def encoder_golden(model, case):
    generator = torch.Generator().manual_seed(case.seed + 1000)
    texts = [torch.randint(4, VOCAB, (length,), generator=generator) for length in LENGTHS]
    tensors = {"tokens": torch.cat(texts), "types": torch.zeros(sum(LENGTHS), dtype=torch.int32),
               "offsets": torch.tensor([0, *LENGTHS]).cumsum(0)}
    if case.classes:
        name = "sentence_classification_head"
        tensors["texts"] = torch.stack([model.classes(t, name) for t in texts])
        return typed(tensors)
    logprobs = [torch.log_softmax(model.logits(t), -1) for t in texts]
    best = [rows.topk(TOP, -1) for rows in logprobs]
    tensors["target_logprobs"] = torch.cat(
        [rows.gather(1, t[:, None])[:, 0] for rows, t in zip(logprobs, texts)])
    tensors["top_ids"] = torch.cat([b.indices for b in best])
    tensors["top_logprobs"] = torch.cat([b.values for b in best])
    return typed(tensors)


class Searched:
    """What routed_pair.RoutedPair.beams() needs."""

    def __init__(self, model):
        self.read, self.decoder = model.read, self
        self.forward = model.decoder.logits


def pair_golden(model, case):
    generator = torch.Generator().manual_seed(case.seed + 1000)
    out = {key: [] for key in ("sources", "tokens", "top_ids", "top_logprobs", "greedy",
                               "greedy_margin", "beam_tokens", "beam_scores")}
    for source_length, length in PAIR_LENGTHS:
        source = torch.randint(4, case.source_vocabulary, (source_length,), generator=generator)
        rest = torch.randint(4, VOCAB, (length - 1,), generator=generator)
        prompt = torch.cat([torch.tensor([2]), rest])
        model.read(source)
        best = torch.log_softmax(model.decoder.logits(prompt), -1).topk(TOP, -1)
        text, greedy, margin = prompt, [], []
        for _ in range(GREEDY):
            two = torch.log_softmax(model.decoder.logits(text)[-1], -1).topk(2)
            greedy.append(int(two.indices[0]))
            margin.append(float(two.values[0] - two.values[1]))
            text = torch.cat([text, two.indices[:1]])
        beams = routed_pair.RoutedPair.beams(Searched(model), source, prompt, BEAM, BEAM_TOKENS,
                                             {2}, 1.0)
        padded = [tokens + [-1] * (BEAM_TOKENS - len(tokens)) for _, tokens in beams]
        for key, value in (
                ("sources", source), ("tokens", prompt), ("top_ids", best.indices),
                ("top_logprobs", best.values), ("greedy", torch.tensor(greedy)),
                ("greedy_margin", torch.tensor(margin)), ("beam_tokens", torch.tensor(padded)),
                ("beam_scores", torch.tensor([score for score, _ in beams]))):
            out[key].append(value)
    lengths = torch.tensor([[0, 0], *PAIR_LENGTHS]).cumsum(0)
    tensors = joined(out, ("greedy", "greedy_margin", "beam_tokens", "beam_scores"))
    tensors["source_offsets"], tensors["offsets"] = lengths[:, 0], lengths[:, 1]
    return typed(tensors)


def write_files(case, options, state, folder):
    if not case.averaged:
        case.bare, case.strided, case.wrapper = False, False, ()
        files.write_files(case, options, state, folder)
        return
    # average_checkpoints.py keeps the rest of the first file, and averages in f32.
    case.nested = False
    whole = files.contents(case, options, {k: v.float().clone() for k, v in state.items()}, 0)
    whole["last_optimizer_state"] = {}
    torch.save(whole, folder / "average.pt")


def write(case, out):
    options = {**OPTIONS[case.family], **case.options}
    state = Builder(case, options).state
    made = decoders.Moa if case.family == "moa" else decoders.Torchscale
    pair = case.family != "mlm"
    model = decoders.Pair(made, state, options) if pair else made(state, options, "encoder")
    tensors = (pair_golden if pair else encoder_golden)(model, case)
    folder = out / ("pairs" if pair else "encoders") / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_files(case, options, state, folder)
    safetensors_io.save(folder / "golden.safetensors", tensors)
    size = sum(f.stat().st_size for f in folder.iterdir())
    margin = tensors["greedy_margin"].min() if pair else math.nan
    print(f"{case.name}: {size / 1024:.0f} KiB, smallest margin {margin:.1e}, "
          f"of experts {model.gap:.1e}", flush=True)
    assert model.gap > 1e-5, "a near tie of experts"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="",
                        help="writes only cases whose name contains this text")
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).parents[2] / "golden")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for case in [*MLM_CASES, *PAIR_CASES]:
        if args.only in case.name:
            write(case, args.out)


if __name__ == "__main__":
    main()
