#!/usr/bin/env python3
"""Writes GGUF files for tests to tests/golden/gguf, with the Python package `gguf`.

Needs gguf, numpy, safetensors, sentencepiece, tokenizers, torch and transformers, which the tests do
not need; gguf 0.19 wrote the stored files.

    make_gguf_goldens.py [--out FOLDER]

models/CASE-TYPE.gguf   the weights of tests/golden/families/CASE in a type, under the names and in
                        the layout of llama.cpp's converter: experts are stacked, rows of Llama's
                        query and key projections are permuted, norms and routers are F32
models/*-widened.gguf   the weights of the file of the same name without "-widened", converted to
                        F32 by gguf
blocks.gguf             random blocks of every type
blocks.safetensors      the same tensors, converted to F32 by gguf
tokenizers/*.gguf       tokenizers without tensors
tokenizers/*.json       texts and their ids, from transformers, tokenizers or sentencepiece
"""

import argparse
import io
import json
import math
import pathlib
import shutil
import struct

import gguf
import numpy as np
import sentencepiece
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file
from safetensors.torch import load_file

FAMILIES = pathlib.Path(__file__).parents[2] / "golden" / "families"
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "mixtral": gguf.MODEL_ARCH.LLAMA,
                 "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
                 "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
                 "olmoe": gguf.MODEL_ARCH.OLMOE}
MODELS = [("llama-biases-tied", "bf16"), ("llama-biases-tied", "f32"), ("llama-llama3-shards", "bf16"),
          ("qwen2", "bf16"), ("qwen2", "f16"), ("qwen3-yarn-tied", "bf16"),
          ("mixtral", "bf16"), ("mixtral", "f32"), ("qwen2-moe", "bf16"), ("qwen2-moe", "f32"),
          ("qwen3-moe", "bf16"), ("qwen3-moe", "f32"), ("olmoe", "bf16"), ("olmoe", "f32"),
          ("mixtral", "q8_0"), ("olmoe", "q4_0")]


def permute(weights, heads):
    """Puts the two halves of each head's rows side by side."""
    return (weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
            .swapaxes(1, 2).reshape(weights.shape))


def load(folder):
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(path))
    return {name: tensor.float() for name, tensor in tensors.items()}


def stack_experts(tensors):
    """Replaces the tensors of single experts by one tensor for all of a layer."""
    out, stacks = {}, {}
    for name, tensor in tensors.items():
        parts = name.split(".experts.")
        if len(parts) == 1:
            out[name] = tensor
            continue
        number, rest = parts[1].split(".", 1)
        stacks.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = tensor
    for name, experts in stacks.items():
        out[name] = torch.stack([experts[i] for i in range(len(experts))])
    return out


def llama3_factors(rope, dimensions):
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dimensions, 2, dtype=torch.float32) / dimensions)
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        length = 2 * math.pi / frequency
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = ((rope["original_max_position_embeddings"] / length - rope["low_freq_factor"])
                      / (rope["high_freq_factor"] - rope["low_freq_factor"]))
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def add_config(writer, config):
    family = config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    writer.add_name("a tiny test model")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family in ("llama", "mixtral"):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
                         ("beta_slow", writer.add_rope_scaling_yarn_beta_slow)):
            if key in rope:
                add(rope[key])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def encode(name, tensor, kind):
    """Returns the data and the type of a tensor, as the converter chooses it."""
    array = tensor.numpy()
    if array.ndim == 1 or "ffn_gate_inp" in name or kind == Type.F32:
        return array, None
    if kind not in (Type.F16, Type.BF16) and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] != 0:
        kind = Type.BF16
    return gguf.quantize(array, kind), kind


def write_model(case, kind, out):
    folder = FAMILIES / case
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = {}
    for name, tensor in stack_experts(load(folder)).items():
        if arch == gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
            tensor = permute(tensor, config["num_attention_heads"])
        if arch == gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
            tensor = permute(tensor, config["num_key_value_heads"])
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        tensors[new_name] = tensor.squeeze()
    path = out / f"{case}-{kind}.gguf"
    widened = None
    outputs = [(path, False)]
    if kind.startswith("q"):
        outputs.append((out / f"{case}-{kind}-widened.gguf", True))
    for path, widened in outputs:
        writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
        add_config(writer, config)
        if config["rope_parameters"]["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(
                config["rope_parameters"], config["head_dim"]))
        for name, tensor in tensors.items():
            data, encoded = encode(name, tensor, Type[kind.upper()])
            if widened and encoded is not None:
                data, encoded = gguf.dequantize(data, encoded).astype(np.float32), None
            writer.add_tensor(name, data, raw_dtype=encoded)
        finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# The offsets of 16-bit floats in a block of each type.
BLOCKS = {Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2],
          Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208]}


def write_blocks(out):
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(out / "blocks.gguf", "blocks")
    expected = {}
    for kind, halves in BLOCKS.items():
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (3 * 2, size), dtype=np.uint8)
        for at in halves:
            # All finite halves, also subnormal ones and zeros of both signs.
            bits = random.integers(0, 1 << 16, len(blocks), dtype=np.uint16)
            bits = np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits).astype(np.uint16)
            bits[:2] = (0x8000, 0x0001)
            blocks[:, at:at + 2] = bits.view(np.uint8).reshape(-1, 2)
        data = blocks.reshape(3, 2, size)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        expected[kind.name] = gguf.dequantize(data, kind).reshape(3, 2, elements)
    finish(writer)
    save_file(expected, out / "blocks.safetensors")


