"""Tokenizers of other files than tokenizer.json, for the comparison in parity.py: SentencePiece models,
tiktoken vocabularies, and vocab.json with merges.txt. Each is compared with the program that defines it."""

import base64
import io
import json
import random
import struct
import subprocess

import corpus
import sentencepiece
import tiktoken
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
                        trainers)

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"


def train(texts, model_type):
    model = io.BytesIO()
    lines = corpus.SENTENCES * 3 + [line for text in texts for line in text.split("\n") if line.isascii() and line.isprintable()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=3000, model_type=model_type, byte_fallback=True,
        max_sentence_length=1000, num_threads=1, minloglevel=2, user_defined_symbols=["<user>", "<u", "日本", "  x"],
        control_symbols=["<ctrl>"], hard_vocab_limit=False, character_coverage=0.98, normalization_rule_name="nmt_nfkc",
        num_sub_iterations=1, input_sentence_size=600)
    return proto.ModelProto.FromString(model.getvalue())


def changed(model, change):
    copy = proto.ModelProto()
    copy.CopyFrom(model)
    change(copy)
    return copy


def without_bytes(model):
    kept = [p for p in model.pieces if p.type != proto.ModelProto.SentencePiece.BYTE]
    del model.pieces[:]
    model.pieces.extend(kept)
    model.trainer_spec.byte_fallback = False


