"""Tests tests/gpu: pack.sh makes a folder, and run.sh of that folder runs its cases.

The packed programs are shell scripts. The lists of cases are compared with the test programs in the
build folder of MOESERVE_BIN (default: build/release), where it has them.
"""

import array
import json
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GPU = ROOT / "tests/gpu"
BUILD = pathlib.Path(os.environ.get("MOESERVE_BIN", ROOT / "build/release/moeserve")).parent
KINDS = {"device", "gtest", "server", "load", "profile", "kernels", "model", "baselines",
         "sanitizer"}

# Each program notes its runs in $RUNS.
PROGRAMS = {
    "tests/good_test": 'echo "[  PASSED  ] 3 tests."',
    "tests/bad_test": 'head -c 3000000 /dev/zero | tr "\\0" "x"; echo; echo "Failure: 1 is not 2"; '
                      "exit 1",
    "tests/stuck_test": "sleep 60",
    "tests/late_test": 'sleep ${LATE:-60}; echo "[  PASSED  ] 1 test."',
    "tests/none_test": 'echo "[  PASSED  ] 0 tests."',
    "tests/library_test": 'echo "device cuda: dense products by cuBLASLt: no libcublasLt.so.13"',
    "tests/bench/cuda_bench": r"""
while (($# > 0)); do [[ $1 == --json ]] && json=$2; shift; done
cat >>$json <<'END'
{"name":"device/rates","device":"D","copy_gbps":4000.5,"read_gbps":4100,"bf16_tflops":700,"bf16_method":"cuBLASLt","bf16_sustained_tflops":650,"graph_node_us":1.5}
{"name":"moe/olmoe/T1","median_us":60.5,"floor_us":24,"share_of_floor":0.5,"times_latency_floor":1.9,"bound":"memory"}
{"name":"route/olmoe/R256","median_us":10.5,"floor_us":1,"share_of_floor":0.1,"times_latency_floor":2.5,"bound":"latency"}
END
""",
}
CASES = """
# a comment
good      together 20 gtest good_test own *
bad       together 20 gtest bad_test own *
stuck     together 1 gtest stuck_test own *
none      together 20 gtest none_test own *
library   together 20 gtest library_test cublaslt *
figures   alone 20 kernels moe/ 5
after     together 20 gtest good_test own *
"""


def pack(folder, cases=CASES, programs=PROGRAMS, output="packed", *options):
    for name, text in programs.items():
        file = folder / "build" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'#!/bin/bash\necho "${{0##*/}}" >>"$RUNS"\n{text}\n')
        file.chmod(0o755)
    (folder / "cases.txt").write_text(cases)
    return subprocess.run(
        [GPU / "pack.sh", "--build", folder / "build", "--no-build", "--cases",
         folder / "cases.txt", "--models", "none", "--output", folder / output, *options],
        capture_output=True, text=True, check=False)


def environment(folder, **more):
    return {**os.environ, "RUNS": str(folder / "runs"), "TMPDIR": str(folder), **more}


def run(folder, *options, **more):
    return subprocess.run([folder / "packed/run.sh", "--out", folder / "out", *options],
                          capture_output=True, text=True, check=False, cwd=folder,
                          env=environment(folder, **more), timeout=60)


def results(folder, out="out"):
    lines = (folder / out / "results.tsv").read_text().splitlines()
    names = lines[0].split("\t")
    return {line.split("\t")[0]: dict(zip(names, line.split("\t"))) for line in lines[1:]}


def runs(folder):
    return (folder / "runs").read_text().split() if (folder / "runs").exists() else []


def processes_with(folder):
    """The command lines of processes that have a file of `folder` among their words."""
    found = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/moeserve-gpu-run" in words:
            found.append(words)
    return found


@pytest.fixture(scope="module", name="ended")
def ended_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    packed = pack(folder)
    assert packed.returncode == 0, packed.stderr
    return folder, run(folder)


def test_every_case_gets_its_status(ended):
    folder, done = ended
    found = {name: line["status"] for name, line in results(folder).items()}
    assert found == {"good": "passed", "bad": "failed", "stuck": "timeout", "none": "failed",
                     "library": "skipped", "figures": "passed", "after": "passed",
                     "device/copy": "measured", "device/read": "measured",
                     "device/bf16": "measured",
                     "device/graph_node": "measured", "moe/olmoe/T1": "measured",
                     "route/olmoe/R256": "measured"}, done.stdout + done.stderr
    assert done.returncode == 1
    assert results(folder)["good"]["note"] == "3 tests passed"
    assert "no libcublasLt" in results(folder)["library"]["note"]
    rate = results(folder)["device/bf16"]
    assert (rate["figure"], rate["unit"]) == ("700", "TFLOP/s")
    assert rate["note"] == "cuBLASLt, 650 after two seconds"
    assert results(folder)["moe/olmoe/T1"]["note"].endswith("1.90 times the latency floor")