TEXTS = ["", " ", "  ", "Hello world", " Hello  world ", "it's we'LL I'd THEY'RE don't", "1 12 123 1234 12345678 3.14",
         "a\nb\r\nc\n\n\nd \n e\t\tf", "naïve cafe\u0301 Å \u212b ﬁ", "中文分词测试 日本語テスト 한국어", "Привет, мир! Γειά σου",
         "x = foo(bar[0]) != baz; // ok", "👩‍👩‍👧 🇩🇪 ½ ² ٣", "    indented\n        more", "<s> </s> <unk> <|im_end|> <|endoftext|>",
         "a<|im_end|>b", "\u0000\u0001", "hello\u00a0world\u3000x", "... --- '''\"\"\"", "ab" * 40]
CORPUS = TEXTS * 3 + ["the quick brown fox jumps over the lazy dog 0123456789 " * 5,
                      "tokenizers cut a text into pieces, and models read the ids of the pieces. " * 5]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
KINDS = gguf.TokenType


def add_tokens(writer, tokens, types):
    writer.add_token_list(tokens)
    writer.add_token_types(types)


def train_bpe(pre_tokenizer, normalizer):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return json.loads(tokenizer.to_str())["model"]


def reference_tokenizer(pre, model, added):
    """Returns the tokenizer of Hugging Face's libraries for a vocabulary."""
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    merges = [tuple(m) for m in model["merges"]]
    vocab = model["vocab"]
    if pre == "gpt-2":
        backend = transformers.GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    elif pre == "qwen2":
        backend = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    elif pre == "olmo":
        backend = transformers.GPTNeoXTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    elif pre == "llama-bpe":
        pattern = transformers.convert_slow_tokenizer.TikTokenConverter().pattern
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated", False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        backend.decoder = decoders.ByteLevel()
    else:
        assert pre == "smollm"
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        backend.decoder = decoders.ByteLevel()
    for content, special in added:
        backend.add_tokens([AddedToken(content, special=special, normalized=False)])
    return backend


def write_bpe(pre, out):
    from tokenizers import Regex, normalizers, pre_tokenizers
    splits = {"gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False)}
    model = train_bpe(splits.get(pre, splits["gpt-2"]), None)
    if pre == "llama-bpe":
        # A token that no merges make, which a piece of text can equal.
        model["vocab"]["quick"] = len(model["vocab"])
    size = len(model["vocab"])
    for text in SPECIAL:
        model["vocab"][text] = len(model["vocab"])
    added = [(text, True) for text in SPECIAL] + [("<tool>", False), ("    ", False)]
    tokenizer = reference_tokenizer(pre, model, added)
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size(True))]
    # After the vocabulary, there are the added tokens and those that the class adds by itself.
    ordinary = [text for text, special in added if not special]
    types = [KINDS.NORMAL if i < size else KINDS.USER_DEFINED if token in ordinary else KINDS.CONTROL
             for i, token in enumerate(tokens)]
    tokens += ["[PAD%d]" % i for i in range(len(tokens), len(tokens) + 3)]
    types += [KINDS.UNUSED] * 3
    writer = gguf.GGUFWriter(out / f"{pre}.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    add_tokens(writer, tokens, types)
    writer.add_token_merges([" ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE)
    finish(writer)
    bos = [tokens.index("<|endoftext|>")] if pre == "llama-bpe" else []
    cases = [{"text": text, "ids": bos + tokenizer.encode(text, add_special_tokens=False).ids}
             for text in TEXTS + ["<tool> x", "a     b"]]
    for case in cases:
        case["decoded"] = tokenizer.decode(case["ids"], skip_special_tokens=True)
    (out / f"{pre}.json").write_text(json.dumps(cases, indent=0) + "\n")


def write_sentence_piece(name, out, prefix):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t for t in CORPUS if t.strip() and "\0" not in t]), model_writer=model,
        vocab_size=420, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=prefix, character_coverage=0.98,
        user_defined_symbols=["<tool>"], minloglevel=2)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, scores, types = [], [], []
    for i in range(pieces.vocab_size()):
        tokens.append(pieces.id_to_piece(i).encode())
        scores.append(pieces.get_score(i))
        kind = KINDS.NORMAL
        if pieces.is_unknown(i):
            kind = KINDS.UNKNOWN
        elif pieces.is_control(i):
            kind = KINDS.CONTROL
        elif pieces.is_unused(i):
            kind = KINDS.UNUSED
        elif pieces.is_byte(i):
            kind = KINDS.BYTE
        elif tokens[-1] == b"<tool>":
            kind = KINDS.USER_DEFINED
        types.append(kind)
    writer = gguf.GGUFWriter(out / f"{name}.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    add_tokens(writer, tokens, types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    if not prefix:
        writer.add_add_space_prefix(False)
    finish(writer)
    cases = []
    for text in TEXTS + ["a<tool>b"]:
        ids = [pieces.bos_id()] + pieces.encode(text)
        cases.append({"text": text, "ids": ids, "decoded": pieces.decode(ids)})
    (out / f"{name}.json").write_text(json.dumps(cases, indent=0) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).parents[2] / "golden" / "gguf")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    for folder in ("models", "tokenizers"):
        (args.out / folder).mkdir(parents=True)
    for case, kind in MODELS:
        write_model(case, kind, args.out / "models")
    write_blocks(args.out)
    for pre in ("gpt-2", "llama-bpe", "olmo", "qwen2", "smollm"):
        write_bpe(pre, args.out / "tokenizers")
    write_sentence_piece("spm", args.out / "tokenizers", True)
    write_sentence_piece("spm-no-prefix", args.out / "tokenizers", False)


if __name__ == "__main__":
    main()
