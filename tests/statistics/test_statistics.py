"""Tests every statistic of `moeserve score --json` by recomputing it from the files that
`moeserve score --dump` writes.

The formulas follow the papers' definitions, in NumPy's float64. MOESERVE_BIN names the program. The
models are the bundled ones.
"""

import json
import math
import os
import pathlib
import re
import struct
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "deploy" / "models"
NAMES = ["dense", "smoe", "x-moe", "mh-moe", "moa", "hmoe-topk", "hmoe-topp"]
SPARSE = NAMES[1:]
BYTES = 12000
THRESHOLD, MIN_COUNT, TOP, EPS = 0.25, 3, 6, 0.5


def moeserve(*arguments):
    program = os.environ["MOESERVE_BIN"]
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def held_out(begin=0, size=BYTES):
    text = (ROOT / "tests" / "data" / "heldout.txt").read_bytes()[begin : begin + size]
    return text.decode(errors="ignore").encode()


class Run:
    """Runs one model over a part of the held-out text. Holds the report, the dump and the tensors'
    sizes."""

    def __init__(self, name, folder):
        self.name = name
        text = folder / "text.txt"
        text.write_bytes(held_out())
        dump = folder / "dump"
        self.profile = folder / "profile"
        arguments = ["--text", text, "--dump", dump, "--dump-hidden", "--json"]
        arguments += ["--hidden-samples", 10**6, "--profile", self.profile]
        arguments += ["--threshold", THRESHOLD, "--min-count", MIN_COUNT, "--top", TOP]
        arguments += ["--eps", EPS, "--window", 1000]
        self.report = json.loads(moeserve("score", "--model", MODELS / name, *arguments))
        self.experts = self.report["experts"]
        self.index = json.loads((dump / "index.json").read_text())
        self.tokens = np.load(dump / self.index["tokens"])
        self.shapes = safetensors_shapes(MODELS / name / "model.safetensors")
        self.tensors = {tensor: math.prod(shape) for tensor, shape in self.shapes.items()}
        self.config = config = json.loads((MODELS / name / "config.json").read_text())
        self.blocks = [Block(b, dump, self, config) for b in self.index["blocks"]]

    def always_active(self):
        return sum(
            size
            for tensor, size in self.tensors.items()
            if not re.search(r"\.experts\.\d", tensor)
            and not tensor.startswith(("embed", "head."))
        )


class Block:
    def __init__(self, entry, dump, run, config):
        load = lambda key: np.load(dump / entry[key])
        self.entry = entry
        self.num_experts = entry["experts"]
        self.heads = entry["split_heads"]
        self.scores = load("scores").astype(np.float64)
        self.offsets = load("offsets").astype(np.int64)
        self.chosen = load("chosen").astype(np.int64)
        self.weights = load("weights").astype(np.float64)
        self.inputs = load("inputs").astype(np.float64)
        self.rows = len(self.scores)
        self.tokens = run.tokens
        assert self.rows == len(run.tokens) * self.heads == len(self.offsets) - 1
        assert self.inputs.shape[0] == self.rows
        assert self.offsets[-1] == len(self.chosen) == len(self.weights)
        self.row_of = np.repeat(np.arange(self.rows), np.diff(self.offsets))
        self.token_of = self.row_of // self.heads
        p = np.exp(self.scores - self.scores.max(axis=1, keepdims=True))
        self.p = p / p.sum(axis=1, keepdims=True)
        self.mask = np.zeros((self.rows, self.num_experts))
        self.mask[self.row_of, self.chosen] = 1
        prefix = f"blocks.{entry['layer']}.{entry['block']}.experts."
        self.parameters = np.array(
            [
                sum(s for t, s in run.tensors.items() if t.startswith(f"{prefix}{e}."))
                for e in range(self.num_experts)
            ],
            dtype=np.float64,
        )
        if entry["block"] == "attention":
            attention = config["attention"]
            width = attention["num_kv_heads"] * attention["head_dim"]
        else:
            width = config["feed_forward"]["routing"]["widths"]
        self.widths = np.broadcast_to(np.asarray(width, dtype=np.float64), (self.num_experts,))

    def max_selected(self):
        return self.entry["select"].get("k") or self.entry["select"]["max"]

    def touches(self):
        """Returns [T, E]: 1 if a row of the token selected the expert, else 0."""
        touched = np.zeros((len(self.tokens), self.num_experts))
        touched[self.token_of, self.chosen] = 1
        return touched

    def token_counts(self, vocabulary):
        counts = np.zeros((vocabulary, self.num_experts))
        np.add.at(counts, (self.tokens[self.token_of], self.chosen), 1)
        return counts

    def first_choice(self):
        """Returns [rows]: the expert with the largest weight."""
        dense = np.full((self.rows, self.num_experts), -1.0)
        dense[self.row_of, self.chosen] = self.weights
        return dense.argmax(axis=1)


