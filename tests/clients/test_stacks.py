"""Tests the expert statistics of an encoder-decoder's two stacks, over HTTP, gRPC, Prometheus and
in profiles."""

import json
import math
import struct
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest

from conftest import binary, model, start_server, stop_server
from test_pairs import FOLDER, complete, folder  # noqa: F401 (a fixture)

SOURCE = [2, 7, 8, 9, 3]
TOKENS = 6


@pytest.fixture(scope="module")
def server(folder):  # noqa: F811
    out = start_server("--dtype", "f32", "--token-stats-mib", "16", folder=folder)
    complete(out, SOURCE, max_tokens=TOKENS, n=2)
    yield out
    assert stop_server(out) == 0


@pytest.fixture(scope="module")
def recording(folder):  # noqa: F811
    out = start_server("--dtype", "f32", "--routing-records", folder=folder)
    yield out
    assert stop_server(out) == 0


def get(server, path):
    with urllib.request.urlopen(server.url + path) as answer:
        return json.load(answer)


def refusal(server, path):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, path)
    assert caught.value.code == 400
    return json.load(caught.value)["error"]["param"]


def test_statistics_name_the_stack(server):
    encoder = get(server, "/v1/experts/stats?stack=encoder")
    decoder = get(server, "/v1/experts/stats?stack=decoder")
    assert get(server, "/v1/experts/stats") == decoder
    assert (encoder["stack"], decoder["stack"]) == ("encoder", "decoder")
    for name, stats in (("encoder", encoder), ("decoder", decoder)):
        assert {layer["stack"] for layer in stats["layers"]} == {name}
    # The source is computed once for both samples; their last tokens are not computed. The start
    # token is computed once.
    assert encoder["tokens"] == len(SOURCE)
    assert decoder["tokens"] == 1 + 2 * (TOKENS - 1)
    assert {layer["block"] for layer in encoder["layers"]} == {"attention"}
    assert {layer["block"] for layer in decoder["layers"]} == {"attention", "cross_attention"}
    stacks = decoder["stacks"]
    assert [stacks[name]["tokens"] for name in ("encoder", "decoder")] == [
        encoder["tokens"], decoder["tokens"]]
    total = sum(stats["tokens"] * stats["activated_parameters_per_token"]
                for stats in (encoder, decoder))
    assert stacks["activated_parameters_per_token"] == pytest.approx(
        total / (encoder["tokens"] + decoder["tokens"]))


def test_parameters_are_those_of_the_stack(server, folder):  # noqa: F811
    """Experts count where a token selects them; embeddings and the other stack never do."""
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    for stack in ("encoder", "decoder"):
        sizes = {name: math.prod(entry["shape"]) for name, entry in header.items()
                 if name.startswith(f"{stack}.") and not name.startswith(f"{stack}.embed")}
        stats = get(server, f"/v1/experts/stats?stack={stack}")
        experts, selected = 0, 0.0
        for layer in stats["layers"]:
            prefix = f"{stack}.blocks.{layer['layer']}.{layer['block']}.experts."
            own = [sum(size for name, size in sizes.items() if name.startswith(f"{prefix}{e}."))
                   for e in range(layer["experts"])]
            assert layer["expert_parameters"] == own and min(own) > 0
            experts += sum(own)
            selected += sum(a * b for a, b in zip(layer["counts"], own)) / stats["tokens"]
        always = sum(sizes.values()) - experts
        assert stats["always_active_parameters"] == always
        assert stats["activated_parameters"]["total"] == always + experts
        assert stats["activated_parameters_per_token"] == pytest.approx(always + selected)


def test_other_routes_have_stacks(server):
    models = get(server, "/v1/models")["data"]
    assert models[0]["stacks"] == ["encoder", "decoder"]
    for stack in ("encoder", "decoder"):
        layout = get(server, f"/v1/experts/layout?stack={stack}")
        assert layout["stack"] == stack
        layers = get(server, f"/v1/experts/stats?stack={stack}")["layers"]
        assert [(b["layer"], b["block"]) for b in layout["blocks"]] == [
            (b["layer"], b["block"]) for b in layers]
        query = f"stack={stack}&layer=0&block=attention"
        tokens = get(server, f"/v1/experts/tokens?{query}&min_count=1&rank=count")
        assert tokens["stack"] == stack
        counts = {}
        for expert in tokens["experts"]:
            for token in expert["tokens"]:
                counts[token["id"]] = counts.get(token["id"], 0) + token["count"]
        if stack == "encoder":
            assert set(counts) == set(SOURCE)
        assert get(server, f"/v1/experts/similarity?{query}")["stack"] == stack
    cross = get(server, "/v1/experts/tokens?layer=0&block=cross_attention&min_count=1")
    assert cross["block"] == "cross_attention"


