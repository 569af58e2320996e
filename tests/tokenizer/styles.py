"""Tokenizers in the styles of well-known checkpoints, and small ones that show the result of a single
normalizer, pre-tokenizer or decoder, for the comparison in parity.py."""

import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BYTES = ["<0x%02X>" % b for b in range(256)]
UNUSUAL = ["ﬁ", "①", "㍿", "ｶﾞ", "Å", "한글", "e\u0301\u0316", "\u0130I", "ẞ", "\u2126", "\r\n", "\u0600a", "©\u200d©", "क्\u0301",
           "\u0301", "a\u200d", "🇩🇪🇫🇷", "👩‍👩‍👧", "\u00ad", "\u200b", "\ufeff", "\ufffd", "\x00", "\x7f", "ǅ", "½", "\u3000", "…", "„"]


def show_text(normalizer=None, pre_tokenizer=None, decoder=None):
    """Returns a tokenizer whose ids spell the normalized text in bytes. Pieces start with "▁"."""
    model = models.BPE({t: i for i, t in enumerate(BYTES + ["<unk>"])}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.Metaspace(prepend_scheme="always")])
    tokenizer.decoder = decoder or decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def random_texts(seed, bits, count=400, length=60):
    rng = random.Random(seed)
    return ["".join(rng.choice(bits) for _ in range(rng.randint(0, length))) for _ in range(count)]


def pieces_of(texts, count, space="▁"):
    """Returns frequent and random pieces of the texts as SentencePiece would have them."""
    rng = random.Random(5)
    found = {}
    for text in texts:
        text = space + text.replace(" ", space)
        for _ in range(min(len(text), 300)):
            at = rng.randrange(len(text))
            piece = text[at : at + rng.choice([1, 1, 1, 2, 2, 3, 4, 5, 8, 12])]
            found[piece] = found.get(piece, 0) + 1
    return sorted(found, key=lambda p: (-found[p], p))[:count]


def unigram(texts, count=3000, ties=False, byte_fallback=False, first=("<unk>",), **kwargs):
    rng = random.Random(9)
    vocab = [(t, 0.0) for t in first] + [(t, 0.0) for t in BYTES * byte_fallback]
    for rank, piece in enumerate(p for p in pieces_of(texts, count) if p not in first):
        # Sums of these scores are often equal, or equal but for rounding.
        score = -0.1 * rng.randint(30, 60) if ties else -2 - (rank + 1) ** 0.25 - rng.random()
        vocab.append((piece, score))
    return Tokenizer(models.Unigram(vocab, kwargs.get("unk_id", first.index("<unk>")), byte_fallback))


def template(tokenizer, single, tokens):
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair="$A $B", special_tokens=[(t, tokenizer.token_to_id(t)) for t in tokens])
    return tokenizer