def test_figures_have_predictions(ended):
    folder, _ = ended
    share, time_ = results(folder)["moe/olmoe/T1"], results(folder)["route/olmoe/R256"]
    assert (share["figure"], share["unit"], share["last"], share["ratio"]) == ("50", "%", "40",
                                                                               "1.25")
    # Of times, the smaller one is the better one.
    assert (time_["figure"], time_["last"], time_["target"], time_["ratio"]) == ("10.50", "21", "8",
                                                                                 "2.00")
    assert results(folder)["device/read"]["ratio"] == "-"
    assert "| moe/olmoe/T1 | 50 % | 40 | 66 | 1.25 |" in (folder / "out/summary.md").read_text()


def test_files_are_few_and_small(ended):
    folder, _ = ended
    files = list((folder / "out").iterdir())
    assert len(files) <= 8
    assert max(file.stat().st_size for file in files) < 100_000
    assert "Failure: 1 is not 2" in (folder / "out/failures.log").read_text()
    assert not list(folder.glob("moeserve-gpu-run-*/work.*"))


def test_results_are_not_made_again(ended):
    folder, _ = ended
    before = runs(folder)
    assert run(folder).returncode == 1
    assert runs(folder) == before
    assert run(folder, "--retry").returncode == 1
    assert sorted(runs(folder)[len(before):]) == ["bad_test", "none_test", "stuck_test"]
    assert run(folder, "--retry", "--filter", "bad").returncode == 1
    assert runs(folder)[len(before) + 3:] == ["bad_test"]
    assert len(results(folder)) == 13


