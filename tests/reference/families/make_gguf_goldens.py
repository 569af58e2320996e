#!/usr/bin/env python3
"""Writes GGUF files for tests to tests/golden/gguf, with the Python package `gguf`.

Needs gguf, numpy, safetensors, sentencepiece, tokenizers, torch and transformers, which the tests do
not need; gguf 0.19 wrote the stored files.

    make_gguf_goldens.py [--out FOLDER] [--only FOLDER]

models/, variants/CASE-TYPE.gguf
                         the weights of tests/golden/families/CASE in a type, under the names and in
                        the layout of llama.cpp's converter (gguf_models.py); norms, routers and
                        biases are F32, MXFP4 blocks stay what they are
models/*-widened.gguf   the weights of the file of the same name without "-widened", converted to
                        F32 by gguf
blocks.gguf             random blocks of every type
blocks.safetensors      the same tensors, converted to F32 by gguf
tokenizers/*.gguf       tokenizers without tensors
tokenizers/*.json       texts and their ids, from transformers, tokenizers or sentencepiece; those of
                        PATTERN_KINDS belong to patterns.gguf with that tokenizer.ggml.pre
"""

import argparse
import io
import json
import pathlib
import shutil

import gguf
import numpy as np
import sentencepiece
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

from gguf_models import write_model

# The models, their types, and whether they have the layout of older converters.
MODELS = [("llama-biases-tied", "bf16"), ("llama-biases-tied", "f32"), ("llama-llama3-shards", "bf16"),
          ("qwen2", "bf16"), ("qwen2", "f16"), ("qwen3-yarn-tied", "bf16"),
          ("mixtral", "bf16"), ("mixtral", "f32"), ("qwen2-moe", "bf16"), ("qwen2-moe", "f32"),
          ("qwen3-moe", "bf16"), ("qwen3-moe", "f32"), ("olmoe", "bf16"), ("olmoe", "f32"),
          ("mixtral", "q8_0"), ("olmoe", "q4_0"),
          ("deepseek-v3", "bf16"), ("deepseek-v3-direct-query-half", "bf16"),
          ("deepseek-v2-groups", "bf16", True), ("gpt-oss", "bf16"), ("gpt-oss-mxfp4", "bf16"),
          ("gemma2", "bf16"), ("gemma3-old-keys", "bf16"), ("phi3-window-partial", "bf16"),
          ("phi3-longrope-long", "bf16"), ("glm4-moe-groups", "bf16"), ("granitemoeshared", "bf16"),
          ("hunyuan", "bf16"), ("ernie4-5-moe", "bf16"), ("bailing-groups", "bf16"), ("dots1", "bf16"),
          *((case, "bf16") for case in
            ("lfm2", "lfm2-moe", "qwen3-next", "qwen3-5", "qwen3-5-moe", "granitemoehybrid-mamba",
             "nemotron-h", "nemotron-h-latent-groups", "nemotron-h-pattern-biases", "kimi-linear",
             "afmoe", "deepseek-v32", "exaone-moe", "glm4-moe-lite", "glm4v-moe", "glm-moe-dsa",
             "granite", "hy-v3", "mellum", "minimax-m2", "qwen3-vl-moe", "solar-open",
             "bailing-hybrid", "phimoe"))]
# Families whose layers differ, in a folder of their own.
VARIANT_MODELS = [(case, "bf16") for case in
                  ("cohere2-moe", "cohere2-moe-dense-first", "gemma4-moe", "gemma4-old-keys", "k2-horizon-mova", "llama4",
                   "mimo-v2-flash", "mistral4", "step3p5", "glm4-moe-mtp")]


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# The offsets of 16-bit floats in a block of each type.
BLOCKS = {Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2],
          Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.MXFP4: []}


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
        if kind == Type.MXFP4:  # scales at both ends of the range and in its middle
            blocks[:, 0] = (0, 1, 2, 127, 200, 255)
        data = blocks.reshape(3, 2, size)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        with np.errstate(over="ignore"):
            expected[kind.name] = gguf.dequantize(data, kind).reshape(3, 2, elements)
    finish(writer)
    save_file(expected, out / "blocks.safetensors")


TEXTS = ["", " ", "  ", "Hello world", " Hello  world ", "it's we'LL I'd THEY'RE don't", "1 12 123 1234 12345678 3.14",
         "a\nb\r\nc\n\n\nd \n e\t\tf", "naïve cafe\u0301 Å \u212b ﬁ", "中文分词测试 日本語テスト 한국어", "Привет, мир! Γειά σου",
         "x = foo(bar[0]) != baz; // ok", "👩‍👩‍👧 🇩🇪 ½ ² ٣", "    indented\n        more", "<s> </s> <unk> <|im_end|> <|endoftext|>",
         "a<|im_end|>b", "\u0000\u0001", "hello\u00a0world\u3000x", "... --- '''\"\"\"", "ab" * 40]