def character_bpe(texts, size=3500, specials=("<unk>", "<s>", "</s>"), pre_tokenizer=None, **model):
    """Returns a BPE model of SentencePiece's kind, with byte fallback, and no other stages."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, limit_alphabet=700, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    tokens = list(dict.fromkeys(list(specials) + BYTES + sorted(learned["vocab"], key=learned["vocab"].get)))
    model = models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m) for m in learned["merges"]], unk_token="<unk>",
                       fuse_unk=True, byte_fallback=True, **model)
    return Tokenizer(model)


def llama2(texts, legacy=True):
    tokenizer = character_bpe(texts)
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=True), AddedToken("<pad>", normalized=False, lstrip=True)])
    return template(tokenizer, "<s> $A", ["<s>"])


def gemma(texts):
    tokenizer = character_bpe(texts, specials=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "\n\n", "▁▁▁"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>")])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁▁", normalized=False)])
    return template(tokenizer, "<bos> $A", ["<bos>"])


def t5(texts, charsmap, scheme="always"):
    tokenizer = unigram(texts, first=("<pad>", "</s>", "<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(charsmap), normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>"])
    return template(tokenizer, "$A </s>", ["</s>"])


def xlm_roberta(texts, charsmap):
    tokenizer = unigram(texts, first=("<s>", "<pad>", "</s>", "<unk>"))
    tokenizer.normalizer = normalizers.Precompiled(charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def albert(texts, charsmap):
    tokenizer = unigram(texts, first=("<pad>", "<unk>", "[CLS]", "[SEP]"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents(),
         normalizers.Lowercase(), normalizers.Precompiled(charsmap), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return template(tokenizer, "[CLS] $A [SEP]", ["[CLS]", "[SEP]"])


def bert(texts, cased=False, cleanup=True):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=3000, limit_alphabet=700, special_tokens=specials, show_progress=False))
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    if cased:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        return tokenizer
    return template(tokenizer, "[CLS] $A [SEP]", ["[CLS]", "[SEP]"])


def word_level(texts):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=2000, special_tokens=["<unk>"], show_progress=False))
    return tokenizer


def roberta(texts, trim=True, prefix=False, template_kind=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=2000, show_progress=False, special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=True)])
    tokenizer.decoder = decoders.ByteLevel()
    if template_kind:
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=trim, add_prefix_space=prefix),
            processors.TemplateProcessing(single="<s> $A:2 </s>:1 <two>", pair="<s>:1 $B:3 </s> <two>:4 $A:1 </s>", special_tokens=[
                ("<s>", 0), ("</s>", 2), {"id": "<two>", "ids": [2, 1], "tokens": ["</s>", "<pad>"]}])])
    else:
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim, prefix)
    return tokenizer


def added_in(tokenizer):
    """Adds tokens with random flags to a tokenizer that changes its text."""
    flags = random.Random(13)
    for content in ["<a>", "<a>b", "[Y]", "é", "w w", "▁z", "日本", "<x", " <y>"]:
        flag = lambda: flags.random() < 0.5
        token = AddedToken(content, single_word=flag(), lstrip=flag(), rstrip=flag(), normalized=flag())
        (tokenizer.add_special_tokens if flag() else tokenizer.add_tokens)([token])
    return tokenizer


def byte_tokens(decoder):
    """Returns a tokenizer with which a text can have any sequence of byte tokens."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "▁▁": 1, "▁b": 2}, unk_token="<unk>"))
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in BYTES + ["<0x+A>", "<0xe4>", "<0x1g>", " ", "  ", "▁", "a", "##b", "b</w>", " .", " n't"]])
    tokenizer.decoder = decoder
    return tokenizer


