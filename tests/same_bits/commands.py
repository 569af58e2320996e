"""Records what the commands other than `serve` print and write."""

import hashlib
import json
import pathlib
import re
import shutil
import subprocess

import exact
from running import ROOT, environment

TIME_OF_LOG = re.compile(r"^\d{4}-\d\d-\d\d [\d:.]+")
PROGRESS = re.compile(r"^scoring: \d+")  # is printed only when a run takes long
TIMED_TEXT = re.compile(r"\d+(\.\d+)? (ms|s|seconds)\b")
# The limit on the number of commands whose help is recorded, in case a help text is misparsed.
LONGEST_HELP = 200


class Commands:
    """Runs commands in a separate folder, so that their output contains no path of this machine."""

    def __init__(self, binary, folder):
        self._binary = binary
        self._folder = pathlib.Path(folder)

    def record(self, key, *arguments, files=()):
        """Returns a record of one command: its output, its exit status and hashes of the `files`
        that it wrote."""
        done = subprocess.run([self._binary, *arguments], cwd=self._folder, env=environment(),
                              capture_output=True, timeout=300)
        answer = {"status": done.returncode, "stdout": self._text(done.stdout, arguments),
                  "stderr": self._text(done.stderr, arguments)}
        if files:
            answer["files"] = {name: self._hash(self._folder / name) for name in files}
        return {"key": key, "request": list(arguments), "answer": answer}

    @staticmethod
    def _text(data, arguments):
        text = data.decode("utf-8", "backslashreplace")
        # With --json, warnings are still plain text.
        if "--json" in arguments and text.startswith(("{", "[")):
            return exact.parse(text)
        return [TIME_OF_LOG.sub("*", line) for line in text.splitlines()
                if not PROGRESS.match(line)]

    @staticmethod
    def _hash(path):
        if path.is_dir():
            return {file.name: Commands._hash(file) for file in sorted(path.iterdir())}
        if not path.exists():
            return "(not written)"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def path(self, name):
        return self._folder / name

    def help(self):
        """Yields a record of the help text of every command. The commands are found in the lists of
        subcommands in the help texts."""
        waiting = [()]
        count = 0
        while waiting and count < LONGEST_HELP:
            words = waiting.pop(0)
            record = self.record(f"help {' '.join(words)}".strip(), *words, "--help")
            yield record
            count += 1
            below = False
            for line in record["answer"]["stdout"]:
                if line and not line[0].isspace():
                    below = line.lower().startswith(("commands", "subcommands"))
                elif below and (found := re.match(r"  ([a-z][a-z-]*)(\s|$)", line)):
                    waiting.append((*words, found[1]))


def prepare(commands, model):
    """Writes the input texts, links the model under a relative name, and makes broken copies."""
    text = (ROOT / "tests/data/heldout.txt").read_text()
    commands.path("one.txt").write_text(text[1000:7000])
    commands.path("two.txt").write_text(text[50000:53000])
    commands.path(model.name).symlink_to(model.resolve())
    for name in BROKEN:
        shutil.copytree(model, commands.path(name))
    for name, change in BROKEN.items():
        change(commands.path(name))


def _change_config(**changes):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return change


def _cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BROKEN = {
    "no-tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "no-weights": lambda folder: (folder / "model.safetensors").unlink(),
    "unknown-key": _change_config(no_such_key=1),
    "wrong-width": _change_config(hidden_size=130),
    "more-layers": _change_config(num_hidden_layers=5),
    "other-type": _change_config(model_type="llama"),
    "cut-weights": _cut_weights,
}


def model_records(commands, model):
    """Yields records of every command that reads a model."""
    name = model.name
    run = commands.record
    compute = ["--model", name, "--dtype", "bf16", "--threads", "2"]
    begin = ["generate", *compute, "--prompt", "In the beginning God created"]
    texts = ["--text", "one.txt", "--text", "two.txt", "--window", "256"]
    # Without --max-num-seqs 1, the windows that share a step would depend on time, and so would the
    # rounding of sums.
    one_by_one = ["--max-num-seqs", "1", "--json"]
    yield run("generate greedy", *begin, "--max-tokens", "24", "--temperature", "0", "--stats")
    yield run("generate seeded", *begin, "--max-tokens", "24", "--seed", "7", "--top-p", "0.9",
              "--top-k", "50", "--min-p", "0.01", "--echo", "--ignore-eos")
    yield run("generate stop", *begin, "--max-tokens", "24", "--seed", "3", "--stop", " the")
    yield run("generate wrong", *begin, "--temperature", "3")
    yield run("score json", "score", *compute, *texts, "--json", "--hidden-samples", "300",
              "--profile", "a.profile", "--profile-hidden", files=["a.profile"])
    yield run("score table", "score", *compute, *texts)
    yield run("score int8 cache", "score", *compute, *texts, *one_by_one,
              "--kv-cache-dtype", "int8")
    yield run("score plain isa", "score", *compute, *texts, *one_by_one,
              "--cpu-isa", "plain")
    yield run("score int4", "score", "--model", name, "--dtype", "int4", "--threads", "2", *texts,
              *one_by_one)
    yield run("score dump", "score", *compute, "--text", "two.txt", "--window", "64", "--dump",
              "dump", "--dump-hidden", files=["dump"])
    yield run("experts save", "experts", "save", "b.profile", *compute, "--text", "two.txt",
              files=["b.profile"])
    yield run("experts show json", "experts", "show", "a.profile", "--model", name, "--json")
    yield run("experts show table", "experts", "show", "a.profile", "--model", name)
    yield run("experts diff", "experts", "diff", "b.profile", name, "--dtype", "bf16", "--threads",
              "2", "--text", "two.txt", "--json")
    yield run("experts diff table", "experts", "diff", "a.profile", "b.profile")
    yield run("experts merge", "experts", "merge", "c.profile", "a.profile", "b.profile",
              files=["c.profile"])
    yield run("experts compare", "experts", "compare", name, "--dtype", "bf16", "--threads", "2",
              "--text", "two.txt", "--window", "128", "--markdown")
    yield run("inspect", "inspect", "--model", name)
    yield run("inspect json", "inspect", "--model", name, "--json")
    for dtype in ("int8", "int8-channel", "int4", "int4-k"):
        yield run(f"quantize {dtype}", "quantize", name, dtype, "--dtype", dtype, files=[dtype])
        yield run(f"inspect {dtype}", "inspect", "--model", dtype, "--json")
    yield run("check", "check", "--model", name)
    for broken in BROKEN:
        yield run(f"check {broken}", "check", "--model", broken)
        yield run(f"generate {broken}", "generate", "--model", broken, "--prompt", "a",
                  "--max-tokens", "1", "--temperature", "0")
    for key, flags in WRONG_SERVERS.items():
        yield run(f"serve {key}", "serve", "--model", name, "--http", "127.0.0.1:0", "--grpc",
                  "127.0.0.1:0", "--log-level", "error", *flags)


WRONG_SERVERS = {
    "open": ["--http", "0.0.0.0:0"], "no flag": ["--no-such-flag"],
    "template": ["--chat-template", "nowhere.jinja"], "metrics": ["--moe-metrics", "all"],
    "weights": ["--moe-metrics", "layer", "--moe-expert-weights"],
    "names": ["--metrics-compat", "triton"], "dtype": ["--dtype", "f64"],
    "cache": ["--kv-cache-memory", "1KiB"], "context": ["--max-model-len", "100000"],
    "records": ["--routing-records", "--no-expert-stats"], "keys": ["--api-key-file", "nowhere"],
}