def with_unused(model):
    for piece in random.Random(3).sample([p for p in model.pieces if p.type == 1], len(model.pieces) // 4):
        piece.type = proto.ModelProto.SentencePiece.UNUSED


def with_ties(model):
    for piece in model.pieces:
        if piece.type == 1:
            piece.score = -round(abs(piece.score) % 7, 1)


def with_positive_scores(model):
    for piece in model.pieces:
        if piece.type == 1:
            piece.score += 11.5


def setting(name, value):
    def change(model):
        setattr(model.normalizer_spec, name, value)
    return change


def as_suffix(model):
    model.trainer_spec.treat_whitespace_as_suffix = True


def no_character_map(model):
    model.normalizer_spec.ClearField("precompiled_charsmap")


CHANGES = {
    "": lambda model: None,
    "no bytes": without_bytes,
    "unused": with_unused,
    "ties": with_ties,
    "positive": with_positive_scores,
    "no dummy prefix": setting("add_dummy_prefix", False),
    "extra spaces": setting("remove_extra_whitespaces", False),
    "plain spaces": lambda model: (setting("add_dummy_prefix", False)(model), setting("remove_extra_whitespaces", False)(model)),
    "no escape": setting("escape_whitespaces", False),
    "suffix": as_suffix,
    "identity": no_character_map,
}


class FileCase:
    """Compares a folder's tokenizer with functions that encode and decode."""

    def __init__(self, name, files, texts, encode, decode, id_lists=(), flags=()):
        self.name, self.files, self.texts, self.encode, self.decode = name, files, texts, encode, decode
        self.id_lists, self.flags = id_lists, list(flags)

    def run(self, cli, folder):
        folder.mkdir(parents=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        encoded = [t.encode() for t in self.texts]
        expected = [self.encode(t) for t in self.texts]
        lists = [list(ids) for ids in self.id_lists]
        runs = [(encoded, expected, []), ([struct.pack("<%di" % len(x), *x) for x in lists], lists, ["ids"])]
        times = []
        for records, ids, flags in runs:
            (folder / "input").write_bytes(b"".join(struct.pack("<I", len(b)) + b for b in records))
            command = [cli, str(folder), str(folder / "input"), str(folder / "output")] + self.flags + flags
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return self.fail("our program failed: " + done.stderr.strip())
            times.append(done.stdout.strip())
            output, pos = (folder / "output").read_bytes(), 0
            for i, expected_ids in enumerate(ids):
                count = struct.unpack_from("<I", output, pos)[0]
                ours = list(struct.unpack_from("<%di" % count, output, pos + 4))
                size = struct.unpack_from("<I", output, pos + 4 + 4 * count)[0]
                pos += 8 + 4 * count
                text = output[pos : pos + size].decode()
                pos += size
                if ours != expected_ids:
                    at = next((k for k, (a, b) in enumerate(zip(ours, expected_ids)) if a != b), min(len(ours), len(expected_ids)))
                    return self.fail("record %d, token %d: ours %s, expected %s, in %r"
                                     % (i, at, ours[at : at + 5], expected_ids[at : at + 5], self.texts[i][:60]))
                if text != self.decode(expected_ids):
                    return self.fail("record %d: decoded %r, expected %r" % (i, text[:200], self.decode(expected_ids)[:200]))
        print("ok   %-28s %5.2f MB in %5d records, %8d ids; ours: %s"
              % (self.name, sum(map(len, encoded)) / 1e6, len(encoded), sum(map(len, expected)), times[0]))
        return True

    def fail(self, message):
        print("FAIL %-28s %s" % (self.name, message))
        return False


def sentence_piece_case(name, model, texts, config=None, enclose=lambda p, ids: ids):
    data = model.SerializeToString()
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    rng = random.Random(17)
    special = [i for i in range(processor.get_piece_size()) if processor.is_byte(i) or processor.is_control(i) or processor.is_unknown(i)]
    spaced = [i for i in range(processor.get_piece_size()) if processor.id_to_piece(i).startswith("▁")]
    plain = range(processor.get_piece_size())
    lists = [[rng.choice(rng.choice([special, spaced, plain])) for _ in range(rng.randint(0, 15))] for _ in range(1000)]
    files = {"tokenizer.model": data}
    if config is not None:
        files["tokenizer_config.json"] = json.dumps(config).encode()
    flags = ["skip_special"] + ["add_special"] * (config is not None)
    return FileCase(name, files, texts, lambda t: enclose(processor, processor.encode(t)), processor.decode, lists, flags)


def fairseq_case(name, model, texts, with_dictionary):
    """Compares with fairseq's rules, written down here: pieces become symbols of a dictionary."""
    data = model.SerializeToString()
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    symbols = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [p.piece for p in model.pieces if p.piece not in symbols]
    files = {"sentencepiece.bpe.model": data}
    if with_dictionary:  # another order, some pieces missing, more symbols
        random.Random(1).shuffle(pieces)
        pieces = pieces[50:] + ["</line>", "madeupword0000"]
        files = {"tokenizer.model": data, "dict.txt": "".join("%s %d\n" % (p, i) for i, p in enumerate(pieces)).encode()}
    symbols += pieces
    index = {s: i for i, s in enumerate(symbols)}
    pieces_of = lambda text: [processor.id_to_piece(i) for i in processor.encode(text)]
    return FileCase(name, files, texts, lambda t: [0] + [index.get(p, 3) for p in pieces_of(t)],
                    lambda ids: processor.decode([symbols[i] for i in ids[1:]]), flags=["skip_special", "add_special"])


def marian_case(name, model, texts):
    """Compares with the rules of transformers' MarianTokenizer, written down here."""
    data = model.SerializeToString()
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    names = ("<unk>", "<s>", "</s>")
    pieces = [p.piece for p in model.pieces if p.piece not in names and p.type != 6]
    random.Random(2).shuffle(pieces)
    symbols = ["</s>", "<unk>", ">>fra<<", ">>deu_Latn<<", *pieces[50:], "\u2581cible", "<pad>"]
    index = {symbol: i for i, symbol in enumerate(symbols)}

    def encode(text):
        code = next((c for c in symbols[2:4] if text.startswith(c)), "")
        pieces = [processor.id_to_piece(i) for i in processor.encode(text[len(code):])]
        return ([index[code]] if code else []) + [index.get(p, 1) for p in pieces] + [0]

    files = {"source.spm": data, "target.spm": data, "vocab.json": json.dumps(index).encode()}
    texts = [t for t in texts if not any(c in t[1:] for c in symbols[2:4])]
    texts += [rest + t for t in texts[:200] for rest in symbols[2:4]]
    decode = lambda ids: processor.decode([symbols[i] for i in ids if i not in (0, 1, 2, 3, len(symbols) - 1)])
    return FileCase(name, files, texts, encode, decode, flags=["skip_special", "add_special"])


def roberta_case(name, tokens, merges, tokenizer_class, texts, **config):
    """Compares vocab.json with merges.txt, and no list of tokens, with RoBERTa's tokenizer."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab = {token: i for i, token in enumerate([*names, *tokens, "<mask>"])}
    library = Tokenizer(models.BPE(vocab, [tuple(m) for m in merges]))
    prefix = config.get("add_prefix_space", False)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(t, normalized=False) for t in names]
                               + [AddedToken("<mask>", lstrip=True, normalized=False)])
    library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, prefix)
    files = {"vocab.json": json.dumps(vocab).encode(),
             "merges.txt": "".join("%s %s\n" % tuple(m) for m in merges).encode(),
             "tokenizer_config.json": json.dumps({"tokenizer_class": tokenizer_class, **config}).encode()}
    return FileCase(name, files, texts, lambda t: library.encode(t).ids,
                    lambda ids: library.decode(ids, skip_special_tokens=False), flags=["add_special"])


def byte_vocabulary(texts):
    """Returns tokens of a byte-level BPE, in order of their ids, and its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=3000, show_progress=False, initial_alphabet=alphabet))
    learned = json.loads(tokenizer.to_str())["model"]
    return sorted(learned["vocab"], key=learned["vocab"].get), learned["merges"]


