"""Generates texts for comparing tokenizers. The same seed yields the same texts on any machine."""

import pathlib
import random
import unicodedata

SENTENCES = """
The quick brown fox jumps over the lazy dog, doesn't it? I'm sure they'll say we've won; he'd agree.
DON'T SHOUT: IT'S 'TIL WE'RE DONE. It'ſ odd. Naïve café façade coöperate — “quoted” ‘single’ … 50% of $1,234.56!
Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. Straße, Maße, süß.
Portez ce vieux whisky au juge blond qui fume : l'été, où çà ? « Noël » œuvre, aujourd'hui.
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío; ¿añoraba? ¡Sí!
Zażółć gęślą jaźń. Příliš žluťoučký kůň úpěl ďábelské ódy. Árvíztűrő tükörfúrógép.
Pijamalı hasta yağız şoföre çabucak güvendi. İstanbul ılık.
Съешь ещё этих мягких французских булок, да выпей чаю. Щастя, їжак, ґанок.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ταχίστη αλώπηξ βαφής ψημένη γη.
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر. شِعْرٌ ١٢٣٤٥
דג סקרן שט בים מאוכזב ולפתע מצא לו חברה. שָׁלוֹם
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले। १२३ क्षत्रिय
நான் தமிழ் பேசுகிறேன். తెలుగు భాష ಕನ್ನಡ മലയാളം বাংলা ভাষা ગુજરાતી ਪੰਜਾਬੀ සිංහල
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ๑๒๓ ພາສາລາວ ភាសាខ្មែរ မြန်မာစာ
視野無限廣,窗外有藍天。敏捷的棕色狐狸跳过懒狗!二〇二四年三月,价格为¥99.50元。𠮷野家 㐂 龘
いろはにほへと ちりぬるを。カタカナ、ひらがな、漢字。「こんにちは」と言った。ﾊﾝｶｸ 東京タワー①②③
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 한국어 ㄱㄴㄷ 123개
Do bạch kim rất quý nên sẽ dùng để lắp vô xương. Tiếng Việt: đặng ữ ợ
ქართული ენა հայերեն ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ᠮᠣᠩᠭᠣᠯ 𐎀𐎁 𝒜𝓁𝓅𝒽𝒶 𝟘𝟙𝟚 ⅣⅤⅵ ½⅓ x²+y³≥√2 ∀∃∈∅ ≠≈ µ Ω Å K ﬁ ﬀ ß ǅ
👍 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👋🏽 ❤️ 😀😃😄 🤷🏿‍♀️ ✅ ☎️ 🧑‍💻 #️⃣ 🫠 🪿 🩷
""".strip().split("\n")

CODE = [
    "def {a}({b}, *, {c}=None):\n    \"\"\"Return {b}.\"\"\"\n    for i in range({n}):\n        if {b}[i] != {c}:\n            yield {b}[i] ** 2\n\n",
    "template <typename T>\nstd::vector<T> {a}(const T& {b}, size_t {c}) {{\n\treturn std::vector<T>({c} << {n}, {b});\n}}\r\n",
    "SELECT {a}.{b}, COUNT(*) FROM {a} WHERE {c} >= {n} AND {b} LIKE '%x_%' GROUP BY 1;\n",
    "<div class=\"{a}\" id='{b}-{n}'>&nbsp;{c}<!-- {b} --></div>\n",
    "{{\"{a}\": [{n}, -1.5e-{n}, null, true], \"{b}\": {{\"{c}\": \"\\u00e9\\n\"}}}}\n",
    "#!/bin/sh\nset -e; {a}=$(cat \"${{{b}}}/{c}.txt\" | grep -E '^[a-z]+\\.{n}$' || true)  # comment\n",
    "fn {a}<'a>({b}: &'a str) -> Option<u{n}> {{ {b}.parse().ok()?; None }}\n\n\n",
    "http://www.{a}.org:80{n}/{b}?q={c}%20{n}&x=1#top  user.{a}@{b}-{c}.com\n",
]

WHITE_SPACE = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n", "\n ", " \t ", "\u00a0", "\u3000",
               "\u2003", "\u180e", "\u0085", "\u2028", "\u200b", "\u1680", "\ufeff", "\v", "\f", "\x1c", "        "]


def _word(rng):
    syllables = ["ka", "lo", "mi", "Ter", "sun", "x", "_", "id", "Val", "get", "ptr", "9", "é"]
    return "".join(rng.choice(syllables) for _ in range(rng.randint(1, 4)))


def _random_code_point(rng):
    kind = rng.random()
    while True:
        if kind < 0.2:
            c = rng.randrange(0x80)
        elif kind < 0.6:
            c = rng.randrange(0x3000)
        elif kind < 0.8:
            c = rng.randrange(0x10000)
        else:
            c = rng.randrange(0x110000)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def _record(rng):
    kind = rng.random()
    if kind < 0.35:
        words = []
        for sentence in rng.sample(SENTENCES, rng.randint(1, 5)):
            part = sentence.split(" ")
            if rng.random() < 0.3:
                rng.shuffle(part)
            words += part
        space = (lambda: " ") if rng.random() < 0.7 else (lambda: rng.choice(WHITE_SPACE))
        text = "".join(w + space() for w in words)
        if rng.random() < 0.15:
            text = unicodedata.normalize("NFD", text)
        if rng.random() < 0.1:
            text = text.upper()
        return text
    if kind < 0.6:
        return "".join(
            rng.choice(CODE).format(a=_word(rng), b=_word(rng), c=_word(rng), n=rng.randint(0, 10**rng.randint(1, 9)))
            for _ in range(rng.randint(1, 8))
        )
    if kind < 0.8:
        return "".join(_random_code_point(rng) for _ in range(rng.randint(1, 400)))
    if kind < 0.9:  # short pieces, so that all kinds of characters follow each other
        bits = WHITE_SPACE + ["a", "B", "ß", "'s", "'LL", "'", "1", "٣", "²", "!", "...", "é", "e\u0301", "中", "\U0001f600",
                              "\u0301", "\u200d", "x", "Ǆ", "ǅ", "\u0000", "<", ">", "|", "$", "_"]
        return "".join(rng.choice(bits) for _ in range(rng.randint(0, 300)))
    return rng.choice([" ", "a", "\n", "1", "é", "中", "!", "ab", "\t ", "👍"]) * rng.randint(1, 700)


def records(total_bytes, seed=1):
    """Returns random texts that together have at least `total_bytes` bytes of UTF-8."""
    rng = random.Random(seed)
    out = ["", " ", "\n", "a"]
    size = 0
    while size < total_bytes:
        out.append(_record(rng))
        size += len(out[-1].encode())
    return out


def held_out():
    """Returns the repository's held-out English text in parts of 5000 characters; an empty list if
    the file does not exist."""
    path = pathlib.Path(__file__).parent.parent / "data" / "heldout.txt"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [text[i : i + 5000] for i in range(0, len(text), 5000)]
