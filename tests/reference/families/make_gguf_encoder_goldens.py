#!/usr/bin/env python3
"""Writes GGUF files of encoders and encoder-decoders, with the Python package `gguf`.

Needs gguf, numpy, safetensors and torch, which the tests do not need; gguf 0.19 wrote the stored
files.

    make_gguf_encoder_goldens.py [--only SUBSTRING] [--out FOLDER]

tests/golden/gguf/encoders/NAME.gguf has the weights of a folder of tests/golden/encoders or of
tests/golden/pairs, in BF16, with norms and biases in F32. Names of keys and tensors are those of the
package; what llama.cpp's converter does to the tensors and which keys it writes is written down here:

- RoBERTa's table of positions has no rows for padding.
- The matrices of nomic's experts become stacks [E, f, d] and [E, d, f]; the bias of their sum is
  dropped.
- BERT's pooler and the heads of language models are dropped; classifiers are kept.
- Norms of Gemma, which are offsets from 1, become factors.
- EmbeddingGemma's dense layers, which the folder lacks, are random.
"""

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from gguf_models import encode, load

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
ARCH = gguf.MODEL_ARCH
POOLING = gguf.PoolingType
Config = dict[str, Any]
Tensors = Iterator[tuple[str, torch.Tensor]]
Writer = gguf.GGUFWriter


def bert_keys(writer: Writer, config: Config) -> None:
    offset = 0 if config["model_type"] == "bert" else config["pad_token_id"] + 1
    common_keys(writer, config, config["max_position_embeddings"] - offset)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_causal_attention(False)


def common_keys(writer: Writer, config: Config, positions: int) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(positions)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("num_key_value_heads"):
        writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters", {})
    for name, add in (("full_attention", writer.add_rope_freq_base),
                      ("sliding_attention", writer.add_rope_freq_base_swa)):
        if name in rope:
            add(rope[name]["rope_theta"])
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])


def bert_tensors(config: Config, tensors: dict[str, torch.Tensor]) -> Tensors:
    for name, tensor in tensors.items():
        name = re.sub(r"^(bert|roberta)\.", "", name)
        if name.startswith(("pooler.", "cls.")) or name.endswith("position_ids"):
            continue
        if name == "embeddings.position_embeddings.weight" and config["model_type"] != "bert":
            tensor = tensor[config["pad_token_id"] + 1:]
        yield name, tensor