def safetensors_shapes(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def read_profile(path):
    """Returns {name: array} and the metadata of an expert profile file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    types = {"U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}
    types |= {"F32": "<f4", "F64": "<f8"}
    arrays = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[begin:end], dtype=types[entry["dtype"]])
        arrays[name] = values.reshape(entry["shape"])
    return arrays, metadata


@pytest.fixture(scope="module", params=NAMES)
def run(request, tmp_path_factory):
    return Run(request.param, tmp_path_factory.mktemp(request.param))


def close(found, expected, relative=1e-6):
    np.testing.assert_allclose(
        np.asarray(found, dtype=np.float64), expected, rtol=relative, atol=1e-12
    )


def layers(run):
    found = run.experts["layers"]
    assert len(found) == len(run.blocks)
    for layer, block in zip(found, run.blocks):
        assert (layer["layer"], layer["block"]) == (block.entry["layer"], block.entry["block"])
        yield layer, block


def test_counts(run):
    tokens = len(run.tokens)
    assert run.experts["tokens"] == tokens >= run.report["tokens"] > 1000
    for layer, block in layers(run):
        counts = np.bincount(block.chosen, minlength=block.num_experts)
        assert layer["tokens"] == tokens and layer["rows"] == block.rows
        assert layer["counts"] == counts.tolist()
        assert layer["decode_counts"] == [0] * block.num_experts
        sums = np.bincount(block.chosen, weights=block.weights, minlength=block.num_experts)
        close(layer["weight_sums"], sums)
        touches = block.touches()
        assert layer["touching_tokens"] == touches.sum(axis=0).astype(int).tolist()
        distinct = touches.sum(axis=1).astype(int)
        histogram = np.bincount(distinct, minlength=len(layer["distinct_experts_histogram"]))
        assert layer["distinct_experts_histogram"] == histogram.tolist()
        close(layer["distinct_experts_mean"], distinct.mean())
        assert layer["expert_widths"] == block.widths.astype(int).tolist()
        assert layer["expert_parameters"] == block.parameters.astype(int).tolist()
        assert layer["recomputed"]["tokens"] == layer["nonfinite_rows"] == 0


def test_load_and_activation(run):
    active, experts = 0, 0
    for layer, block in layers(run):
        counts = np.bincount(block.chosen, minlength=block.num_experts)
        ratio = counts / len(run.tokens)
        close(layer["selection_ratio"], ratio)
        choices = len(run.tokens) * block.heads * block.max_selected()
        close(layer["selection_ratio_of_choices"], counts / choices)
        share = counts / counts.sum()
        close(layer["load_share"], share)
        by_load = layer["experts_by_load"]
        assert sorted(by_load) == list(range(block.num_experts))
        assert (np.diff(share[by_load]) <= 0).all()
        assert layer["activated_experts"] == (ratio > THRESHOLD).sum()
        active += (ratio > THRESHOLD).sum()
        experts += block.num_experts
    assert run.experts["activation_threshold"] == THRESHOLD
    if experts:
        close(run.experts["activation_ratio"], active / experts)


def test_router(run):
    for layer, block in layers(run):
        found, experts = layer["router"], block.num_experts
        assert found["rows"] == block.rows
        entropy = -(block.p * np.log(block.p)).sum(axis=1).mean()
        close(found["entropy_mean"], entropy)
        close(found["entropy_loss"], -experts * entropy)
        top = block.scores.max(axis=1)
        lse = top + np.log(np.exp(block.scores - top[:, None]).sum(axis=1))
        close(found["z_loss"], (lse**2).mean())
        mean = block.p.mean(axis=0)
        close(found["probability_mean"], mean)
        share = block.mask.mean(axis=0)
        close(found["balance_loss"], experts * (share * mean).sum())
        close(found["parameter_penalty"], experts * (share * block.widths * mean).sum())
        f = block.mask.sum(axis=0)
        big_p = block.p.sum(axis=0)
        close(found["normalized_balance_loss"], experts * (f / f.sum() * big_p / big_p.sum()).sum())


def test_activated_parameters_and_diversity(run):
    compute = unique = total = float(run.always_active())
    ratios = []
    split = any(block.heads > 1 for block in run.blocks)
    distinct = np.zeros(len(run.tokens), dtype=int)
    diversity_blocks = 0
    for layer, block in layers(run):
        found = layer["activated_parameters"]
        counts = np.bincount(block.chosen, minlength=block.num_experts)
        block_compute = (counts * block.parameters).sum() / len(run.tokens)
        block_unique = (block.touches() @ block.parameters).mean()
        close(found["compute"], block_compute)
        close(found["unique"], block_unique)
        close(found["compute_ratio"], block_compute / block.parameters.sum())
        close(found["unique_ratio"], block_unique / block.parameters.sum())
        compute, unique = compute + block_compute, unique + block_unique
        total += block.parameters.sum()
        ratios.append(block_compute / block.parameters.sum())
        if block.heads > 1 or not split:
            distinct += block.touches().sum(axis=1).astype(int)
            diversity_blocks += 1
    found = run.experts["activated_parameters"]
    assert found["always"] == run.always_active() and found["total"] == total
    close(found["compute"], compute)
    close(found["unique"], unique)
    close(run.experts["activated_parameters_per_token"], compute)
    close(found["mean_block_ratio"], np.mean(ratios) if ratios else 0.0)
    found = run.experts["diversity"]
    assert found["blocks"] == diversity_blocks
    assert found["histogram"] == np.bincount(distinct, minlength=len(found["histogram"])).tolist()
    close(found["mean"], distinct.mean() / max(diversity_blocks, 1))


def matrix_macs(run, counts):
    """Returns the MACs of a token with all matrices but the head: each tensor's rows and columns,
    times the rows of the token that it multiplies. `counts` [block][expert] are rows per token."""
    heads = run.config["feed_forward"].get("routing", {}).get("split", {}).get("heads", 1)
    total = 0.0
    for tensor, shape in run.shapes.items():
        if len(shape) != 2 or tensor.startswith(("embed", "head.")):
            continue
        layer = re.match(r"blocks\.(\d+)\.(\w+)\.(?:experts\.(\d+)|router)?", tensor)
        times = 1
        if layer[3]:
            times = counts[int(layer[1]), layer[2]][int(layer[3])]
        elif ".router." in tensor and layer[2] == "feed_forward":
            times = heads
        total += math.prod(shape) * times
    return total


def key_macs(run, lengths, selected=None):
    """Returns the mean MACs of a token with the keys and values that it sees."""
    attention = run.config["attention"]
    heads = attention.get("num_heads") or attention["num_kv_heads"] * (
        selected or attention["routing"]["select"]["k"]
    )
    per_key = 2 * heads * attention["head_dim"] * run.config["num_hidden_layers"]
    keys = sum((1 + np.arange(length)).sum() for length in lengths)
    return per_key * keys / sum(lengths)


def test_macs(run):
    counts = {
        (layer["layer"], layer["block"]): np.array(layer["counts"]) / len(run.tokens)
        for layer, _ in layers(run)
    }
    found = run.report["macs_per_token"]
    close(found["matrices"], matrix_macs(run, counts))
    # Windows of 1000 tokens; all but the last are full.
    full, rest = divmod(len(run.tokens), 1000)
    close(found["attention"], key_macs(run, [1000] * full + [rest] * (rest > 0)))


def test_macs_of_inspect(run):
    found = json.loads(moeserve("inspect", MODELS / run.name, "--json"))["macs_per_token"]
    cheapest, dearest, mean = {}, {}, {}
    for _, block in layers(run):
        key = (block.entry["layer"], block.entry["block"])
        order = np.argsort(block.parameters, kind="stable")
        select = block.entry["select"]
        most = select.get("k") or select["max"]
        least = select.get("k") or 1
        cheapest[key], dearest[key] = np.zeros(len(order)), np.zeros(len(order))
        cheapest[key][order[:least]] = block.heads
        dearest[key][order[-most:]] = block.heads
        mean[key] = np.full(len(order), most * block.heads / len(order))
    assert found["min"] == matrix_macs(run, cheapest)
    assert found["max"] == matrix_macs(run, dearest)
    if run.name == "hmoe-topp":
        assert found["nominal"] is None
    else:
        close(found["nominal"], matrix_macs(run, mean))
    per_key = key_macs(run, [1])
    assert found["attention_per_key"] == {"min": per_key, "max": per_key}
    assert found["lm_head"] == math.prod(run.shapes["embed.weight"])


def test_macs_of_routed_attention_are_those_of_the_paper():
    """MoA, eq. 18: 2 (k + 1) T d_h d and the products with keys and values; the router is
    extra."""
    config = json.loads((MODELS / "moa" / "config.json").read_text())
    d, layers = config["hidden_size"], config["num_hidden_layers"]
    d_h, routing = config["attention"]["head_dim"], config["attention"]["routing"]
    k, experts = routing["select"]["k"], routing["num_experts"]
    dense = 3 * d * config["feed_forward"]["width"]
    found = json.loads(moeserve("inspect", MODELS / "moa", "--json"))["macs_per_token"]
    assert found["nominal"] == layers * (2 * (k + 1) * d_h * d + d * experts + dense)
    assert found["attention_per_key"]["max"] == layers * 2 * k * d_h


def test_top_tokens(run):
    for layer, block in layers(run):
        c = block.token_counts(run.index["vocabulary"])
        joint = c / c.sum()
        outer = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
        with np.errstate(invalid="ignore"):
            pmi = joint / outer
            share = c / c.sum(axis=1, keepdims=True)
        for e, found in enumerate(layer["top_tokens"]):
            assert found["expert"] == e
            eligible = np.flatnonzero(c[:, e] >= MIN_COUNT)
            best = np.sort(pmi[eligible, e])[::-1][:TOP]
            close([t["pmi"] for t in found["tokens"]], best)
            ids = [t["id"] for t in found["tokens"]]
            assert len(set(ids)) == len(ids)
            for token in found["tokens"]:
                assert token["count"] == c[token["id"], e] >= MIN_COUNT
                close(token["pmi"], pmi[token["id"], e])
                close(token["log_pmi"], np.log(pmi[token["id"], e]))
                close(token["share"], share[token["id"], e])
                assert token["text"]


def test_similarity(run):
    for layer, block in layers(run):
        vocabulary = run.index["vocabulary"]
        c = block.token_counts(vocabulary)
        cdf = np.cumsum(c / c.sum(axis=0), axis=0)
        found = np.array(layer["similarity"]["wasserstein"]["matrix"], dtype=np.float64)
        assert "token ids" in layer["similarity"]["wasserstein"]["metric"]
        for a in range(block.num_experts):
            np.testing.assert_allclose(
                found[a], np.abs(cdf - cdf[:, [a]]).sum(axis=0), rtol=1e-6, atol=1e-7
            )
        found = np.array(layer["similarity"]["total_variation"]["matrix"], dtype=np.float64)
        density = c / c.sum(axis=0)
        for a in range(block.num_experts):
            expected = 0.5 * np.abs(density - density[:, [a]]).sum(axis=0)
            np.testing.assert_allclose(found[a], expected, rtol=1e-6, atol=1e-12)
        d = (c + EPS) / (c.sum(axis=0) + EPS * vocabulary)
        kl = (d * np.log(d)).sum(axis=0)[:, None] - d.T @ np.log(d)
        assert layer["similarity"]["kl"]["eps"] == EPS
        np.testing.assert_allclose(
            layer["similarity"]["kl"]["matrix"], kl, rtol=1e-6, atol=1e-10
        )


def test_representation_collapse(run):
    for layer, block in layers(run):
        x, label = block.inputs, block.first_choice()
        mean = x.mean(axis=0)
        classes = np.unique(label)
        width = x.shape[1]
        within, between = np.zeros((width, width)), np.zeros((width, width))
        for c in classes:
            rows = x[label == c]
            centre = rows.mean(axis=0)
            within += (rows - centre).T @ (rows - centre) / len(x)
            between += np.outer(centre - mean, centre - mean) / len(classes)
        expected = np.trace(within @ np.linalg.pinv(between, rcond=1e-10, hermitian=True))
        found = layer["collapse"]
        assert found["rows"] == found["seen"] == len(x)
        assert found["classes"] == len(classes)
        close(found["value"], expected, 1e-4)


def test_routes_follow_from_the_scores(run):
    """NumPy must select the same experts with the same weights from the dumped router scores, except
    at near ties."""
    near = 1e-5
    for _, block in layers(run):
        select = block.entry["select"]
        order = np.argsort(-block.scores, axis=1, kind="stable")
        ranked = np.take_along_axis(block.scores, order, axis=1)
        p = np.take_along_axis(block.p, order, axis=1)
        if select["kind"] == "top_k":
            count = np.full(block.rows, select["k"])
            clear = np.ones(block.rows, dtype=bool)
        else:
            assert select["compare"] == "ge"
            cumulative = np.cumsum(p, axis=1)
            count = np.minimum((cumulative < select["p"]).sum(axis=1) + 1, select["max"])
            clear = (np.abs(cumulative - select["p"]) > near).all(axis=1)
        # The last selected expert must have a clear lead over the first one that is not selected.
        last = count - 1
        rows = np.arange(block.rows)
        following = np.minimum(count, block.num_experts - 1)
        gap = ranked[rows, last] - ranked[rows, following]
        clear &= (gap > near) | (count == block.num_experts)
        assert clear.mean() > 0.99
        found_count = np.diff(block.offsets)
        assert (found_count == count)[clear].all()
        expected = np.zeros((block.rows, block.num_experts))
        chosen = np.arange(block.num_experts)[None, :] < count[:, None]
        np.put_along_axis(expected, order, np.where(chosen, p, 0.0), axis=1)
        assert block.entry["gate"] == "softmax"
        expected *= block.entry["scale"]
        if block.entry["renormalize"]:
            expected *= block.entry["scale"] / expected.sum(axis=1, keepdims=True)
        found = np.zeros((block.rows, block.num_experts))
        found[block.row_of, block.chosen] = block.weights
        np.testing.assert_array_equal((found > 0)[clear], (expected > 0)[clear])
        np.testing.assert_allclose(found[clear], expected[clear], rtol=0, atol=2e-6)


def test_profile_holds_the_same(run):
    arrays, metadata = read_profile(run.profile)
    assert metadata == {"format": "moeserve-expert-profile", "version": "1", "model": run.name}
    np.testing.assert_array_equal(arrays["routes.tokens"], run.tokens)
    for i, block in enumerate(run.blocks):
        counts = np.bincount(block.chosen, minlength=block.num_experts)
        np.testing.assert_array_equal(arrays[f"blocks.{i}.selections"], counts)
        table = block.token_counts(run.index["vocabulary"])
        np.testing.assert_array_equal(arrays[f"blocks.{i}.token_counts"], table)
        np.testing.assert_array_equal(arrays[f"blocks.{i}.routes.offsets"], block.offsets)
        np.testing.assert_array_equal(arrays[f"blocks.{i}.routes.experts"], block.chosen)
        np.testing.assert_array_equal(arrays[f"blocks.{i}.routes.top1"], block.first_choice())


@pytest.mark.parametrize("name", NAMES)
def test_merged_profiles_are_one_run_over_both_texts(name, tmp_path):
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    texts[0].write_bytes(held_out(0, 3000))
    texts[1].write_bytes(held_out(20000, 5000))
    options = ["--model", MODELS / name, "--window", 700, "--hidden"]
    for text in texts:
        moeserve("experts", "save", text.with_suffix(".p"), *options, "--text", text)
    moeserve("experts", "save", tmp_path / "both", *options, "--text", texts[0], "--text", texts[1])
    moeserve("experts", "merge", tmp_path / "sum", *(t.with_suffix(".p") for t in texts))
    both, _ = read_profile(tmp_path / "both")
    merged, _ = read_profile(tmp_path / "sum")
    assert both.keys() == merged.keys()
    for array, expected in both.items():
        assert merged[array].dtype == expected.dtype and merged[array].shape == expected.shape
        if expected.dtype == np.float64:
            np.testing.assert_allclose(merged[array], expected, rtol=1e-12, err_msg=array)
        else:
            np.testing.assert_array_equal(merged[array], expected, err_msg=array)


@pytest.mark.parametrize("pair", [("smoe", "x-moe"), ("hmoe-topk", "hmoe-topp")])
def test_diff(pair, tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in pair]
    a, b = (Run(name, folder) for name, folder in zip(pair, folders))
    found = json.loads(moeserve("experts", "diff", a.profile, b.profile, "--json"))
    assert [found["a"], found["b"]] == list(pair)
    mean = {"ic": [], "top1": [], "sets": []}
    for layer, x, y in zip(found["layers"], a.blocks, b.blocks):
        loads = [np.bincount(z.chosen, minlength=z.num_experts) for z in (x, y)]
        close(layer["load_share_a"], loads[0] / loads[0].sum())
        close(layer["load_share_b"], loads[1] / loads[1].sum())
        rho = np.corrcoef(loads[0], loads[1])
        close(layer["correlation"], rho[0, 1])
        close(layer["inter_run_consistency"], rho.mean())
        change = np.abs(loads[1] / loads[1].sum() - loads[0] / loads[0].sum())
        assert (np.diff(change[layer["movers"]]) <= 0).all()
        top1 = (x.first_choice() != y.first_choice()).mean()
        sets = (x.mask != y.mask).any(axis=1).mean()
        close(layer["routing_fluctuation"]["top1"], top1)
        close(layer["routing_fluctuation"]["sets"], sets)
        mean["ic"].append(rho.mean())
        mean["top1"].append(top1)
        mean["sets"].append(sets)
    close(found["inter_run_consistency"], np.mean(mean["ic"]))
    close(found["routing_fluctuation"]["top1"], np.mean(mean["top1"]))
    close(found["routing_fluctuation"]["sets"], np.mean(mean["sets"]))


def test_diff_of_one_model_with_itself(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(held_out(0, 2000))
    folder = MODELS / "mh-moe"
    found = json.loads(moeserve("experts", "diff", folder, folder, "--text", text, "--json"))
    assert found["routing_fluctuation"] == {"top1": 0.0, "sets": 0.0}
    close(found["inter_run_consistency"], 1.0)


def test_comparison(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(held_out(0, 4000))
    names = ["dense", "mh-moe", "hmoe-topp"]
    folders = [MODELS / name for name in names]
    arguments = ["experts", "compare", *folders, "--text", text, "--threshold", 0.3]
    found = json.loads(moeserve(*arguments, "--json"))
    assert found["activation_threshold"] == 0.3
    assert [m["model"] for m in found["models"]] == names
    for model, folder in zip(found["models"], folders):
        score = ["score", "--model", folder, "--text", text, "--threshold", 0.3, "--json"]
        alone = json.loads(moeserve(*score))
        experts = alone["experts"]
        close(model["perplexity"], alone["perplexity"])
        close(model["activation_ratio"], experts["activation_ratio"])
        close(model["diversity"], experts["diversity"]["mean"])
        close(model["activated_compute"], experts["activated_parameters"]["compute"])
        close(model["activated_unique"], experts["activated_parameters"]["unique"])
        assert model["macs_per_token"] == alone["macs_per_token"]
        close(model["activated_expert_share"], experts["activated_parameters"]["mean_block_ratio"])
        routed = experts["layers"]
        if not routed:
            continue
        loads = [np.array(layer["counts"]) for layer in routed]
        close(model["load_balance"], np.mean([n.mean() / n.max() for n in loads]))
        losses = [layer["router"]["normalized_balance_loss"] for layer in routed]
        close(model["normalized_balance_loss"], np.mean(losses))
        entropies = [
            layer["router"]["entropy_mean"] / math.log(layer["experts"]) for layer in routed
        ]
        close(model["router_entropy_ratio"], np.mean(entropies))
    table = moeserve(*arguments, "--markdown").decode()
    assert "| mh-moe |" in table and "Active experts" in table
