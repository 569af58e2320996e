"""Tests the numbers of `moeserve score` and `experts curves` that need more than a profile, by
recomputing them with NumPy: X-MoE's balance loss with tau_0, words, capacities and curves over
checkpoints.

MOESERVE_BIN names the program. The models are the bundled ones.
"""

import json
import re
import struct

import numpy as np
import pytest

from test_statistics import (
    MODELS,
    ROOT,
    Block,
    close,
    held_out,
    moeserve,
    read_profile,
    safetensors_shapes,
)

WINDOW = 300


class Scored:
    """A text that was scored with a dump."""

    def __init__(self, name, folder, *arguments, size=6000, more=""):
        self.name = name
        text, dump = folder / "text.txt", folder / "dump"
        text.write_bytes(held_out(0, size) + more.encode())
        options = ["--text", text, "--dump", dump, "--dump-hidden", "--json", "--window", WINDOW]
        score = ["score", "--model", MODELS / name, *options, *arguments]
        self.text = text
        self.report = json.loads(moeserve(*score))
        self.layers = self.report["experts"]["layers"]
        index = json.loads((dump / "index.json").read_text())
        self.tokens = np.load(dump / index["tokens"])
        self.tensors = {t: np.prod(s) for t, s in safetensors_shapes(self.weights()).items()}
        config = json.loads((MODELS / name / "config.json").read_text())
        self.blocks = [Block(b, dump, self, config) for b in index["blocks"]]

    def weights(self):
        return MODELS / self.name / "model.safetensors"

    def scalar(self, tensor):
        """Returns a tensor of one element."""
        data = self.weights().read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        entry = json.loads(data[8 : 8 + length])[tensor]
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            return np.frombuffer(b"\0\0" + data[begin:end], dtype="<f4")[0].astype(np.float64)
        assert entry["dtype"] == "F32"
        return np.frombuffer(data[begin:end], dtype="<f4")[0].astype(np.float64)

    def windows(self, block):
        """Yields the rows of each window of a block."""
        for begin in range(0, len(self.tokens), WINDOW):
            end = min(begin + WINDOW, len(self.tokens))
            yield np.arange(begin * block.heads, end * block.heads)


@pytest.mark.parametrize("name, tau_0", [("x-moe", None), ("mh-moe", 0.5)])
def test_balance_with_the_initial_temperature(name, tau_0, tmp_path):
    """X-MoE, eq. 9."""
    run = Scored(name, tmp_path, *([] if tau_0 is None else ["--tau-0", tau_0]))
    for layer, block in zip(run.layers, run.blocks):
        found = layer["router"]["initial_balance"]
        tau = run.scalar(f"blocks.{layer['layer']}.{layer['block']}.router.temperature")
        close(found["tau"], tau)
        assert found["tau_0"] == (0.3 if tau_0 is None else tau_0)
        cosines = block.scores * tau
        p = np.exp(cosines / found["tau_0"])
        p /= p.sum(axis=1, keepdims=True)
        expected = block.num_experts * (block.mask.mean(axis=0) * p.mean(axis=0)).sum()
        close(found["loss"], expected)
        # With the learned temperature, it is the loss of the other models.
        close(
            block.num_experts * (block.mask.mean(axis=0) * block.p.mean(axis=0)).sum(),
            layer["router"]["balance_loss"],
        )


def test_routers_without_a_temperature_have_no_initial_one(tmp_path):
    run = Scored("smoe", tmp_path, size=1500)
    assert [layer["router"]["initial_balance"] for layer in run.layers] == [None] * len(run.layers)