def byte_of():
    """Returns the byte of each character of the byte-level alphabet."""
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or (b >= 0xA1 and b != 0xAD)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def added_config(special, first_id, **more):
    tokens = {str(first_id + i): {"content": t, "special": True} for i, t in enumerate(special)}
    return json.dumps({"added_tokens_decoder": tokens, **more}).encode()


def tiktoken_case(name, tokens, pattern, texts):
    to_byte = byte_of()
    ranks = {bytes(to_byte[c] for c in token): i for i, token in enumerate(tokens)}
    special = ["<|endoftext|>", "<|fim|>"]
    first = len(ranks) + 7  # ids may have gaps
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={t: first + i for i, t in enumerate(special)})
    lines = b"".join(base64.b64encode(t) + b" %d\n" % i for t, i in ranks.items())
    files = {"x.tiktoken": lines, "tokenizer_config.json": added_config(special, first, pat_str=pattern)}
    return FileCase(name, files, texts, lambda t: encoding.encode(t, allowed_special="all"), encoding.decode)


def vocab_case(name, tokens, merges, tokenizer_class, texts, **config):
    vocab = {token: i for i, token in enumerate(tokens)}
    special = ["<|endoftext|>", "<|im_start|>"]
    library = Tokenizer(models.BPE(vocab, [tuple(m) for m in merges]))
    if tokenizer_class.startswith("Qwen2"):
        library.normalizer = normalizers.NFC()
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space", False))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    files = {
        "vocab.json": json.dumps(vocab).encode(),
        "merges.txt": ("#version: 0.2\n" + "".join("%s %s\n" % tuple(m) for m in merges)).encode(),
        "tokenizer_config.json": added_config(special, len(vocab), tokenizer_class=tokenizer_class, **config),
    }
    return FileCase(name, files, texts, lambda t: library.encode(t).ids, lambda ids: library.decode(ids, skip_special_tokens=False))


def cases(texts, training, wanted):
    """Yields the cases whose names are wanted."""
    few = training[:250]
    rng = random.Random(31)
    bits = ["<user>", "<u", "<user", "日本", "日", "  x", "<s>", "</s>", "<unk>", "<ctrl>", "<0x41>", "▁", " ", "  ", "\t", "\n", "é",
            "e\u0301", "ﬁ", "①", "\u200b", "\u3000", "㍿", "word", "龘", "\U0001f600", "<|endoftext|>", "<|im_start|>", "<|fim|>"]
    odd = ["".join(rng.choice(bits) for _ in range(rng.randint(0, 20))) for _ in range(600)]
    some = texts[: max(40, len(texts) // 8)]
    for model_type in ("unigram", "bpe"):
        trained = None
        for change_name, change in CHANGES.items():
            name = ("sentencepiece %s %s" % (model_type, change_name)).strip()
            if wanted(name):
                trained = trained or train(few, model_type)
                yield sentence_piece_case(name, changed(trained, change), (some if change_name else texts) + odd)
        for with_dictionary in (True, False):
            name = "fairseq %s%s" % (model_type, " dictionary" * with_dictionary)
            if wanted(name):
                trained = trained or train(few, model_type)
                yield fairseq_case(name, trained, odd + some, with_dictionary)
        name = "marian %s" % model_type
        if wanted(name):
            trained = trained or train(few, model_type)
            yield marian_case(name, changed(trained, without_bytes), odd + some)
        name = "sentencepiece %s bos eos" % model_type
        if wanted(name):
            trained = trained or train(few, model_type)
            yield sentence_piece_case(name, trained, odd, {"add_bos_token": True, "add_eos_token": True},
                                      lambda p, ids: [p.bos_id()] + ids + [p.eos_id()])
    if wanted("tiktoken") or wanted("vocab.json"):
        tokens, merges = byte_vocabulary(few)
        for name, pattern in (("tiktoken cl100k", CL100K), ("tiktoken gpt2", GPT2)):
            if wanted(name):
                yield tiktoken_case(name, tokens, pattern, texts + odd)
        for tokenizer_class, config in (("GPT2Tokenizer", {}), ("GPT2TokenizerFast", {"add_prefix_space": True}), ("Qwen2Tokenizer", {})):
            name = "vocab.json %s" % tokenizer_class
            if wanted(name):
                yield vocab_case(name, tokens, merges, tokenizer_class, texts + odd, **config)
        for tokenizer_class, config in (("RobertaTokenizer", {}), ("BartTokenizerFast", {"add_prefix_space": True})):
            name = "vocab.json %s" % tokenizer_class
            if wanted(name):
                masked = [t.replace("<user>", "<mask>") for t in odd]
                yield roberta_case(name, tokens, merges, tokenizer_class, texts + masked, **config)