def test_wrong_stacks_are_refused(server):
    for path in ("stats", "layout", "tokens", "similarity", "collapse", "profile"):
        assert refusal(server, f"/v1/experts/{path}?stack=third&layer=0") == "stack"
    decoder = start_server(folder=model())
    try:
        assert refusal(decoder, "/v1/experts/stats?stack=decoder") == "stack"
        assert "stack" not in get(decoder, "/v1/experts/stats")
    finally:
        stop_server(decoder)


def test_routing_control_names_experts_of_the_decoder(folder):  # noqa: F811
    """The encoder's experts of the same numbers are not masked."""
    masked = [{"layer": 0, "block": "attention", "experts": [0, 1]},
              {"layer": 1, "block": "cross_attention", "experts": [2]}]
    server = start_server("--dtype", "f32", "--routing-records", "--routing-control", folder=folder)
    try:
        def encoder():
            layers = get(server, "/v1/experts/stats?stack=encoder")["layers"]
            return [layer["counts"] for layer in layers]

        complete(server, SOURCE, max_tokens=TOKENS)
        plain = encoder()
        answer = complete(server, SOURCE, max_tokens=TOKENS, return_routing=True,
                          routing_control={"masked_experts": masked})
        assert encoder() == [[2 * count for count in counts] for counts in plain]
    finally:
        assert stop_server(server) == 0
    assert answer["routing_control"]["masked_experts"] == masked
    routing = answer["choices"][0]["routing"]
    offsets, rows = routing["offsets"], routing["layout"]["rows_per_token"]
    for entry in masked:
        row = next(block["first_row"] for block in routing["layout"]["blocks"]
                   if (block["layer"], block["block"]) == (entry["layer"], entry["block"]))
        chosen = {expert for r in range(row, len(offsets) - 1, rows)
                  for expert in routing["experts"][offsets[r]:offsets[r + 1]]}
        assert chosen and not chosen & set(entry["experts"])


def test_metrics_have_a_label(server):
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    encoder = get(server, "/v1/experts/stats?stack=encoder")["layers"]
    total = {stack: sum(float(line.rsplit(" ", 1)[1]) for line in lines
                        if line.startswith("moeserve_moe_expert_tokens_total")
                        and f'stack="{stack}"' in line) for stack in ("encoder", "decoder")}
    assert total["encoder"] == sum(sum(layer["counts"]) for layer in encoder) > 0
    assert total["decoder"] > 0
    phases = {line.split('phase="')[1].split('"')[0] for line in lines
              if line.startswith("moeserve_moe_expert_tokens_per_step_count")
              and 'stack="encoder"' in line}
    assert "encode" in phases


def test_profiles_keep_the_stack(server, tmp_path):
    files = {}
    for stack in ("encoder", "decoder"):
        files[stack] = tmp_path / f"{stack}.profile"
        with urllib.request.urlopen(f"{server.url}/v1/experts/profile?stack={stack}") as answer:
            files[stack].write_bytes(answer.read())
        shown = subprocess.run([binary(), "experts", "show", files[stack], "--json"],
                               capture_output=True, text=True, check=True)
        layers = json.loads(shown.stdout)["layers"]
        wanted = get(server, f"/v1/experts/stats?stack={stack}")["layers"]
        assert [layer["stack"] for layer in layers] == [stack] * len(wanted)
        assert [layer["counts"] for layer in layers] == [layer["counts"] for layer in wanted]
    both = subprocess.run([binary(), "experts", "diff", files["encoder"], files["decoder"]],
                          capture_output=True, text=True, check=False)
    assert both.returncode == 1 and "numbers of routed blocks" in both.stderr, both.stderr


