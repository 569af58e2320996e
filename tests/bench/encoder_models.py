"""Writes encoders with random bf16 weights, and decoders of equal shape, for encoders.py."""

import json
import pathlib
import struct

import numpy as np

WORDS = 4096
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNKNOWN, FIRST, LAST, MASK = range(5)


class Tensors:
    """Collects tensors in bf16 and writes them as a safetensors file."""

    def __init__(self, seed=1):
        self.random = np.random.default_rng(seed)
        self.values = {}

    def add(self, name, *shape):
        """Adds a matrix whose products keep the size of their inputs."""
        scale = shape[-1] ** -0.5
        self.put(name, self.random.standard_normal(shape, dtype=np.float32) * scale)

    def constant(self, name, value, *shape):
        self.put(name, np.full(shape, value, np.float32))

    def put(self, name, values):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        self.values[name] = ((bits + 0x8000) >> 16).astype(np.uint16)

    def as_f32(self, name):
        return (self.values[name].astype(np.uint32) << 16).view(np.float32)

    def save(self, path):
        header, at = {}, 0
        for name, value in self.values.items():
            header[name] = {"dtype": "BF16", "shape": list(value.shape),
                            "data_offsets": [at, at + value.nbytes]}
            at += value.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for value in self.values.values():
                file.write(value.tobytes())


def vocabulary():
    """Returns the words; each is one token."""
    return SPECIAL + [f"w{index}" for index in range(WORDS - len(SPECIAL))]


def tokenizer():
    ids = {word: index for index, word in enumerate(vocabulary())}
    special = [{"id": ids[name], "content": name, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True} for name in SPECIAL]

    def part(name):
        return {"SpecialToken": {"id": name, "type_id": 0}}

    return {
        "version": "1.0", "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [part("[CLS]"), {"Sequence": {"id": "A", "type_id": 0}}, part("[SEP]")],
            "pair": [part("[CLS]"), {"Sequence": {"id": "A", "type_id": 0}}, part("[SEP]"),
                     {"Sequence": {"id": "B", "type_id": 1}}, part("[SEP]")],
            "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]}
                               for name in ("[CLS]", "[SEP]")}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": ids}}