def test_a_case_that_time_cut_off_is_run_later(tmp_path):
    cases = ("late together 60 gtest late_test own *\nquick together 9 gtest good_test own *\n"
             "last alone 9 gtest good_test own *\n")
    assert pack(tmp_path, cases).returncode == 0
    start = time.monotonic()
    done = run(tmp_path, "--seconds", "10")
    assert time.monotonic() - start < 10
    assert done.returncode == 3
    assert set(results(tmp_path)) == {"quick"}
    assert "**Not run yet** (2): late last" in done.stdout
    assert not processes_with(tmp_path)
    # On the next machine, the results are in the packed folder.
    (tmp_path / "out").rename(tmp_path / "packed/earlier")
    assert run(tmp_path, LATE="0").returncode == 0
    assert {n: r["status"] for n, r in results(tmp_path).items()} == {
        "quick": "passed", "late": "passed", "last": "passed"}
    assert runs(tmp_path) == ["late_test", "good_test", "late_test", "good_test"] or \
        sorted(runs(tmp_path)) == ["good_test", "good_test", "late_test", "late_test"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_results_outlive_a_signal(tmp_path, number):
    cases = "quick together 9 gtest good_test own *\nlate together 9 gtest late_test own *\n"
    assert pack(tmp_path, cases).returncode == 0
    with subprocess.Popen([tmp_path / "packed/run.sh", "--out", tmp_path / "out"],
                          stdout=subprocess.PIPE, text=True,
                          env=environment(tmp_path)) as process:
        for _ in range(200):
            file = tmp_path / "out/results.tsv"
            if file.exists() and "quick" in results(tmp_path) and "late_test" in runs(tmp_path):
                break
            time.sleep(0.05)
        process.send_signal(number)
        if number == signal.SIGTERM:
            assert process.wait(10) == 3
            assert "**Not run yet** (1): late" in (tmp_path / "out/summary.md").read_text()
            assert not processes_with(tmp_path)
        else:
            assert process.wait(10) == -signal.SIGKILL
            for word in processes_with(tmp_path):  # its case ends by its own limit
                assert "late" in word or word.startswith("tee")
    assert set(results(tmp_path)) == {"quick"}
    assert run(tmp_path, LATE="0").returncode == 0
    assert set(results(tmp_path)) == {"quick", "late"}


def test_a_folder_that_is_too_large_is_refused(tmp_path):
    large = {**PROGRAMS, "tests/large_test": "# " + os.urandom(1500000).hex()}
    done = pack(tmp_path, CASES + "large together 9 gtest large_test own *\n", large, "packed",
                "--limit-mib", "1")
    assert done.returncode == 1
    assert "more than 1 MiB" in done.stderr
    assert re.search(r"\d+\s+bin/large_test", done.stderr)
    assert not (tmp_path / "packed").exists()


def test_one_program_stands_for_those_that_it_contains(tmp_path):
    names = tmp_path / "build/tests/gpu/gpu_run_programs/programs.inc"
    names.parent.mkdir(parents=True)
    names.write_text("PROGRAM(good_test, good_tests, test_main)\n")
    one = 'case ${0##*/} in good_test) echo "[  PASSED  ] 5 tests." ;; *) exit 2 ;; esac'
    cases = "good together 9 gtest good_test own *\nbad together 9 gtest bad_test own *\n"
    assert pack(tmp_path, cases, {**PROGRAMS, "tests/gpu/gpu_run": one}).returncode == 0
    assert run(tmp_path).returncode == 1
    assert results(tmp_path)["good"]["note"] == "5 tests passed"
    assert results(tmp_path)["bad"]["status"] == "failed"
    unpacked, = tmp_path.glob("moeserve-gpu-run-*/*/bin")
    assert sorted(file.name for file in unpacked.iterdir() if not file.is_symlink()) == [
        "bad_test", "gpu_run"]


def tensors_of(path):
    """Returns {name: bytes} of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return {name: content[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]]
            for name, entry in json.loads(content[8:start]).items() if name != "__metadata__"}


def write_tensors(path, tensors):
    """Writes a safetensors file of {name: (dtype, bytes)}."""
    header, at = {}, 0
    for name, (dtype, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text +
                     b"".join(data for _, data in tensors.values()))


def test_shrunk_data_have_few_digits(tmp_path):
    file = tmp_path / "x.safetensors"
    results_of = array.array("f", [-7.123456, -0.0312345, float("-inf")])
    weights = array.array("H", [0x3F80, 0xBFBF, 0x3FA0, 0x3FE1, 0x7F80, 0x0000] * 700)
    before = {"target_logprobs": ("F32", results_of.tobytes()),
              "bf16_top_logprobs": ("F32", results_of.tobytes()),
              "margin": ("F32", results_of.tobytes()),
              "norm": ("BF16", weights[:6].tobytes()), "weight": ("BF16", weights.tobytes())}
    write_tensors(file, before)
    subprocess.run([GPU / "shrink_data.py", "results", file], check=True)
    after = tensors_of(file)
    rounded = array.array("f", after["target_logprobs"])
    assert all(value == round(value * 65536) / 65536 for value in rounded[:2])
    assert all(abs(x - y) < 1e-5 for x, y in zip(rounded[:2], results_of[:2]))
    assert rounded[2] == results_of[2]
    assert after["bf16_top_logprobs"] == bytes(12)
    assert {name: after[name] for name in ("margin", "norm", "weight")} == {
        name: before[name][1] for name in ("margin", "norm", "weight")}
    subprocess.run([GPU / "shrink_data.py", "weights", file], check=True)
    after = tensors_of(file)
    assert after["norm"] == before["norm"][1]  # too small to be worth it
    assert array.array("H", after["weight"])[:6].tolist() == [0x3F80, 0xBFC0, 0x3F80, 0x4000,
                                                              0x7F80, 0x0000]
    assert after["margin"] == before["margin"][1]


def test_a_missing_program_and_a_foreign_folder_are_named(tmp_path):
    done = pack(tmp_path, CASES + "more together 9 gtest other_test own *\n")
    assert done.returncode == 1 and "other_test is missing" in done.stderr
    (tmp_path / "mine").mkdir()
    done = pack(tmp_path, CASES, PROGRAMS, "mine")
    assert done.returncode == 1 and "mine exists and was not made by this script" in done.stderr


def read_cases(name):
    lines = (GPU / name).read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", ["cases.txt", "cases-emulated.txt"])
def test_the_lists_of_cases_are_sound(name):
    cases = read_cases(name)
    names = [words[0] for words in cases]
    assert len(set(names)) == len(names)
    for words in cases:
        assert words[1] in ("together", "alone"), words
        assert 0 < int(words[2]) <= 300, words
        assert words[3] in KINDS, words
    # Nothing else may disturb a measurement.
    for words in cases:
        assert words[1] == "alone" or words[3] not in ("load", "kernels", "model", "baselines")


@pytest.mark.parametrize("name", ["cases.txt", "cases-emulated.txt"])
def test_the_filters_select_tests(name):
    checked = 0
    for words in read_cases(name):
        if words[3] != "gtest":
            continue
        program, _, file = words[4].partition(":")
        program = {"ptx_test_device": "cuda_tests"}.get(program, program.removesuffix("_device"))
        folders = ("tests", "tests/cuda", "tests/model_loaders")
        files = [BUILD / f / program for f in folders if (BUILD / f / program).is_file()]
        if not files:
            continue
        device = "cuda_emulated_cublaslt" if words[5] == "cublaslt" else "cuda_emulated"
        pattern = words[6].replace("@D", device).replace("@PACKED_MODELS", "*/mh_moe:*/moa")
        listed = subprocess.run(
            [files[0], *([file] if file else []), "--gtest_list_tests",
             "--gtest_filter=" + pattern],
            env={**os.environ, "MOESERVE_TEST_DEVICE": device}, capture_output=True, text=True,
            check=True).stdout
        assert re.search(r"^  \S", listed, re.MULTILINE), words
        checked += 1
    if checked == 0:
        pytest.skip(f"{BUILD} has no test programs")


def test_predictions_are_those_of_cases_of_the_benchmark():
    program = BUILD / "tests/bench/cuda_bench_emulated"
    if not program.is_file():
        pytest.skip(f"{program} is missing")
    cases = set(subprocess.run([program, "--list"], capture_output=True, text=True,
                               check=True).stdout.split())
    for line in (GPU / "predictions.tsv").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, last, target, unit = line.split("\t")
        assert (last, target) != ("-", "-") and unit
        assert all(value == "-" or float(value) > 0 for value in (last, target))
        if not name.startswith(("model/", "device/")):
            assert name.removeprefix("baseline/") in cases
