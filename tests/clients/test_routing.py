"""Tests routing records and routing overrides over HTTP and gRPC."""

import base64
import io
import json
import subprocess
import urllib.error
import urllib.request

import grpc
import numpy as np
import openai
import pytest

from conftest import ROOT, binary, post, start_server, stop_server

PROMPT = "In the beginning God created the heaven and the earth"
ASK = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
       "return_routing": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def routed():
    running = start_server("--routing-records", "--routing-control")
    yield running
    assert stop_server(running) == 0


@pytest.fixture(scope="module")
def layout(routed):
    return json.load(urllib.request.urlopen(routed.url + "/v1/experts/layout"))


def refusal(server, body, path="/v1/completions"):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, path, body)
    error = json.load(caught.value)["error"]
    return caught.value.code, error


def stream(server, body):
    request = urllib.request.Request(server.url + "/v1/completions",
                                     json.dumps({**body, "stream": True}).encode(),
                                     {"Content-Type": "application/json"})
    lines = urllib.request.urlopen(request).read().decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def join(pieces):
    """Concatenates routing records of consecutive ranges of tokens."""
    whole = {"first_position": 0, "tokens": 0, "reused": [], "offsets": [0], "experts": [],
             "weights": []}
    for piece in pieces:
        assert piece["first_position"] == whole["tokens"]
        whole["tokens"] += piece["tokens"]
        whole["reused"] += piece["reused"]
        whole["offsets"] += [whole["offsets"][-1] + offset for offset in piece["offsets"][1:]]
        whole["experts"] += piece["experts"]
        whole["weights"] += piece["weights"]
    return whole


def rows(record, layout):
    """Yields (token index, block of the layout, sub-token, experts) for every routed row."""
    for r in range(record["tokens"] * layout["rows_per_token"]):
        token, row = divmod(r, layout["rows_per_token"])
        block = next(b for b in reversed(layout["blocks"]) if b["first_row"] <= row)
        yield (token, block, row - block["first_row"],
               record["experts"][record["offsets"][r]:record["offsets"][r + 1]])