def bytes_of_tokens(name):
    """Returns the bytes of each token of a byte-level tokenizer; b"" for special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    file = json.loads((MODELS / name / "tokenizer.json").read_text())
    special = {entry["id"] for entry in file["added_tokens"]}
    return {
        i: b"" if i in special else bytes(byte_of[c] for c in token)
        for token, i in file["model"]["vocab"].items()
    }


LETTERS = "0-9A-Za-z\u00c0-\u1fff\u2070-\u2fff\u3005-\ufffc\U00010000-\U0010ffff"
WORD = re.compile(f"[{LETTERS}]+(?:['-][{LETTERS}]+)*")


def words_of_tokens(run, listed):
    """Returns [T] the word's index in `listed`, -1 for another word, -2 for none; and how often
    each word occurs."""
    of_token = bytes_of_tokens(run.name)
    # A special token ends a word, unless it begins a window.
    pieces = [of_token[t] or (b"\n" if i % WINDOW else b"") for i, t in enumerate(run.tokens)]
    ends = np.cumsum([len(piece) for piece in pieces])
    text = b"".join(pieces)
    owner = np.full(len(text), -1)  # of each byte: the number of its word in the text
    kinds = []
    decoded = text.decode()
    assert text == run.text.read_bytes().replace(b"<|endoftext|>", b"\n")
    at = np.cumsum([0] + [len(c.encode()) for c in decoded])
    for number, match in enumerate(WORD.finditer(decoded)):
        owner[at[match.start()] : at[match.end()]] = number
        word = match.group().lower()
        kinds.append(listed.index(word) if word in listed else -1)
    result = []
    for begin, end in zip(np.concatenate([[0], ends[:-1]]), ends):
        inside = owner[begin:end]
        inside = inside[inside >= 0]
        result.append(kinds[inside[0]] if len(inside) else -2)
    occurrences = [sum(kind == i for kind in kinds) for i in range(len(listed))]
    return np.array(result), occurrences


@pytest.mark.parametrize("name", ["mh-moe", "hmoe-topp", "moa"])
def test_words(name, tmp_path):
    """HMoE, fig. 10, and MH-MoE, fig. 7."""
    listed = ["values", "real", "the", "operator", "na\u00efve", "don't", "nowhere"]
    more = (
        " a \u201cna\u00efve\u201d NA\u00efVE\u2014don't\u00a0stop-values, 'values' don't- "
        "\u4e16\u754c\u3002the "
    )
    words = tmp_path / "words.txt"
    words.write_text("values\nREAL\n\n  the \noperator\nna\u00efve\ndon't\nnowhere\nvalues\n")
    run = Scored(name, tmp_path, "--words", words, more=more)
    of_token, occurrences = words_of_tokens(run, listed)
    assert min(occurrences[:6]) >= 2 and occurrences[6] == 0
    found = run.report["word_experts"]
    assert [w["word"].lower() for w in found["words"]] == listed
    for i, word in enumerate(found["words"]):
        assert word["occurrences"] == occurrences[i]
        assert word["tokens"] == (of_token == i).sum()
        for layer, block in zip(word["layers"], run.blocks):
            assert (layer["layer"], layer["block"]) == (block.entry["layer"], block.entry["block"])
            chosen = block.chosen[of_token[block.token_of] == i]
            counts = np.bincount(chosen, minlength=block.num_experts)
            assert layer["counts"] == counts.tolist()
            close(layer["shares"], counts / max(counts.sum(), 1))
    split = any(block.heads > 1 for block in run.blocks)
    blocks = [b for b in run.blocks if b.heads > 1 or not split]
    distinct = sum(block.touches().sum(axis=1) for block in blocks).astype(int)
    assert found["diversity"]["blocks"] == len(blocks)
    for group, tokens in (("listed", of_token >= 0), ("others", of_token == -1)):
        spread = found["diversity"][group]
        assert spread["tokens"] == tokens.sum() > 20
        close(spread["mean"], distinct[tokens].mean() / len(blocks))
        histogram = np.bincount(distinct[tokens], minlength=len(spread["histogram"]))
        assert spread["histogram"] == histogram.tolist()


def choices_by_rank(block):
    """Returns [rows, k]: the experts of every row from the dumped scores, the best first."""
    order = np.argsort(-block.scores, axis=1, kind="stable")
    return order[:, : block.entry["select"]["k"]]


def limit_of(rule, rows, experts, k):
    kind, _, number = rule.removesuffix(":renormalize").partition(":")
    if kind == "switch":
        return int(number)
    if kind == "fraction":
        return int(np.ceil(float(number) * rows))
    return k * -(-rows // experts)


@pytest.mark.parametrize(
    "name, rule",
    [
        ("smoe", "switch:64"),
        ("x-moe", "fraction:0.25"),
        ("mh-moe", "gshard"),
        ("moa", "gshard"),
        ("hmoe-topk", "fraction:0.2"),
        ("smoe", "fraction:0.15:renormalize"),
    ],
)
def test_capacity(name, rule, tmp_path):
    """The rows over the limit are dropped: all first choices count before all second ones."""
    run = Scored(name, tmp_path, "--capacity", rule)
    found = run.report["capacity"]
    assert found["rule"] == rule
    all_choices = all_dropped = all_rows = all_empty = 0
    for layer, block, dropped in zip(run.layers, run.blocks, found["layers"]):
        ranked = choices_by_rank(block)
        kept = np.zeros((block.rows, block.num_experts), dtype=bool)
        limits = []
        for rows in run.windows(block):
            limit = limit_of(rule, len(rows), block.num_experts, ranked.shape[1])
            limits.append(limit)
            taken = np.zeros(block.num_experts, dtype=int)
            for rank in range(ranked.shape[1]):
                for row in rows:
                    expert = ranked[row, rank]
                    kept[row, expert] = taken[expert] < limit
                    taken[expert] += 1
        np.testing.assert_array_equal(block.mask.astype(bool), kept)
        assert layer["counts"] == kept.sum(axis=0).tolist()
        if rule.endswith(":renormalize"):
            # The weights of a row sum to 1, before and after.
            close(sum(layer["weight_sums"]), kept.any(axis=1).sum(), 1e-5)
            assert kept.sum() < kept.any(axis=1).sum() * kept.shape[1]
        before = np.bincount(ranked.ravel(), minlength=block.num_experts)
        assert dropped["limit"] == {"min": min(limits), "max": max(limits)}
        assert dropped["choices"] == ranked.size and dropped["rows"] == block.rows
        assert dropped["dropped_by_expert"] == (before - kept.sum(axis=0)).tolist()
        assert dropped["dropped"] == ranked.size - kept.sum()
        assert dropped["rows_without_expert"] == (~kept.any(axis=1)).sum()
        all_choices += ranked.size
        all_dropped += dropped["dropped"]
        all_rows += block.rows
        all_empty += dropped["rows_without_expert"]
    assert all_dropped > 0
    close(found["dropped_share"], all_dropped / all_choices)
    close(found["rows_without_expert_share"], all_empty / all_rows)
    plain = ["score", "--model", MODELS / name, "--text", run.text, "--json", "--window", WINDOW]
    plain = json.loads(moeserve(*plain))
    for key in ("nll_per_token", "perplexity", "bits_per_byte"):
        close(found["without"][key], plain[key])
    assert abs(run.report["perplexity"] / plain["perplexity"] - 1) > 1e-4


def test_a_capacity_for_all_rows_drops_nothing(tmp_path):
    run = Scored("hmoe-topp", tmp_path, "--capacity", "fraction:1", size=2500)
    found = run.report["capacity"]
    assert found["dropped_share"] == found["rows_without_expert_share"] == 0
    assert run.report["nll_per_token"] == found["without"]["nll_per_token"]


def fluctuation(a, b, block):
    top1 = f"blocks.{block}.routes.top1"
    offsets, experts = f"blocks.{block}.routes.offsets", f"blocks.{block}.routes.experts"
    sets = [
        [frozenset(part) for part in np.split(p[experts], p[offsets][1:-1].astype(int))]
        for p in (a, b)
    ]
    return np.mean(a[top1] != b[top1]), np.mean([x != y for x, y in zip(*sets)])


def collapse(profile, block):
    x, label = profile[f"blocks.{block}.hidden.rows"], profile[f"blocks.{block}.hidden.experts"]
    x = x.astype(np.float64)
    classes, mean = np.unique(label), x.mean(axis=0)
    within = between = 0.0
    for c in classes:
        rows = x[label == c]
        centre = rows.mean(axis=0)
        within = within + (rows - centre).T @ (rows - centre) / len(x)
        between = between + np.outer(centre - mean, centre - mean) / len(classes)
    return np.trace(within @ np.linalg.pinv(between, rcond=1e-10, hermitian=True))


def test_curves(tmp_path):
    """X-MoE, fig. 2c and 3: the models stand for the checkpoints of two runs."""
    text = tmp_path / "text.txt"
    text.write_bytes(held_out(0, 5000))
    files = {}
    for name in ("smoe", "x-moe", "hmoe-topk"):
        files[name] = tmp_path / name
        save = ["experts", "save", files[name], MODELS / name, "--text", text, "--hidden"]
        moeserve(*save)
    profiles = {name: read_profile(file)[0] for name, file in files.items()}
    runs = [["smoe", "x-moe", "hmoe-topk"], ["smoe", "hmoe-topk", "x-moe"]]
    arguments = [a for run in runs for a in ["--run", *(files[name] for name in run)]]
    found = json.loads(moeserve("experts", "curves", *arguments, "--json"))
    assert found["checkpoints"] == 3
    assert [r["profiles"] for r in found["runs"]] == [[str(files[n]) for n in r] for r in runs]
    loads = lambda name, i: profiles[name][f"blocks.{i}.selections"].astype(np.float64)
    for i, layer in enumerate(found["layers"]):
        together = [
            np.corrcoef([loads(run[c], i) for run in runs]).mean() for c in range(3)
        ]
        close(layer["inter_run_consistency"], together)
        for run, curves in zip(runs, layer["runs"]):
            close(curves["consistency"], np.corrcoef([loads(name, i) for name in run]).mean())
            for c, step in enumerate(curves["routing_fluctuation"]):
                top1, sets = fluctuation(profiles[run[c]], profiles[run[c + 1]], i)
                close([step["top1"], step["sets"]], [top1, sets])
            close(curves["collapse"], [collapse(profiles[name], i) for name in run], 1e-4)
    for key in ("consistency", "collapse"):
        for r in range(2):
            close(
                found["runs"][r][key],
                np.mean([layer["runs"][r][key] for layer in found["layers"]], axis=0),
            )
    close(
        found["inter_run_consistency"],
        np.mean([layer["inter_run_consistency"] for layer in found["layers"]], axis=0),
    )
    one = json.loads(moeserve("experts", "curves", files["smoe"], files["x-moe"], "--json"))
    two = json.loads(moeserve("experts", "diff", files["smoe"], files["x-moe"], "--json"))
    assert one["inter_run_consistency"] is None
    close(one["runs"][0]["consistency"], two["inter_run_consistency"])
    assert one["runs"][0]["routing_fluctuation"] == [two["routing_fluctuation"]]
    table = moeserve("experts", "curves", *arguments).decode()
    assert table.count("RF top-1") == 2 and "inter-run consistency at each checkpoint" in table


GOLDEN = ROOT / "tests" / "golden"
TINY = sorted(folder.name for folder in GOLDEN.glob("tiny-*"))


def of_layer(value, layer):
    return value[layer] if isinstance(value, list) else value


def shapes_of(folder):
    """Returns {name: shape} of all tensors of a model that may have several files."""
    shapes = {}
    for file in folder.glob("model*.safetensors"):
        shapes |= safetensors_shapes(file)
    return shapes


def recurrence_macs(spec):
    """Returns the products of a recurrence for one token: a pass over the state each for the decay,
    for what is added and for what is read; the delta rule also for the value that is known."""
    if spec["kind"] == "delta":
        return 4 * spec["num_heads"] * spec["key_dim"] * spec["value_dim"]
    return 3 * spec["num_heads"] * spec["state_dim"] * spec["head_dim"]


def selected(routing, experts):
    """Returns the fewest and the most experts that a row selects."""
    select = routing["select"]
    if select["kind"] == "top_p":
        return 1, select.get("max", experts)
    return select["k"], select["k"]


@pytest.mark.parametrize("name", TINY)
def test_macs_of_all_settings(name):
    """`inspect` counts the rows and columns of every matrix, as often as a token's rows use it."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    shapes = shapes_of(GOLDEN / name)
    found = json.loads(moeserve("inspect", GOLDEN / name, "--json"))["macs_per_token"]
    low_key = high_key = 0
    # The projections of layers' inputs; their table is only read.
    low = high = sum(int(np.prod(shape)) for tensor, shape in shapes.items()
                     if len(shape) == 2 and (tensor == "layer_input.weight" or ".input." in tensor))
    for layer in range(config["num_hidden_layers"]):
        for kind in ("attention", "feed_forward"):
            spec = of_layer(config[kind], layer)
            routing = spec.get("routing", spec.get("value_routing", {}))
            heads = routing.get("split", {}).get("heads", 1)
            prefix = f"blocks.{layer}.{kind}."
            experts = {}
            for tensor, shape in shapes.items():
                if not tensor.startswith(prefix) or len(shape) != 2 or tensor.endswith(".table"):
                    continue
                part = tensor.removeprefix(prefix)
                if part.startswith("experts."):
                    expert = int(part.split(".")[1])
                    experts[expert] = experts.get(expert, 0) + np.prod(shape)
                    continue
                times = heads if part.startswith(("router.", "latent_")) else 1
                low, high = low + times * np.prod(shape), high + times * np.prod(shape)
            least = most = 1
            if routing:
                nulls = sum(len(count) if isinstance(count, list) else count
                            for count in routing.get("null_experts", {}).values())
                costs = sorted([*experts.values(), *[0] * nulls])
                least, most = selected(routing, len(costs))
                low += heads * sum(costs[:least])
                high += heads * sum(costs[-most:])
            if spec["kind"] in ("delta", "ssm"):
                low, high = low + recurrence_macs(spec), high + recurrence_macs(spec)
            elif kind == "attention" and spec["kind"] not in ("none", "short_conv"):
                width = spec["head_dim"] + spec.get("value_dim", spec["head_dim"])
                if latent := spec.get("latent"):
                    width = 2 * latent["rank"] + latent["rope_dim"]
                fewest, largest = spec.get("num_heads"), spec.get("num_heads")
                if "routing" in spec:
                    fewest, largest = (n * spec.get("num_kv_heads", 1) for n in (least, most))
                low_key, high_key = low_key + fewest * width, high_key + largest * width
    assert (found["min"], found["max"]) == (low, high)
    assert found["attention_per_key"] == {"min": low_key, "max": high_key}
    assert found["lm_head"] == config["vocab_size"] * config["hidden_size"]
