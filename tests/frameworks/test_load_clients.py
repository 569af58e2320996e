"""Runs load generators in their default modes against a bundled model."""

import json
import pathlib
import subprocess
import sys

import pytest

from conftest import ROOT

MODEL = ROOT / "deploy/models/mh-moe"
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 8
REQUESTS = 6


def run(tmp_path, program, *arguments):
    """Runs a program of this virtual environment and returns what it printed."""
    path = pathlib.Path(sys.executable).with_name(program)
    if not path.exists():
        pytest.skip(f"{program} is not installed")
    finished = subprocess.run([path, *arguments], cwd=tmp_path, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stdout[-4000:]
    return finished.stdout


def test_aiperf(server, tmp_path):
    run(tmp_path, "aiperf", "profile", "--model", server.name, "--url", f"http://{server.http}",
        "--endpoint-type", "chat", "--streaming", "--request-count", str(REQUESTS),
        "--concurrency", "2", "--tokenizer", MODEL, "--ui", "none",
        "--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean",
        str(OUTPUT_TOKENS))
    [export] = tmp_path.glob("artifacts/*/profile_export_aiperf.json")
    report = json.loads(export.read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["output_sequence_length"]["max"] <= OUTPUT_TOKENS
    [lines] = tmp_path.glob("artifacts/*/profile_export.jsonl")
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(records) == REQUESTS and not any(record.get("error") for record in records)


def test_guidellm(server, tmp_path):
    run(tmp_path, "guidellm", "run", "--backend", f"kind=openai_http,target=http://{server.http}",
        "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},"
        f"output_tokens={OUTPUT_TOKENS}", "--tokenizer", f"kind=hf_auto,model={MODEL}",
        "--output", "kind=json,path=report.json", "--disable-progress")
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