def nomic_keys(writer: Writer, config: Config) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"])
    writer.add_head_count(config["n_head"])
    writer.add_rope_freq_base(config["rotary_emb_base"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_causal_attention(False)
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_moe_every_n_layers(config["moe_every_n_layers"])
        writer.add_expert_used_count(config["moe_top_k"])


def nomic_tensors(config: Config, tensors: dict[str, torch.Tensor]) -> Tensors:
    for name, tensor in bert_tensors({"model_type": "bert"}, tensors):
        if name.endswith("mlp.experts.bias"):
            continue
        if ".experts.mlp." in name:
            tensor = tensor.reshape(config["num_experts"], config["n_inner"], config["n_embd"])
            if name.endswith("w2"):
                tensor = tensor.transpose(1, 2)
            name += ".weight"
        yield name, tensor


def modern_keys(writer: Writer, config: Config) -> None:
    common_keys(writer, config, config["max_position_embeddings"])
    writer.add_layer_norm_eps(config["norm_eps"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_causal_attention(False)
    writer.add_sliding_window(config["local_attention"])
    writer.add_sliding_window_pattern(3)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_string("modern-bert.hidden_activation", config["hidden_activation"])
    pooling = {"cls": POOLING.CLS, "mean": POOLING.MEAN}[config["classifier_pooling"]]
    writer.add_uint32("modern-bert.classifier.pooling_type", pooling)


def modern_tensors(config: Config, tensors: dict[str, torch.Tensor]) -> Tensors:
    heads = {"head.dense.weight": "cls.weight", "head.norm.weight": "cls.norm.weight",
             "classifier.weight": "cls.output.weight", "classifier.bias": "cls.output.bias"}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        yield heads.get(name, name), tensor


def gemma_keys(writer: Writer, config: Config) -> None:
    common_keys(writer, config, config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    for module, sizes in (("dense_2", (32, 48)), ("dense_3", (48, 32))):
        writer.add_dense_features_dims(module, *sizes)


def gemma_tensors(config: Config, tensors: dict[str, torch.Tensor]) -> Tensors:
    for name, tensor in tensors.items():
        yield name, tensor + 1 if name.endswith("norm.weight") else tensor
    generator = torch.Generator().manual_seed(1)
    for name, shape in (("dense_2.weight", (48, 32)), ("dense_3.weight", (32, 48))):
        yield name, torch.randn(shape, generator=generator)


def qwen_keys(writer: Writer, config: Config) -> None:
    common_keys(writer, config, config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def plain_tensors(config: Config, tensors: dict[str, torch.Tensor]) -> Tensors:
    for name, tensor in tensors.items():
        yield name if name.startswith("model.") else f"model.{name}", tensor


def t5_keys(writer: Writer, config: Config) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(config["d_ff"])
    writer.add_block_count(config["num_layers"])
    if config["is_encoder_decoder"]:
        writer.add_decoder_block_count(config["num_decoder_layers"])
        writer.add_decoder_start_token_id(config["decoder_start_token_id"])
    writer.add_head_count(config["num_heads"])
    writer.add_key_length(config["d_kv"])
    writer.add_value_length(config["d_kv"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_relative_attn_buckets_count(config["relative_attention_num_buckets"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])


def t5_tensors(config: Config, tensors: dict[str, torch.Tensor]) -> Tensors:
    for name, tensor in tensors.items():
        if not name.endswith("embed_tokens.weight"):
            yield name, tensor
    # Files with a head of their own mean that its input is not scaled.
    if not config["scale_decoder_outputs"]:
        yield "lm_head.weight", tensors["shared.weight"]


@dataclasses.dataclass
class Case:
    folder: str
    arch: ARCH
    keys: Callable[[Writer, Config], None]
    tensors: Callable[[Config, dict[str, torch.Tensor]], Tensors]
    pooling: POOLING | None = None

    @property
    def name(self) -> str:
        return self.folder.split("/")[1]


CASES = [
    Case("encoders/bert-vectors", ARCH.BERT, bert_keys, bert_tensors, POOLING.CLS),
    Case("encoders/xlm-roberta-vectors", ARCH.BERT, bert_keys, bert_tensors, POOLING.MEAN),
    Case("encoders/roberta-cross-encoder", ARCH.BERT, bert_keys, bert_tensors),
    Case("encoders/nomic-dense", ARCH.NOMIC_BERT, nomic_keys, nomic_tensors, POOLING.MEAN),
    Case("encoders/nomic-experts", ARCH.NOMIC_BERT_MOE, nomic_keys, nomic_tensors, POOLING.MEAN),
    Case("encoders/modernbert-vectors", ARCH.MODERN_BERT, modern_keys, modern_tensors, POOLING.CLS),
    Case("encoders/modernbert-names", ARCH.MODERN_BERT, modern_keys, modern_tensors),
    Case("encoders/gemma3-bidirectional", ARCH.GEMMA_EMBEDDING, gemma_keys, gemma_tensors,
         POOLING.MEAN),
    Case("encoders/qwen3-vectors", ARCH.QWEN3, qwen_keys, plain_tensors, POOLING.LAST),
    Case("encoders/t5-encoder", ARCH.T5ENCODER, t5_keys, t5_tensors),
    Case("pairs/t5", ARCH.T5, t5_keys, t5_tensors),
    Case("pairs/umt5", ARCH.T5, t5_keys, t5_tensors),
    Case("pairs/t5-gated-untied", ARCH.T5, t5_keys, t5_tensors),
]


def write(case: Case, out: pathlib.Path) -> None:
    folder = GOLDEN / case.folder
    config = json.loads((folder / "config.json").read_text())
    layers = max(config.get(key, 0) for key in ("num_hidden_layers", "n_layer", "num_layers",
                                                "num_decoder_layers"))
    names = gguf.get_tensor_name_map(case.arch, layers)
    writer = gguf.GGUFWriter(out / f"{case.name}.gguf", gguf.MODEL_ARCH_NAMES[case.arch])
    case.keys(writer, config)
    if case.pooling is not None:
        writer.add_pooling_type(case.pooling)
    labels = [label for _, label in sorted(config.get("id2label", {}).items())]
    if labels:
        writer.add_array(f"{gguf.MODEL_ARCH_NAMES[case.arch]}.classifier.output_labels", labels)
    kept = ("cls.", "dense_")
    for name, tensor in case.tensors(config, load(folder)):
        new_name = name if name.startswith(kept) else names.get_name(name, (".weight", ".bias"))
        assert new_name is not None, name
        data, kind = encode(new_name, tensor.contiguous(), Type.BF16)
        writer.add_tensor(new_name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(case.name, (out / f"{case.name}.gguf").stat().st_size // 1024, "KiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="writes only files whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, default=GOLDEN / "gguf" / "encoders")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for case in CASES:
        if args.only in case.name:
            write(case, args.out)


if __name__ == "__main__":
    main()