def texts(count=64, seed=2):
    """Returns texts of 6 to 254 random words, as many short as long ones on a logarithmic scale;
    two special tokens surround each."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.uniform(np.log(8), np.log(256), count)).astype(int) - 2
    words = vocabulary()[len(SPECIAL):]
    return [" ".join(random.choice(words, length)) for length in lengths]


def write_folder(folder, config, tensors, **files):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config": config, "tokenizer": tokenizer(), **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    tensors.save(folder / "model.safetensors")


def write_equal_shapes(folder, experts):
    """Writes an encoder and a decoder of the native format that differ in attention and head only:
    width 512, 12 layers, with `experts` experts of which a token uses two, or without experts."""
    width, layers, inner = 512, 12, 2048
    form = {"form": "gated", "activation": "silu"}
    feed_forward = {"kind": "dense", "expert": form, "width": inner}
    if experts:
        feed_forward = {"kind": "routed", "expert": form, "routing": {
            "num_experts": experts, "widths": inner // 2, "gate": "softmax",
            "score": {"kind": "dot"}, "select": {"kind": "top_k", "k": 2}, "renormalize": True}}
    common = {
        "format_version": 2, "vocab_size": WORDS, "hidden_size": width, "bos_token_id": FIRST,
        "eos_token_id": LAST,
        "num_hidden_layers": layers, "max_position_embeddings": 2048,
        "norm": {"kind": "rms", "eps": 1e-5, "placement": "pre"},
        "position": {"kind": "rope", "theta": 10000, "pairing": "half", "fraction": 1.0},
        "attention": {"kind": "dense", "num_heads": 8, "num_kv_heads": 8, "head_dim": 64},
        "feed_forward": feed_forward}
    tensors = Tensors()
    tensors.add("embed.weight", WORDS, width)
    tensors.constant("norm.weight", 1, width)
    for layer in range(layers):
        block = f"blocks.{layer}."
        for name in "qkvo":
            tensors.add(f"{block}attention.{name}.weight", width, width)
        for name in ("attention", "feed_forward"):
            tensors.constant(f"{block}{name}.norm.weight", 1, width)
        if experts:
            tensors.add(f"{block}feed_forward.router.weight", experts, width)
        for expert in range(max(experts, 1)):
            part = f"experts.{expert}." if experts else ""
            rows = inner // 2 if experts else inner
            tensors.add(f"{block}feed_forward.{part}gate.weight", rows, width)
            tensors.add(f"{block}feed_forward.{part}up.weight", rows, width)
            tensors.add(f"{block}feed_forward.{part}down.weight", width, rows)
    name = "moe" if experts else "dense"
    write_folder(pathlib.Path(folder) / f"encoder-{name}", {
        "model_type": "routed_encoder", "head": {"kind": "none"},
        "tie_word_embeddings": False, "pooling": {"kind": "mean", "normalize": True}, **common},
        tensors)
    write_folder(pathlib.Path(folder) / f"decoder-{name}", {
        "model_type": "routed_decoder", "tie_word_embeddings": True, **common}, tensors)


NOMIC = {"width": 768, "layers": 12, "heads": 12, "inner": 3072, "experts": 8}


def nomic_tensors(experts):
    """Returns the tensors of a model of the size of nomic-embed-text v1.5, or of v2-moe, whose odd
    layers have experts."""
    width, inner = NOMIC["width"], NOMIC["inner"]
    out = Tensors()
    out.add("embeddings.word_embeddings.weight", WORDS, width)
    out.add("embeddings.token_type_embeddings.weight", 2, width)
    norms = ["emb_ln"]
    for layer in range(NOMIC["layers"]):
        block = f"encoder.layers.{layer}."
        norms += [f"{block}norm1", f"{block}norm2"]
        out.add(f"{block}attn.Wqkv.weight", 3 * width, width)
        out.add(f"{block}attn.out_proj.weight", width, width)
        if experts:
            out.constant(f"{block}attn.Wqkv.bias", 0, 3 * width)
            out.constant(f"{block}attn.out_proj.bias", 0, width)
        if experts and layer % 2 == 1:
            out.add(f"{block}mlp.router.layer.weight", NOMIC["experts"], width)
            out.add(f"{block}mlp.experts.mlp.w1", NOMIC["experts"] * inner, width)
            out.add(f"{block}mlp.experts.mlp.w2", NOMIC["experts"] * inner, width)
            out.constant(f"{block}mlp.experts.bias", 0, width)
        elif experts:
            out.add(f"{block}mlp.fc1.weight", inner, width)
            out.add(f"{block}mlp.fc2.weight", width, inner)
            out.constant(f"{block}mlp.fc1.bias", 0, inner)
            out.constant(f"{block}mlp.fc2.bias", 0, width)
        else:
            out.add(f"{block}mlp.fc11.weight", inner, width)
            out.add(f"{block}mlp.fc12.weight", inner, width)
            out.add(f"{block}mlp.fc2.weight", width, inner)
    for name in norms:
        out.constant(f"{name}.weight", 1, width)
        out.constant(f"{name}.bias", 0, width)
    return out


def write_nomic(folder, experts, tensors):
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"),
                                                 ("2_Normalize", "Normalize")])]
    config = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert",
              "vocab_size": WORDS, "type_vocab_size": 2, "dtype": "bfloat16"}
    if experts:
        config |= {"activation_function": "gelu", "layer_norm_epsilon": 1e-5, "mlp_fc1_bias": True,
                   "mlp_fc2_bias": True, "moe_every_n_layers": 2, "moe_top_k": 2,
                   "n_embd": NOMIC["width"], "n_head": NOMIC["heads"], "n_inner": NOMIC["inner"],
                   "n_layer": NOMIC["layers"], "n_positions": 2048,
                   "num_experts": NOMIC["experts"], "prenorm": False, "qkv_proj_bias": True,
                   "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0,
                   "rotary_emb_interleaved": False}
    else:
        config |= {"head_dim": 64, "hidden_act": "silu", "hidden_size": NOMIC["width"],
                   "intermediate_size": NOMIC["inner"], "layer_norm_eps": 1e-12,
                   "max_position_embeddings": 2048, "num_attention_heads": NOMIC["heads"],
                   "num_hidden_layers": NOMIC["layers"], "pad_token_id": PAD,
                   "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    write_folder(folder, config, tensors, modules=modules)
    pooling = pathlib.Path(folder) / "1_Pooling"
    pooling.mkdir(exist_ok=True)
    (pooling / "config.json").write_text(json.dumps({
        "word_embedding_dimension": NOMIC["width"], "pooling_mode_mean_tokens": True}))


def write_gguf(path, experts, tensors, gguf):
    """Writes the same model for llama.cpp. `gguf`: the package of that name."""
    width, inner = NOMIC["width"], NOMIC["inner"]
    out = gguf.GGUFWriter(path, "nomic-bert-moe" if experts else "nomic-bert")
    out.add_context_length(2048)
    out.add_embedding_length(width)
    out.add_feed_forward_length(inner)
    out.add_block_count(NOMIC["layers"])
    out.add_head_count(NOMIC["heads"])
    out.add_layer_norm_eps(1e-5 if experts else 1e-12)
    out.add_rope_freq_base(10000.0)
    out.add_causal_attention(False)
    out.add_pooling_type(gguf.PoolingType.MEAN)
    if experts:
        out.add_moe_every_n_layers(2)
        out.add_expert_count(NOMIC["experts"])
        out.add_expert_used_count(2)
    out.add_tokenizer_model("bert")
    words = vocabulary()
    out.add_token_list([word if word in SPECIAL else "\u2581" + word for word in words])
    out.add_token_types([gguf.TokenType.CONTROL if word in SPECIAL else gguf.TokenType.NORMAL
                         for word in words])
    out.add_token_type_count(2)
    out.add_bos_token_id(FIRST)
    out.add_eos_token_id(LAST)
    out.add_sep_token_id(LAST)
    out.add_pad_token_id(PAD)
    out.add_unk_token_id(UNKNOWN)
    out.add_mask_token_id(MASK)

    def add(name, values):
        # llama.cpp adds vectors and types of tokens in f32 only.
        if values.ndim == 1 or name == "token_types.weight":
            out.add_tensor(name, values)
        else:
            out.add_tensor(name, gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16),
                           raw_dtype=gguf.GGMLQuantizationType.BF16)

    get = tensors.as_f32
    add("token_embd.weight", get("embeddings.word_embeddings.weight"))
    add("token_types.weight", get("embeddings.token_type_embeddings.weight"))
    names = {"emb_ln": "token_embd_norm"}
    for layer in range(NOMIC["layers"]):
        names[f"encoder.layers.{layer}.norm1"] = f"blk.{layer}.attn_output_norm"
        names[f"encoder.layers.{layer}.norm2"] = f"blk.{layer}.layer_output_norm"
    for name, other in names.items():
        for part in ("weight", "bias"):
            add(f"{other}.{part}", get(f"{name}.{part}"))
    for layer in range(NOMIC["layers"]):
        block, other = f"encoder.layers.{layer}.", f"blk.{layer}."
        for name, theirs in (("attn.Wqkv", "attn_qkv"), ("attn.out_proj", "attn_output"),
                             ("mlp.fc11", "ffn_up"), ("mlp.fc12", "ffn_gate"),
                             ("mlp.fc1", "ffn_up"), ("mlp.fc2", "ffn_down"),
                             ("mlp.router.layer", "ffn_gate_inp")):
            for part in ("weight", "bias"):
                if f"{block}{name}.{part}" in tensors.values:
                    add(f"{other}{theirs}.{part}", get(f"{block}{name}.{part}"))
        if f"{block}mlp.experts.mlp.w1" in tensors.values:
            first = get(f"{block}mlp.experts.mlp.w1").reshape(-1, inner, width)
            second = get(f"{block}mlp.experts.mlp.w2").reshape(-1, inner, width)
            add(f"{other}ffn_up_exps.weight", first)
            add(f"{other}ffn_down_exps.weight", np.ascontiguousarray(second.transpose(0, 2, 1)))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