def normalizer_cases(charsmaps):
    n = normalizers
    yield from ((name, getattr(n, name)()) for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"))
    yield "NFKD lower strip", n.Sequence([n.NFKD(), n.StripAccents(), n.Lowercase()])
    for left, right in ((True, True), (True, False), (False, True)):
        yield "strip %s %s" % (left, right), n.Strip(left, right)
    yield "prepend", n.Prepend("»x")
    yield "replace", n.Replace("a", "<>")
    yield "replace regex", n.Replace(Regex(r"\s{2,}|[0-9]+"), "▁")
    yield "remove regex", n.Replace(Regex(r"\p{P}"), "")
    yield "replace empty match", n.Replace(Regex("x*"), "-")
    for clean in (True, False):
        for chinese in (True, False):
            for accents in (None, True, False):
                for lower in (True, False):
                    yield "bert %s %s %s %s" % (clean, chinese, accents, lower), n.BertNormalizer(clean, chinese, accents, lower)
    for name, charsmap in charsmaps.items():
        yield "precompiled " + name, n.Precompiled(charsmap)


def pre_tokenizer_cases():
    p = pre_tokenizers
    yield from ((name, getattr(p, name)()) for name in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"))
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        yield "punctuation " + behavior, p.Punctuation(behavior)
    yield "delimiter", p.CharDelimiterSplit("a")
    yield "digits", p.Digits(individual_digits=True)
    yield "fixed length", p.FixedLength(3)
    for scheme in ("always", "never", "first"):
        for split in (True, False):
            yield "metaspace %s %s" % (scheme, split), p.Metaspace("x", scheme, split)
    yield "split then first", p.Sequence([p.Split("a", "removed"), p.Metaspace("x", "first")])
    yield "isolated then first", p.Sequence([p.Split(Regex("[ a]"), "isolated"), p.Metaspace("x", "first")])


def decoder_cases():
    d = decoders
    fallback = [d.ByteFallback(), d.Fuse()]
    yield "byte fallback", d.Sequence(fallback)
    yield "byte fallback alone", d.ByteFallback()
    yield "strip fused", d.Sequence(fallback + [d.Strip(" ", 2, 3)])
    yield "strip", d.Sequence([d.ByteFallback(), d.Strip(" ", 1, 0)])
    yield "metaspace", d.Metaspace()
    yield "metaspace never", d.Metaspace(prepend_scheme="never")
    yield "metaspace after bytes", d.Sequence([d.ByteFallback(), d.Metaspace()])
    yield "word piece", d.WordPiece("##", False)
    yield "word piece cleanup", d.WordPiece("##", True)
    yield "bpe", d.BPEDecoder("</w>")
    yield "replace", d.Sequence([d.Replace("▁", " "), d.Replace(" ", "..")])


def cases(texts, training, charsmaps, points):
    """Yields (name, function that makes the tokenizer, texts, options)."""
    if sum(map(len, texts)) < 500_000:  # the fast run: only code points that most scripts have
        points = [c for c in points if ord(c) < 0x3200 or 0xA600 <= ord(c) < 0xAC20 or 0xF900 <= ord(c) < 0x10400
                  or 0x11000 <= ord(c) < 0x11400 or 0x1D400 <= ord(c) < 0x1D500 or 0x1F000 <= ord(c) < 0x1FA00]
    few = training[:250]
    some = texts[: max(40, len(texts) // 8)]
    every = ["".join(points[i : i + 4000]) for i in range(0, len(points), 4000)]
    odd = random_texts(3, UNUSUAL + [" ", "  ", "a", "A", "x", "1", ".", "中", "\n", "aaa"])
    both = dict(add_special=True, skip_special=True)
    special = ["<s>", "</s>", "<unk>", "<|user|>", "<pad>", "<extra_id_0>", "<mask>", "[MASK]", "[CLS]", "<bos>", "<start_of_turn>", "▁▁▁"]
    mixed = some + odd + random_texts(4, special + [" ", "  ", "a", "word", "▁", "\n\n", "é", "中"])
    for name, normalizer in normalizer_cases(charsmaps):
        whole = every + odd if not name.startswith("bert") or name == "bert True True True True" else odd
        yield "normalizer " + name, lambda n=normalizer: show_text(n), whole, {}
    combining = "\u0301\u0316\u0327\u0334\u0345\u0308\u3099\u0323\u031b\u1161\u11a8\u0338\u05b0\u0f71\u0653\u200d\u094d\u0915\u0600"
    rng = random.Random(21)
    marked = ["".join(c + rng.choice(combining) + rng.choice(" " + combining) for c in points[i : i + 4000])
              for i in range(0, 0x30000, 4000)]
    for name in ("NFKC", "NFKD"):
        yield name + ", marks", lambda n=name: show_text(getattr(normalizers, n)()), marked, {}
    for name, charsmap in charsmaps.items():
        yield "precompiled %s, marks" % name, lambda c=charsmap: show_text(normalizers.Precompiled(c)), marked, {}
    for name, pre_tokenizer in pre_tokenizer_cases():
        whole = every if name in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "punctuation isolated") else []
        yield "pre-tokenizer " + name, lambda p=pre_tokenizer: show_text(None, p), whole + odd + some[:20], {}
    for name, normalizer in (("strip", normalizers.Strip()), ("replace", normalizers.Replace(Regex(" +"), "_")),
                             ("accents", normalizers.StripAccents()), ("remove", normalizers.Replace("a", ""))):
        yield "first after " + name, lambda n=normalizer: show_text(
            n, pre_tokenizers.Metaspace("x", "first")), odd, {}
    byte_texts = random_texts(6, ["<0x%02X>" % b for b in (0xE4, 0xB8, 0xAD, 0x41, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0x20, 0x0A)]
                              + ["<0xE4><0xB8><0xAD>"] * 6 + ["<0x+A>", "<0xe4>", "<0x1g>", " ", "  ", "▁", "▁▁", "a", "##b", "b</w>", " .", " n't"], length=12)
    for name, decoder in decoder_cases():
        # The library panics if there are fewer characters than these decoders can remove.
        kept = ["<0x41>a" + t + "aaa" for t in byte_texts] if name in ("bpe", "strip fused") else byte_texts
        if name == "strip fused":
            kept += ["a   ", "aaa    ", "  aaaa  ", "   aaa"]
        yield "decoder " + name, lambda d=decoder: byte_tokens(d), kept, {}
    for ties in (False, True):
        for fallback in (False, True):
            name = "unigram%s%s" % (" ties" * ties, " fallback" * fallback)
            yield name, lambda t=ties, f=fallback: unigram(few, ties=t, byte_fallback=f), some + odd, {}
    for name, make in (
        ("llama2", lambda: llama2(few)),
        ("llama2 not legacy", lambda: llama2(few, legacy=False)),
        ("gemma", lambda: gemma(few)),
        ("t5", lambda: t5(few, charsmaps["nmt_nfkc"])),
        ("t5 first", lambda: t5(few, charsmaps["nmt_nfkc"], "first")),
        ("xlm-roberta", lambda: xlm_roberta(few, charsmaps["nmt_nfkc"])),
        ("albert", lambda: albert(few, charsmaps["nmt_nfkc"])),
        ("bert", lambda: bert(few)),
        ("bert cased", lambda: bert(few, cased=True, cleanup=False)),
    ):
        yield name, make, texts + mixed, dict(both, random_ids=True)
        yield name + " bare", make, mixed, dict(random_ids=True)
    # Each of these is one piece to the models that take whole texts.
    size = max(100_000, sum(map(len, texts)) // 8)
    runs = [c * (size // len(c.encode())) for c in ("a", " ", "\n", "9", "é", "中", "a ", "ab", "\U0001f600")]
    for name, make in (("llama2", lambda: llama2(few)), ("t5", lambda: t5(few, charsmaps["nmt_nfkc"])), ("bert", lambda: bert(few)),
                       ("unigram", lambda: unigram(few))):
        yield "runs " + name, make, runs, {}
    yield "word level", lambda: word_level(few), some, {}
    bits = ["<a>", "<a>b", "[Y]", "é", "w w", "▁z", "z", "日本", "<x", "<y>", "E\u0301", " ", "  ", "_", "b", "\n", "word"]
    added_texts = random_texts(8, bits, count=800, length=30)
    for name, make in (("llama2", lambda: llama2(few)), ("llama2 not legacy", lambda: llama2(few, legacy=False)),
                       ("bert", lambda: bert(few)), ("t5", lambda: t5(few, charsmaps["nmt_nfkc"]))):
        for options in ({}, {"parse_special": False}, {"skip_special": True}):
            yield "added to %s %s" % (name, options), lambda m=make: added_in(m()), added_texts, options


def text_cases(texts, training, charsmaps):
    """Yields (name, function that makes the tokenizer, texts) for the comparison of types and offsets."""
    few = training[:250]
    nmt = charsmaps["nmt_nfkc"]
    special = ["<s>", "</s>", "<mask>", " <mask>", "[MASK]", "[SEP]", "<a>", "<a>b", "[Y]", "w w"]
    bits = UNUSUAL + special + [" ", " ", "  ", "a", "Word", "word", "x", "1", ".", "中", "日本", "\n", "É", "\u0308", "İ", "ſ", "▁", "\t"]
    odd = [""] + random_texts(31, bits, count=601, length=25) + [t[:300] for t in texts[:40]]
    for name, make in (
        ("bert", lambda: bert(few)),
        ("bert cased", lambda: bert(few, cased=True)),
        ("bert with added", lambda: added_in(bert(few))),
        ("roberta", lambda: roberta(few)),
        ("roberta prefix", lambda: roberta(few, prefix=True)),
        ("roberta untrimmed", lambda: roberta(few, trim=False)),
        ("roberta template", lambda: roberta(few, template_kind=True, prefix=True)),
        ("xlm-roberta", lambda: xlm_roberta(few, nmt)),
        ("t5", lambda: t5(few, nmt)),
        ("t5 first", lambda: t5(few, nmt, "first")),
        ("t5 with added", lambda: added_in(t5(few, nmt))),
        ("albert", lambda: albert(few, nmt)),
        ("llama2", lambda: llama2(few)),
        ("llama2 not legacy", lambda: llama2(few, legacy=False)),
        ("gemma", lambda: gemma(few)),
        ("unigram fallback", lambda: unigram(few, byte_fallback=True)),
        ("word level", lambda: word_level(few)),
    ):
        yield name, make, odd
    for name, normalizer in normalizer_cases(charsmaps):
        yield "normalizer " + name, lambda n=normalizer: show_text(n), odd
    for name, pre_tokenizer in pre_tokenizer_cases():
        yield "pre-tokenizer " + name, lambda p=pre_tokenizer: show_text(None, p), odd