CORPUS = TEXTS * 3 + ["the quick brown fox jumps over the lazy dog 0123456789 " * 5,
                      "tokenizers cut a text into pieces, and models read the ids of the pieces. " * 5]
# Where the patterns below differ.
MORE_TEXTS = ["camelCase HTTPServer iPhone's XMLHttpRequest's IT'S", "a/b//c\n/d\n;/\n\n  x", "ÀÉ éà ǅa ʰʷ aʰB",
              "漢字かなカナ混じり文、漢字Latin文字", "!abc .def (ghi) $x _y", "¡hola! ¿qué? «oui» … “a”", "abc漢字abc 漢字 ABC漢字",
              "tail  \n  ", "e\u0301a\u0300 x\u0301Y\u0301", "ԱՖ աֆ აბ ᲐᲑ ᎠᎡ", "한국어 텍스트 ࠀ ก", "٣٤٥ ½¾ ²³ 1234567"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
KINDS = gguf.TokenType


def add_tokens(writer, tokens, types):
    writer.add_token_list(tokens)
    writer.add_token_types(types)


# The patterns of the models' own tokenizer.json or tokenizer class. They are written here as there, and in
# another way in model_loaders/tokenizer/split_patterns.h.
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
KIMI = r"[\p{Han}]+|" + O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
BAILING = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
DEEPSEEK3 = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
             r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
             r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
EXAONE = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+")
HORIZON = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}|\p{M}|\u200c|\u200d)+|\p{N}{1,3}"
           r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
COMMAND = [r"\d{1,3}(?=(?:\d{3})*\b)", O200K]
# Digits are cut into groups from the right.
AFMOE = [r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
         "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ヿ･-ﾟ⼀-\u2fdfเ-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+", DEEPSEEK3[2]]
# Ranges of letters that have a case.
CASED = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77
    1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE
    1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124
    2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3
    A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A
    10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"""


def deepseek2_patterns():
    cased = "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in CASED.split())
    return ["[\r\n]", rf"\s?[{cased}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+"]


PLAIN_KINDS = ["gpt-2", "llama-bpe", "olmo", "qwen2", "smollm"]
PATTERN_KINDS = ["afmoe", "cohere2moe", "exaone-moe", "k2-horizon", "tekken", "bailingmoe2", "deepseek-llm",
                 "deepseek-v3", "gpt-4o", "kimi-k2", "qwen35"]
COMPOSED_KINDS = ["cohere2moe", "exaone-moe"]


def train_bpe(pre_tokenizer, corpus):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=420 + 10 * (len(corpus) - len(CORPUS)), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return json.loads(tokenizer.to_str())["model"]


def byte_level(vocab, merges, patterns, digits=False, ignore_merges=False):
    """Returns a tokenizer that splits by patterns one after the other, and then at digits."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated", False) for pattern in patterns]
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)])
    backend.decoder = decoders.ByteLevel()
    return backend


def reference_tokenizer(pre, model, added):
    """Returns the tokenizer of Hugging Face's libraries for a vocabulary."""
    import transformers
    from tokenizers import AddedToken
    merges = [tuple(m) for m in model["merges"]]
    vocab = model["vocab"]
    if pre == "gpt-2":
        backend = transformers.GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    elif pre == "qwen2":
        backend = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    elif pre == "qwen35":
        from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
        backend = Qwen3_5Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    elif pre == "olmo":
        backend = transformers.GPTNeoXTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    elif pre == "llama-bpe":
        pattern = transformers.convert_slow_tokenizer.TikTokenConverter().pattern
        backend = byte_level(vocab, merges, [pattern], ignore_merges=True)
    elif pre == "deepseek-llm":
        backend = byte_level(vocab, merges, deepseek2_patterns(), digits=True)
    elif pre == "smollm":
        backend = byte_level(vocab, merges, [], digits=True)
    else:
        patterns = {"afmoe": AFMOE, "cohere2moe": COMMAND, "exaone-moe": [EXAONE], "k2-horizon": [HORIZON],
                    "tekken": [TEKKEN],
                    "bailingmoe2": [BAILING], "deepseek-v3": DEEPSEEK3, "gpt-4o": [O200K], "kimi-k2": [KIMI]}
        backend = byte_level(vocab, merges, patterns[pre])
        if pre in COMPOSED_KINDS:
            from tokenizers import normalizers
            backend.normalizer = normalizers.NFC()
    for content, special in added:
        backend.add_tokens([AddedToken(content, special=special, normalized=False)])
    return backend


