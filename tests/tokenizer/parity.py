"""Compares moeserve's tokenizer with Hugging Face's library. Token ids and decoded texts must be
equal. Tokenizers of other files than tokenizer.json are compared with the programs that define them.

    python3 parity.py --cli build/tests/tokenize_cli [--megabytes 2.2] [--only NAME] [TOKENIZER_DIR ...]

It needs the packages `tokenizers` (0.23), `sentencepiece` (0.2.3) and `tiktoken`. The compared
tokenizers are those built in this file, in styles.py and in files.py, and the tokenizer.json in each
TOKENIZER_DIR.
"""

import argparse
import io
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile
import time

import corpus
import files
import sentencepiece
import styles
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
DEEPSEEK2 = [
    "[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-Ⴥ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim▁hole|>", "<｜User｜>"]


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(pattern if isinstance(pattern, Regex) else Regex(pattern), behavior, invert)


def literal_split(text, behavior="isolated", invert=False):
    return pre_tokenizers.Split(text, behavior, invert)


def byte_level(steps, **kwargs):
    kwargs.setdefault("add_prefix_space", False)
    last = pre_tokenizers.ByteLevel(**kwargs)
    return pre_tokenizers.Sequence(steps + [last]) if steps else last


def train(pre_tokenizer, texts, vocab_size=3000, alphabet=True, normalizer=None, specials=(), **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Case:
    def __init__(self, name, tokenizer, texts, round_trip=True, add_special=False, parse_special=True,
                 skip_special=False, random_ids=False):
        self.name, self.tokenizer, self.texts, self.round_trip = name, tokenizer, texts, round_trip
        self.random_ids = random_ids
        self.add_special, self.parse_special, self.skip_special = add_special, parse_special, skip_special

    def run(self, cli, folder):
        folder.mkdir(parents=True)
        if isinstance(self.tokenizer, pathlib.Path):
            path = self.tokenizer / "tokenizer.json"
            (folder / "tokenizer.json").write_bytes(path.read_bytes())
            library = Tokenizer.from_file(str(path))
            library.no_truncation()
            library.no_padding()
        else:
            # The library loads its tokenizer from the same file as moeserve.
            self.tokenizer.save(str(folder / "tokenizer.json"))
            library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.encode_special_tokens = not self.parse_special
        encoded = [t.encode() for t in self.texts]
        (folder / "input").write_bytes(b"".join(struct.pack("<I", len(b)) + b for b in encoded))
        command = [cli, str(folder), str(folder / "input"), str(folder / "output")]
        command += ["add_special"] * self.add_special + ["no_parse_special"] * (not self.parse_special)
        command += ["skip_special"] * self.skip_special
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return self.fail("our program failed: " + done.stderr.strip())
        start = time.time()
        expected = [e.ids for e in library.encode_batch_fast(self.texts, add_special_tokens=self.add_special)]
        library_seconds = time.time() - start
        texts = library.decode_batch(expected, skip_special_tokens=self.skip_special)
        output, pos = (folder / "output").read_bytes(), 0
        for i, (ids, text) in enumerate(zip(expected, texts)):
            count = struct.unpack_from("<I", output, pos)[0]
            ours = list(struct.unpack_from("<%di" % count, output, pos + 4))
            pos += 4 + 4 * count
            size = struct.unpack_from("<I", output, pos)[0]
            decoded = output[pos + 4 : pos + 4 + size].decode()
            pos += 4 + size
            if ours != ids:
                at = next((k for k, (a, b) in enumerate(zip(ours, ids)) if a != b), min(len(ours), len(ids)))
                before = library.decode(ids[max(0, at - 5) : at], skip_special_tokens=False)
                return self.fail(
                    "record %d, token %d: ours %s, library %s, after %r"
                    % (i, at, [library.id_to_token(x) for x in ours[at : at + 5]],
                       [library.id_to_token(x) for x in ids[at : at + 5]], before)
                )
            if decoded != text:
                return self.fail("record %d: decoded %r, library %r" % (i, decoded[:200], text[:200]))
            if self.round_trip and decoded != self.texts[i]:
                return self.fail("record %d: no round trip: %r from %r" % (i, decoded[:200], self.texts[i][:200]))
        if self.random_ids and not self.decodes_random_ids(command + ["ids"], folder, library):
            return False
        total = sum(map(len, encoded))
        print("ok   %-28s %5.2f MB in %5d records, %8d ids; ours: %s; library encode %.2f s"
              % (self.name, total / 1e6, len(encoded), sum(map(len, expected)),
                 re.sub(r", \d+ bytes, \d+ ids", "", done.stdout.strip()), library_seconds))
        return True

    def decodes_random_ids(self, command, folder, library):
        rng = random.Random(19)
        size = library.get_vocab_size()
        byte_ids = [i for i in range(size) if re.fullmatch("<0x..>", library.id_to_token(i) or "")] or [0]
        lists = [[rng.choice(byte_ids) if rng.random() < 0.3 else rng.randrange(size) for _ in range(rng.randint(1, 12))]
                 for _ in range(1000)]
        lists += [[i] for i in range(size)]
        (folder / "input").write_bytes(b"".join(struct.pack("<I%di" % len(ids), 4 * len(ids), *ids) for ids in lists))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return self.fail("our program failed on ids: " + done.stderr.strip())
        texts = library.decode_batch(lists, skip_special_tokens=self.skip_special)
        output, pos = (folder / "output").read_bytes(), 0
        for ids, text in zip(lists, texts):
            pos += 4 + 4 * len(ids)
            length = struct.unpack_from("<I", output, pos)[0]
            decoded = output[pos + 4 : pos + 4 + length].decode()
            pos += 4 + length
            if decoded != text:
                return self.fail("ids %s: decoded %r, library %r" % (ids, decoded[:200], text[:200]))
        return True

    def fail(self, message):
        print("FAIL %-28s %s" % (self.name, message))
        return False


def character_positions(text):
    """Returns the number of the character for the begin of each character, in bytes, and for the end."""
    positions, at = {}, 0
    for i, c in enumerate(text):
        positions[at] = i
        at += len(c.encode())
    positions[at] = len(text)
    return positions


class TextsCase:
    """Compares the ids, types, special marks and offsets of texts and pairs, whole and cut."""

    def __init__(self, name, tokenizer, texts, add_special=True):
        self.name, self.tokenizer, self.texts, self.add_special = name, tokenizer, texts, add_special

    def run(self, cli, folder):
        folder.mkdir(parents=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        pairs = list(zip(self.texts[0::2], self.texts[1::2]))
        count = 0
        for inputs in (self.texts, pairs):
            for limit, side in ((None, "right"), (7, "right"), (12, "left"), (13, "right"), (40, "left")):
                library = Tokenizer.from_file(str(folder / "tokenizer.json"))
                if limit is not None:
                    library.enable_truncation(limit, direction=side)
                flat = [t.encode() for item in inputs for t in ([item] if isinstance(item, str) else item)]
                (folder / "input").write_bytes(b"".join(struct.pack("<I", len(b)) + b for b in flat))
                command = [cli, str(folder), str(folder / "input"), str(folder / "output"), "texts"]
                command += ["add_special"] * self.add_special + ["pairs"] * (inputs is pairs)
                command += ["cuts_begin"] * (side == "left") + ["limit=%s" % limit] * (limit is not None)
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    return self.fail("our program failed: " + done.stderr.strip())
                numbers, pos = memoryview((folder / "output").read_bytes()).cast("i"), 0
                for item in inputs:
                    one = item if isinstance(item, str) else item[0]
                    expected = library.encode(*([item] if isinstance(item, str) else item), add_special_tokens=self.add_special)
                    size = numbers[pos]
                    ids, types, special, begins, ends = (
                        list(numbers[pos + 1 + k * size : pos + 1 + (k + 1) * size]) for k in range(5))
                    pos += 1 + 5 * size
                    count += size
                    what = "%r, limit %s %s" % (item, limit, side)
                    if ids != expected.ids:
                        return self.fail("ids %s, library %s of %s" % (ids, expected.ids, what))
                    if types != expected.type_ids:
                        return self.fail("types %s, library %s of %s" % (types, expected.type_ids, what))
                    if special != expected.special_tokens_mask:
                        return self.fail("special %s, library %s of %s" % (special, expected.special_tokens_mask, what))
                    maps = [character_positions(t) for t in ([one] if isinstance(item, str) else item)]
                    offsets = [(maps[s or 0][b], maps[s or 0][e]) for s, b, e in zip(expected.sequence_ids, begins, ends)]
                    if offsets != expected.offsets:
                        at = next(k for k, (a, b) in enumerate(zip(offsets, expected.offsets)) if a != b)
                        return self.fail("token %d (%r): offsets %s, library %s of %s"
                                         % (at, expected.tokens[at], offsets[at], expected.offsets[at], what))
        print("ok   %-28s %5d texts, %8d tokens with types and offsets" % (self.name, len(self.texts), count))
        return True

    def fail(self, message):
        print("FAIL %-28s %s" % (self.name, message[:600]))
        return False


def added_token_texts(rng, tokens, count):
    bits = tokens + ["a", "é", " ", "  ", "\n", "\u00a0", "\u180e", "_", "1", "中", "e\u0301", ".", "\u200d", "word", "A\u030a"]
    return ["".join(rng.choice(bits) for _ in range(rng.randint(0, 40))) for _ in range(count)]


def every_code_point():
    return [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


# Yields all cases. The function is long because it is a plain list of tokenizer settings.
def cases(args):
    texts = corpus.records(int(args.megabytes * 1e6)) + corpus.held_out()
    some = corpus.records(300_000, seed=2)
    training = corpus.records(600_000, seed=3) + corpus.held_out()
    wanted = lambda name: not args.only or args.only in name

    def case(name, make, **kwargs):
        if wanted(name):
            yield Case(name, make(), kwargs.pop("texts", texts), **kwargs)

    for folder in args.tokenizers:
        for add, skip in ((False, False), (True, True)):
            yield Case("%s%s" % (folder.resolve().name, " +special" if add else ""), folder, texts, add_special=add,
                       skip_special=skip, round_trip=not add)

    def gpt2(**kwargs):
        tokenizer = train(byte_level([], **kwargs), training, 8000, specials=SPECIALS)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer

    yield from case("gpt2", gpt2)
    yield from case("gpt2 prefix space", lambda: gpt2(add_prefix_space=True), round_trip=False)
    yield from case("gpt2 no regex", lambda: gpt2(use_regex=False), texts=some)
    yield from case("no byte_level regex, raw", lambda: train(byte_level([], use_regex=False), ["ab"]), texts=some)

    def llama3():
        tokenizer = train(byte_level([split(LLAMA3)], use_regex=False), training, 6000, ignore_merges=True)
        tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
        bos = tokenizer.token_to_id("<|begin_of_text|>")
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single="<|begin_of_text|> $A <|eot_id|>",
                    pair="$A $B",
                    special_tokens=[("<|begin_of_text|>", bos), ("<|eot_id|>", tokenizer.token_to_id("<|eot_id|>"))],
                ),
            ]
        )
        return tokenizer

    yield from case("llama3", llama3, add_special=True, skip_special=True)
    yield from case("llama3 bare", llama3, texts=some)

    def qwen2(normalizer=normalizers.NFC()):
        tokenizer = train(byte_level([split(QWEN2)], use_regex=False), training, 5000, normalizer=normalizer)
        tokenizer.add_special_tokens(SPECIALS)
        return tokenizer

    yield from case("qwen2 nfc", qwen2, round_trip=False)
    yield from case("nfc in sequence", lambda: qwen2(normalizers.Sequence([normalizers.NFC()])), texts=some, round_trip=False)
    for name, pattern in (("cl100k", CL100K), ("o200k", O200K)):
        yield from case(name, lambda p=pattern: train(byte_level([split(p)], use_regex=False), training, 4000))

    def deepseek(patterns, digits):
        steps = [split(p) for p in patterns] + ([pre_tokenizers.Digits(individual_digits=True)] if digits else [])
        tokenizer = train(byte_level(steps, use_regex=False), training, 4000)
        tokenizer.add_special_tokens(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"])
        tokenizer.add_tokens([AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=False)])
        return tokenizer

    yield from case("deepseek3", lambda: deepseek(DEEPSEEK3, False))
    yield from case("deepseek2", lambda: deepseek(DEEPSEEK2, True))
    yield from case(
        "starcoder", lambda: train(byte_level([pre_tokenizers.Digits(individual_digits=True)]), training, specials=SPECIALS)
    )
    yield from case("digits joined", lambda: train(byte_level([pre_tokenizers.Digits()], add_prefix_space=True), training),
                    texts=some, round_trip=False)

    # These cases cover every behaviour of Split, with patterns that match nothing, everything and the
    # empty string.
    patterns = [Regex(r"\s"), Regex(r"\p{L}+"), Regex("x*"), Regex(r"a*?"), Regex("$"), Regex("^"), Regex(r"\s+$"),
                Regex(r"(?<=a)b|(?!\w)."), Regex(r"(?>\d+)|\W\D"), Regex("a{,2}|b{2}|c{1,}?|{"), Regex(r"[^\S\r\n]+|[\w-]+"),
                Regex(r"(?i)IT'S?|s"), Regex(r"\x41|\u00e9|\x{4E2D}|\.|\v"), Regex(r"\p{Han}+|\p{^L}|\P{Nd}"), " ", "a", ".", "", "é"]
    base = None
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            for i, pattern in enumerate(patterns):
                name = "split %s%s %s" % (behavior, " inverted" if invert else "", i)
                if not wanted(name):
                    continue
                if base is None:
                    base = train(byte_level([], use_regex=False), [t[:200] for t in training[:300]], 1500)
                make = literal_split if isinstance(pattern, str) else split
                base.pre_tokenizer = byte_level([make(pattern, behavior, invert)], use_regex=False)
                yield Case(name, base, some[:40], round_trip=False)

    # These cases cover all kinds of added tokens.
    rng = random.Random(7)
    contents = ["<s>", "<s>>", "[X]", "ab", "abc", "b c", "Å", "é", "  ", " <y>", "word", "_w", "中中", "e\u0301x", "Ġq"]

    def added(normalizer, special_share=0.5):
        tokenizer = train(byte_level([]), some, 1000, normalizer=normalizer)
        flags = random.Random(11)
        for content in contents:
            flag = lambda share=0.5: flags.random() < share
            token = AddedToken(content, single_word=flag(), lstrip=flag(), rstrip=flag(), normalized=flag())
            add = tokenizer.add_special_tokens if flag(special_share) else tokenizer.add_tokens
            add([token])
        return tokenizer

    added_texts = added_token_texts(rng, contents, 4000)
    for name, normalizer in (("", None), (" nfc", normalizers.NFC())):
        for parse in (True, False):
            for skip in (True, False):
                yield from case("added tokens%s%s%s" % (name, "" if parse else " unparsed", " skipped" if skip else ""),
                                lambda n=normalizer: added(n), texts=added_texts + some[:200], round_trip=False,
                                parse_special=parse, skip_special=skip)

    def single_word():
        tokenizer = train(byte_level([]), some, 600)
        tokenizer.add_tokens([AddedToken("<w>", single_word=True, normalized=False)])
        return tokenizer

    points = every_code_point()
    yield from case("single_word, all characters", single_word, round_trip=False,
                    texts=["".join("%s<w> <w>%s " % (c, c) for c in points[i : i + 100]) for i in range(0, len(points), 100)])

    # Each character class must contain the same code points: the pre-tokenizer removes matching
    # characters from a text of all code points.
    tokenizer = None
    properties = ["L", "M", "N", "P", "S", "Z", "Lu", "Ll", "Lt", "Lm", "Lo", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
                  "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Han", "Hiragana", "Katakana", "Hangul"]
    for pattern in [r"\p{%s}" % p for p in properties] + [
        r"\s", r"\S", r"\d", r"\D", r"\w", r"\W", r"[\s]", r"[\d]", r"[\w]", r"[\S]", r"[\p{L}\p{M}]", r"[\p{N}-]", r"[^\p{P}\p{S}]",
        r"[^\s\p{L}\p{N}]", r"(?i:[a-z'])", r"(?i)k|s", "."]:
        if wanted("set " + pattern):
            if tokenizer is None:
                tokenizer = train(byte_level([], use_regex=False), ["ab"], 256)
            tokenizer.pre_tokenizer = byte_level([split(pattern, "removed")], use_regex=False)
            yield Case("set " + pattern, tokenizer, ["".join(points[i : i + 5000]) for i in range(0, len(points), 5000)],
                       round_trip=False)
    if wanted("digits, all characters"):
        tokenizer = train(byte_level([pre_tokenizers.Digits(individual_digits=True)], use_regex=False), ["ab"], 256)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                          pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)])
        yield Case("digits, all characters", tokenizer, ["".join(points[i : i + 5000]) for i in range(0, len(points), 5000)],
                   round_trip=False)

    # This case covers NFC normalization of all characters, alone and between combining marks.
    marks = "\u0301\u0316\u0327\u0334\u0345\u0308\u3099\u0323\u031b\u1161\u11a8\u0338\u05b0\u0f71\u0653"
    nfc_texts = ["".join(points[i : i + 5000]) for i in range(0, len(points), 5000)]
    nfc_texts += ["".join(a + rng.choice(marks) + c + rng.choice(marks) + rng.choice(marks) + " " for a, c in
                          zip(points[i : i + 3000], points[i + 1 : i + 3001])) for i in range(0, 0x30000, 3000)]
    interesting = [c for c in points[:0x20000] if not c.isascii() and normalizers.NFD().normalize_str(c) != c] + list(marks) * 40
    nfc_texts += ["".join(rng.choice(interesting) for _ in range(3000)) for _ in range(100)]
    yield from case("nfc, all characters", lambda: qwen2(), texts=nfc_texts, round_trip=False)

    # These cases cover models whose tokens consist of characters, and models that lack tokens for
    # some bytes, on texts with unknown characters.
    ascii_texts = [t.encode("ascii", "ignore").decode() for t in training[:300]]
    for fuse in (False, True):
        for fallback in (False, True):
            def characters(fuse=fuse, fallback=fallback, pre_tokenizer=split(r"\s+", "merged_with_next"), decoder=None):
                bytes_kept = ["<0x%02X>" % b for b in range(256) if b != 0xC3] if fallback else []
                tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=fuse, byte_fallback=fallback))
                tokenizer.pre_tokenizer = pre_tokenizer
                tokenizer.train_from_iterator(
                    ascii_texts, trainers.BpeTrainer(vocab_size=1200, show_progress=False, special_tokens=["<unk>"] + bytes_kept))
                if decoder is not None:
                    tokenizer.decoder = decoder
                return tokenizer

            name = "%s%s" % (" fused" if fuse else "", " fallback" if fallback else "")
            yield from case("characters" + name, characters, texts=some, round_trip=False)
            yield from case("bytes missing" + name,
                            lambda c=characters: c(pre_tokenizer=byte_level([]), decoder=decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
                            texts=some, round_trip=False)
    yield from case("characters, fuse decoder", lambda: characters(decoder=decoders.Fuse()), texts=some, round_trip=False)
    yield from case("no pre-tokenizer", lambda: plain(ascii_texts), texts=some, round_trip=False)

    yield from style_cases(args, texts, training, points, wanted)

    runs = [c * (1_000_000 // len(c.encode())) for c in ("a", " ", "\n", "!", "9", "é")]
    runs += [" " * 500_000 + "x" + " " * 500_000, "ab" * 500_000]
    yield from case("runs gpt2", gpt2, texts=runs)
    yield from case("runs deepseek3", lambda: deepseek(DEEPSEEK3, False), texts=runs)
    yield from case("runs no regex", lambda: gpt2(use_regex=False), texts=runs)


def character_maps():
    """Returns the character maps of SentencePiece's normalization rules by name."""
    maps = {}
    for name in ("nmt_nfkc", "nmt_nfkc_cf", "nfkc"):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b"] * 10), model_writer=model, vocab_size=6, model_type="char",
            normalization_rule_name=name, minloglevel=2)
        proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
        maps[name] = proto.normalizer_spec.precompiled_charsmap
    return maps


def style_cases(args, texts, training, points, wanted):
    for name, make, case_texts, options in styles.cases(texts, training, character_maps(), points):
        if wanted(name):
            yield Case(name, make(), case_texts, round_trip=False, **options)
    for name, make, case_texts in styles.text_cases(texts, training, character_maps()):
        for add_special in (True,) if " " in name else (True, False):
            full = "texts %s%s" % (name, "" if add_special else " bare")
            if wanted(full):
                yield TextsCase(full, make(), case_texts, add_special)
    yield from files.cases(texts, training, wanted)


def plain(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator([t[:300] for t in texts], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cli", required=True)
    parser.add_argument("--megabytes", type=float, default=2.2)
    parser.add_argument("--only", help="part of the names of the settings to run")
    parser.add_argument("tokenizers", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    failures = count = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(args):
            count += 1
            failures += not case.run(args.cli, pathlib.Path(folder) / str(count))
    print("%d settings, %d failures" % (count, failures))
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())