def test_grpc(server, protos):
    pb, pb_grpc = protos
    with grpc.insecure_channel(server.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        encoder = stub.GetExpertStats(pb.GetExpertStatsRequest(stack="encoder"))
        assert encoder.tokens == len(SOURCE)
        assert {block.stack for block in encoder.blocks} == {"encoder"}
        decoder = stub.GetExpertStats(pb.GetExpertStatsRequest())
        assert {block.stack for block in decoder.blocks} == {"decoder"}
        with pytest.raises(grpc.RpcError) as error:
            stub.GetExpertStats(pb.GetExpertStatsRequest(stack="third"))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def shapes():
    data = (FOLDER / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def matrices(prefix, selected=2):
    """Returns the MACs of a token with the matrices below `prefix`. Rows choose two experts of
    equal size."""
    total = 0
    for name, shape in shapes().items():
        if not name.startswith(prefix) or len(shape) != 2 or ".cross_attention.k." in name:
            continue
        if ".cross_attention.v." in name:
            continue
        if ".experts." not in name:
            total += math.prod(shape)
        elif ".experts.0." in name:
            total += selected * math.prod(shape)
    return total


def parameters(prefix, experts):
    """Returns how many parameters a token uses below `prefix`; `experts`: how many of each block."""
    total = 0
    for name, shape in shapes().items():
        if name.startswith(prefix):
            number = int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else 0
            total += math.prod(shape) * (experts if ".experts." in name else 1) * (number == 0)
    return total


def test_usage_counts_both_stacks(recording):
    tokens = 5
    usage = complete(recording, SOURCE, max_tokens=tokens)["usage"]
    source, own = len(SOURCE), tokens  # the start token and all but the last
    width, selected, layers = 8, 2, 2
    keys = 2 * width * selected * layers
    cross = sum(math.prod(shape) for name, shape in shapes().items()
                if ".cross_attention.k." in name or ".cross_attention.v." in name)
    macs = source * (matrices("encoder.blocks.") + cross + keys * source)
    macs += own * (matrices("decoder.blocks.") + keys * source) + keys * own * (own + 1) // 2
    assert usage["macs_per_token"] == pytest.approx(macs / (source + own), rel=1e-12)
    # Two of the experts in each of two blocks of the encoder, and of four blocks of the decoder.
    assert usage["experts_per_token"] == pytest.approx((4 * source + 8 * own) / (source + own))
    used = source * parameters("encoder.", 2) + own * parameters("decoder.", 2)
    assert usage["activated_parameters_per_token"] == pytest.approx(used / (source + own))
    found = json.loads(subprocess.run([binary(), "inspect", FOLDER, "--json"], check=True,
                                      capture_output=True).stdout)["macs_per_token"]
    assert found["nominal"] == matrices("decoder.blocks.")
    assert found["source"]["nominal"] == matrices("encoder.blocks.") + cross
    assert found["attention_per_source_key"] == {"min": keys, "max": keys}


def counts_of(record):
    """Returns how often each expert of each block is in a routing record."""
    return [[sum(row.count(expert) for row in block) for expert in range(5)]
            for block in record]


def rows_of(record, layout):
    """Returns by block the experts of every row."""
    out = [[] for _ in layout["blocks"]]
    rows, offsets = layout["rows_per_token"], record["offsets"]
    for token in range(record["tokens"]):
        for b, block in enumerate(layout["blocks"]):
            row = token * rows + block["first_row"]
            out[b].append(record["experts"][offsets[row]:offsets[row + 1]])
    return out


def test_records_have_the_source(recording, protos):
    layout = get(recording, "/v1/experts/layout?stack=encoder")
    before = get(recording, "/v1/experts/stats?stack=encoder")["layers"]
    body = {"max_tokens": 3, "return_routing": True}
    (choice,) = complete(recording, SOURCE, **body)["choices"]
    after = get(recording, "/v1/experts/stats?stack=encoder")["layers"]
    record = choice["source_routing"]
    assert record["tokens"] == len(SOURCE) and record["first_position"] == 0
    assert choice["routing"]["tokens"] == 3
    assert counts_of(rows_of(record, layout)) == [
        [b - a for a, b in zip(x["counts"], y["counts"])] for x, y in zip(before, after)]
    # All samples and beams have the record of the one computation.
    for more in ({"n": 2}, {"use_beam_search": True, "num_beams": 3, "n": 2}):
        choices = complete(recording, SOURCE, **body, **more)["choices"]
        assert [one["source_routing"] for one in choices] == [record] * 2
    pb, pb_grpc = protos
    with grpc.insecure_channel(recording.grpc) as channel:
        messages = list(pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=SOURCE), return_routing=True,
            sampling=pb.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))))
    sources = [m.source_routing for m in messages if m.HasField("source_routing")]
    assert [one.tokens for one in sources] == [len(SOURCE)]
    assert list(sources[0].experts) == record["experts"]
    assert list(sources[0].offsets) == record["offsets"]