def write_bpe(pre, out, more):
    from tokenizers import pre_tokenizers
    model = train_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), CORPUS + 3 * more)
    if pre == "llama-bpe":
        # A token that no merges make, which a piece of text can equal.
        model["vocab"]["quick"] = len(model["vocab"])
    # Merges of a letter and a mark, whose bytes are CC 81: only some patterns keep them together.
    for left, right in (("\u00cc", "\u0123"), ("\u0120", "x"), ("\u0120x", "\u00cc\u0123")) if more else ():
        if left + right not in model["vocab"]:
            model["vocab"][left + right] = len(model["vocab"])
            model["merges"].append([left, right])
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
    name = "patterns" if more else pre
    writer = gguf.GGUFWriter(out / f"{name}.gguf", "llama")
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
             for text in TEXTS + more + ["<tool> x", "a     b"]]
    for other in PLAIN_KINDS + PATTERN_KINDS if more else []:  # the texts must show that a pattern is not another one
        if other != pre:
            reference = reference_tokenizer(other, model, added)
            assert any(bos + reference.encode(c["text"], add_special_tokens=False).ids != c["ids"] for c in cases), other
    for case in cases:
        case["decoded"] = tokenizer.decode(case["ids"], skip_special_tokens=True)
    (out / f"{pre}.json").write_text(json.dumps(cases, indent=0) + "\n")


def write_sentence_piece(name, out, prefix, more=()):
    """`more` are further user-defined pieces; converters write their spaces as spaces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t for t in CORPUS if t.strip() and "\0" not in t]), model_writer=model,
        vocab_size=420, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=prefix, character_coverage=0.98,
        user_defined_symbols=["<tool>", *more], minloglevel=2)
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
        elif tokens[-1].decode() in ("<tool>", *more):
            tokens[-1] = tokens[-1].decode().replace("\u2581", " ").encode()
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
    for text in TEXTS + ["a<tool>b"] + ["a" + " " * n + "b" for n in range(2, 9) if more]:
        ids = [pieces.bos_id()] + pieces.encode(text)
        cases.append({"text": text, "ids": ids, "decoded": pieces.decode(ids)})
    (out / f"{name}.json").write_text(json.dumps(cases, indent=0) + "\n")


def write_gemma4(out):
    """A tokenizer of characters, with bytes for those that are not in the vocabulary."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split("\u2581", "merged_with_next")])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
    visible = ["<|channel>", "<channel|>"]
    ends = ["\n" * n for n in range(2, 6)]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet = [chr(c) for c in range(33, 127)] + ["\u2581", "\n", "é", "中"]
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=560, show_progress=False, initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        special_tokens=special + visible + ends + data))
    model = json.loads(trained.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(m) for m in model["merges"]]
    tokenizer = transformers.GemmaTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in visible + ends])
    tokens = sorted(vocab, key=vocab.get)
    kinds = [KINDS.CONTROL if token in special else KINDS.USER_DEFINED if token in visible
             else KINDS.BYTE if token in data else KINDS.NORMAL for token in tokens]
    kinds[tokens.index("<unk>")] = KINDS.UNKNOWN
    writer = gguf.GGUFWriter(out / "gemma4.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    add_tokens(writer, tokens, kinds)
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_merges([" ".join(m) for m in merges])
    for add, text in ((writer.add_bos_token_id, "<bos>"), (writer.add_eos_token_id, "<eos>"),
                      (writer.add_unk_token_id, "<unk>"), (writer.add_pad_token_id, "<pad>")):
        add(tokens.index(text))
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    finish(writer)
    cases = []
    for text in TEXTS + MORE_TEXTS + ["a\n\nb\n\n\n\n\n\n\n\nc", "<|channel>x<channel|> y", "▁a ▁"]:
        ids = [tokens.index("<bos>")] + tokenizer.encode(text, add_special_tokens=False).ids
        cases.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True)})
    (out / "gemma4.json").write_text(json.dumps(cases, indent=0) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).parents[2] / "golden" / "gguf")
    parser.add_argument("--only", choices=("models", "variants", "tokenizers"), help="only this folder")
    args = parser.parse_args()
    folders = [args.only] if args.only else ["models", "variants", "tokenizers"]
    for folder in folders:
        shutil.rmtree(args.out / folder, ignore_errors=True)
        (args.out / folder).mkdir(parents=True)
    torch.set_num_threads(1)
    for folder, models in (("models", MODELS), ("variants", VARIANT_MODELS)):
        for case, kind, *legacy in models if folder in folders else ():
            write_model(case, kind, args.out / folder, finish, *legacy)
    if "models" in folders:
        write_blocks(args.out)
    if "tokenizers" not in folders:
        return
    for pre in PLAIN_KINDS:
        write_bpe(pre, args.out / "tokenizers", [])
    for pre in PATTERN_KINDS:
        write_bpe(pre, args.out / "tokenizers", MORE_TEXTS)
    write_gemma4(args.out / "tokenizers")
    write_sentence_piece("spm", args.out / "tokenizers", True)
    write_sentence_piece("spm-no-prefix", args.out / "tokenizers", False)
    write_sentence_piece("spm-spaces", args.out / "tokenizers", False, ["\u2581" * 2, "\u2581" * 4])


if __name__ == "__main__":
    main()