def test_record(routed, layout):
    answer = post(routed, "/v1/completions", ASK)
    choice = answer["choices"][0]
    record = choice["routing"]
    assert record["layout"]["blocks"] == layout["blocks"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert record["tokens"] == len(ids) - 1  # the model does not process the last token
    assert len(record["offsets"]) == record["tokens"] * layout["rows_per_token"] + 1
    assert len(record["experts"]) == len(record["weights"]) == record["offsets"][-1]
    for _, block, _, experts in rows(record, layout):
        assert experts == sorted(set(experts)) and 0 <= experts[0] and experts[-1] < block["experts"]
    assert answer["usage"]["experts_per_token"] == len(record["experts"]) / record["tokens"]
    assert answer["usage"]["activated_parameters_per_token"] > 0
    assert answer["usage"]["macs_per_token"] == macs_of(record)


def macs_of(record):
    """Returns the MACs per token of mh-moe, counted from its configuration and a record."""
    config = json.loads((ROOT / "deploy/models/mh-moe/config.json").read_text())
    attention, routing = config["attention"], config["feed_forward"]["routing"]
    d, layers, tokens = config["hidden_size"], config["num_hidden_layers"], record["tokens"]
    h, dim, experts = routing["split"]["heads"], routing["score"]["dim"], routing["num_experts"]
    width = attention["head_dim"] * attention["num_heads"]
    kv_width = attention["head_dim"] * attention["num_kv_heads"]
    fixed = 2 * d * (width + kv_width) + 2 * d * d + h * dim * (d // h + experts)
    keys = tokens * (tokens + 1) // 2
    experts_macs = len(record["experts"]) * 3 * (d // h) * routing["widths"]
    return (layers * (fixed * tokens + 2 * width * keys) + experts_macs) / tokens


def test_streamed_pieces_are_the_whole(routed):
    whole = post(routed, "/v1/completions", {**ASK, "cache_salt": "a"})["choices"][0]["routing"]
    chunks = stream(routed, {**ASK, "cache_salt": "b"})
    pieces = [chunk["choices"][0]["routing"] for chunk in chunks if chunk["choices"]
              and "routing" in chunk["choices"][0]]
    assert len(pieces) > 5  # records arrive with the tokens, not only at the end
    assert "layout" in pieces[0] and not any("layout" in piece for piece in pieces[1:])
    joined = join(pieces)
    assert {key: joined[key] for key in whole if key != "layout"} == \
        {key: value for key, value in whole.items() if key != "layout"}


def test_cached_tokens_are_marked(routed):
    body = {**ASK, "prompt": PROMPT * 4, "cache_salt": "marks"}
    first, second = (post(routed, "/v1/completions", body) for _ in range(2))
    a, b = (answer["choices"][0]["routing"] for answer in (first, second))
    assert a["reused"] == []
    assert b["reused"] == [[0, second["usage"]["prompt_tokens_details"]["cached_tokens"]]]
    assert a["experts"] == b["experts"] and a["weights"] == b["weights"]


def test_grpc_has_the_same(routed, layout, protos):
    pb, services = protos
    whole = post(routed, "/v1/completions", ASK)["choices"][0]
    with grpc.insecure_channel(routed.grpc) as channel:
        stub = services.InferenceStub(channel)
        request = pb.GenerateRequest(
            text=PROMPT, return_routing=True,
            sampling=pb.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        messages = list(stub.Generate(request))
        assert messages[0].routing.layout.rows_per_token == layout["rows_per_token"]
        record = join([{"first_position": m.routing.first_position, "tokens": m.routing.tokens,
                        "reused": [], "offsets": list(m.routing.offsets),
                        "experts": list(m.routing.experts),
                        "weights": list(m.routing.weights)} for m in messages if m.routing.tokens])
        assert record["experts"] == whole["routing"]["experts"]
        assert np.array_equal(np.float32(record["weights"]), np.float32(whole["routing"]["weights"]))
        assert messages[-1].usage.experts_per_token == len(record["experts"]) / record["tokens"]
        assert messages[-1].usage.macs_per_token == macs_of(record)

        # The routing record of a long prompt is divided into messages of less than 1 MiB, which
        # gRPC clients accept by default.
        everyone = min(block["experts"] for block in layout["blocks"])
        for control in (None, pb.RoutingControl(top_k=everyone)):
            request = pb.GenerateRequest(text=PROMPT * 60, return_routing=True,
                                         routing_control=control,
                                         sampling=pb.SamplingParams(max_tokens=2, ignore_eos=True))
            messages = list(stub.Generate(request))
            assert max(message.ByteSize() for message in messages) < 1 << 20
            assert sum(m.routing.tokens for m in messages) == messages[-1].usage.prompt_tokens + 1

        control = pb.RoutingControl(top_k=1, experts=[pb.RoutingControl.Expert(layer=0, expert=0)])
        request = pb.GenerateRequest(text=PROMPT, return_routing=True, routing_control=control,
                                     sampling=pb.SamplingParams(max_tokens=4))
        messages = list(stub.Generate(request))
        assert messages[0].routing_control.top_k == 1
        assert messages[0].routing_control.experts[0].block == "feed_forward"
        assert set(np.diff(messages[0].routing.offsets)) == {1}
        control.experts[0].expert = 100_000
        request = pb.GenerateRequest(text=PROMPT, routing_control=control)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_control_is_obeyed_and_echoed(routed, layout):
    masked = [{"layer": b["layer"], "block": b["block"], "experts": list(range(b["experts"] // 2))}
              for b in layout["blocks"]]
    control = {"top_k": 1, "masked_experts": masked}
    answer = post(routed, "/v1/completions", {**ASK, "routing_control": control})
    assert answer["routing_control"] == control
    for _, block, _, experts in rows(answer["choices"][0]["routing"], layout):
        assert len(experts) == 1 and experts[0] >= block["experts"] // 2
    plain = post(routed, "/v1/completions", ASK)
    assert "routing_control" not in plain
    assert plain["choices"][0]["routing"]["experts"] != answer["choices"][0]["routing"]["experts"]

    chunks = stream(routed, {**ASK, "routing_control": {"top_p": 0.5}})
    assert chunks[0]["routing_control"] == {"top_p": 0.5}
    assert not any("routing_control" in chunk for chunk in chunks[1:])

    bias = {"layer": 0, "block": "feed_forward", "expert": 3, "bias": 50.0}
    answer = post(routed, "/v1/completions", {**ASK, "routing_control": {"biased_experts": [bias]}})
    assert answer["routing_control"] == {"biased_experts": [bias]}
    for _, block, _, experts in rows(answer["choices"][0]["routing"], layout):
        assert block["layer"] != 0 or 3 in experts


@pytest.mark.parametrize("control, part", [
    (3, "object"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": 1000}, "1 to"),
    ({"top_k": "1"}, "top_k"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1, "top_p": 0.5}, "not both"),
    ({"topk": 1}, "unknown key"),
    ({"masked_experts": {}}, "list of objects"),
    ({"masked_experts": [1]}, "list of objects"),
    ({"masked_experts": [{"layer": 0}]}, "needs 'experts'"),
    ({"masked_experts": [{"experts": [0]}]}, "lacks 'layer'"),
    ({"masked_experts": [{"layer": 0, "experts": [-1]}]}, "an expert is a number"),
    ({"masked_experts": [{"layer": 0, "experts": [1, 1]}]}, "named twice"),
    ({"masked_experts": [{"layer": 999, "experts": [0]}]}, "not routed"),
    ({"masked_experts": [{"layer": 0, "block": "attention", "experts": [0]}]}, "not routed"),
    ({"masked_experts": [{"layer": 0, "block": "x", "experts": [0]}]}, "block"),
    ({"masked_experts": [{"layer": 0, "experts": list(range(8))}]}, "at least one"),
    ({"biased_experts": [{"layer": 0, "expert": 0}]}, "lacks 'bias'"),
    ({"biased_experts": [{"layer": 0, "expert": 0, "bias": 1e9}]}, "bias"),
])
def test_bad_control(routed, control, part):
    code, error = refusal(routed, {"prompt": "a", "routing_control": control})
    assert code == 400 and part in error["message"], error


def test_closed_by_default(server):
    for field, value in (("return_routing", True), ("return_routed_experts", True),
                         ("return_word_experts", ["a"]), ("routing_control", {"top_k": 1})):
        for path, rest in (("/v1/completions", {"prompt": "a"}),):
            code, error = refusal(server, {**rest, field: value}, path)
            assert code == 403 and error["param"] == field and error["code"] == "not_enabled"
    # Fields that request nothing must be accepted.
    post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1, "return_routing": False,
                                     "return_routed_experts": False, "routing_control": {}})


def test_limit_on_top_k():
    server = start_server("--routing-max-top-k", "2")
    try:
        answer = post(server, "/v1/completions", {"prompt": "a", "routing_control": {"top_k": 2}})
        assert answer["routing_control"] == {"top_k": 2}
        for control in ({"top_k": 3}, {"top_p": 0.9}):
            assert refusal(server, {"prompt": "a", "routing_control": control})[0] == 400
    finally:
        assert stop_server(server) == 0


def test_table(routed):
    code, error = refusal(routed, {"prompt": "a", "return_routed_experts": True})
    assert code == 400 and "sub-tokens" in error["message"]
    process = subprocess.Popen(
        [binary(), "serve", "--model", ROOT / "deploy/models/hmoe-topk", "--http", "127.0.0.1:0",
         "--grpc", "127.0.0.1:0", "--routing-records"], stdout=subprocess.PIPE, text=True)
    try:
        url = "http://" + process.stdout.readline().split()[-1]
        client = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
        answer = client.completions.create(
            model="hmoe-topk", prompt=PROMPT, max_tokens=6, temperature=0,
            extra_body={"return_routed_experts": True, "return_routing": True, "ignore_eos": True})
        choice = answer.choices[0].model_extra
        table = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        record = choice["routing"]
        layout = record["layout"]
        assert table.dtype == np.uint8
        layers = {block["layer"] for block in layout["blocks"]}
        assert table.shape == (answer.usage.total_tokens - 1, max(layers) + 1,
                               record["offsets"][1])
        for token, block, _, experts in rows(record, layout):
            assert list(table[token, block["layer"]]) == experts
        with pytest.raises(openai.BadRequestError):
            list(client.completions.create(model="hmoe-topk", prompt="a", stream=True,
                                           extra_body={"return_routed_experts": True}))
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def test_chat_has_it_too():
    server = start_server("--routing-records", "--chat-template",
                          str(ROOT / "tests/chat/templates/chatml.jinja"))
    try:
        body = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 6,
                "return_routing": True, "temperature": 0}
        whole = post(server, "/v1/chat/completions", body)["choices"][0]["routing"]
        assert whole["tokens"] > 6
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
        pieces = []
        for chunk in client.chat.completions.create(
                model=server.name, messages=body["messages"], max_tokens=6, temperature=0,
                stream=True, extra_body={"return_routing": True}):
            if chunk.choices and "routing" in (chunk.choices[0].model_extra or {}):
                pieces.append(chunk.choices[0].model_extra["routing"])
        assert join(pieces)["experts"] == whole["experts"]
    finally:
        assert stop_server(server) == 0


def test_experts_of_words(routed, layout):
    """The words' experts are those of the record, and those that `score --words` reports."""
    text = "The king saw the kings. King and queen, the KING's men"
    body = {"prompt": text, "max_tokens": 0, "echo": True, "return_token_ids": True,
            "return_routing": True, "return_word_experts": ["king", "the", "emperor"]}
    choice = post(routed, "/v1/completions", body)["choices"][0]
    found = choice["word_experts"]
    assert [(w["word"], w["occurrences"]) for w in found["words"]] == [
        ("king", 2), ("the", 3), ("emperor", 0)]
    record = choice["routing"]
    blocks = layout["blocks"]
    totals = {(b["layer"], b["block"]): [0] * b["experts"] for b in blocks}
    for _, block, _, experts in rows(record, layout):
        for expert in experts:
            totals[block["layer"], block["block"]][expert] += 1
    diversity = found["diversity"]
    assert diversity["blocks"] == len(blocks)
    listed, others = diversity["listed"], diversity["others"]
    assert listed["tokens"] == sum(w["tokens"] for w in found["words"]) >= 5
    assert others["tokens"] > 0 and listed["tokens"] + others["tokens"] < record["tokens"]
    for spread in (listed, others):
        assert sum(spread["histogram"]) == spread["tokens"]
        mean = sum(n * count for n, count in enumerate(spread["histogram"])) / spread["tokens"]
        assert spread["mean"] == pytest.approx(mean / len(blocks))
    for word in found["words"]:
        for layer in word["layers"]:
            all_counts = totals[layer["layer"], layer["block"]]
            assert all(count <= most for count, most in zip(layer["counts"], all_counts))
            assert sum(layer["shares"]) == pytest.approx(1.0 if word["tokens"] else 0.0)
    for words, code in (([], 400), ("king", 400), ([""], 400), (["k" * 129], 400), ([1], 400)):
        status, error = refusal(routed, {"prompt": "a", "return_word_experts": words})
        assert status == code and error["param"] == "return_word_experts"
    status, error = refusal(routed, {"prompt": "a", "stream": True,
                                     "return_word_experts": ["king"]})
    assert status == 400 and "streamed" in error["message"]
