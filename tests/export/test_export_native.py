"""Tests model_loaders/export_native.py with a PyTorch module that has names and layouts of its own:
the proposed mapping, the exported folder, and the comparison with moeserve. Skipped without PyTorch.

MOESERVE_BIN names the program (default: build/release/moeserve).
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "model_loaders"), str(HERE)]

import export_native  # noqa: E402
import modules  # noqa: E402
from export_native import ExportError, export, propose, verify  # noqa: E402
from pytorch_export import names  # noqa: E402

PROGRAM = pathlib.Path(os.environ.get("MOESERVE_BIN", ROOT / "build/release/moeserve"))
needs_program = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built")
IDS = list(range(5, 25))


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setenv("MOESERVE_BIN", str(PROGRAM))


@pytest.fixture(scope="module")
def mapping():
    return propose(modules.build(), modules.CONFIG).mapping()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, mapping):
    out = tmp_path_factory.mktemp("exported") / "model"
    export(modules.build(), modules.CONFIG, out, mapping=mapping)
    return out


def test_other_names_get_a_proposal(tmp_path):
    with pytest.raises(ExportError) as caught:
        export(modules.build(), modules.CONFIG, tmp_path / "out")
    message = str(caught.value)
    assert "embed.weight: expected shape [96, 32]" in message and "Proposed mapping" in message
    assert "blocks.{i}.feed_forward.experts.{j}.up.weight [24, 32] <- h.{i}.moe.w3[{j}].T" in message
    assert not (tmp_path / "out").exists()


def test_wrong_shapes_get_none(tmp_path, mapping):
    weights = modules.build().state_dict()
    weights["ln_f.weight"] = torch.zeros(31)
    expected = r"norm.weight: expected shape \[32\].*found \[31\]"
    with pytest.raises(ExportError, match=expected) as caught:
        export(weights, modules.CONFIG, tmp_path / "out", mapping=mapping)
    assert "Proposed" not in str(caught.value)


def test_tensors_that_nothing_uses_are_reported(tmp_path, mapping):
    left = {key: value for key, value in mapping.items() if key != "ignore"}
    with pytest.raises(ExportError, match="steps: expected no such tensor"):
        export(modules.build(), modules.CONFIG, tmp_path / "out", mapping=left)


def test_what_is_not_a_state_dict(tmp_path):
    with pytest.raises(ExportError, match="expected a module or a state dict, found int"):
        export(3, modules.CONFIG, tmp_path / "out")
    with pytest.raises(ExportError, match="epoch: expected a tensor, found int"):
        export({"epoch": 3}, modules.CONFIG, tmp_path / "out")


def test_the_example_of_the_readme(tmp_path, monkeypatch):
    text = (ROOT / "model_loaders/README.md").read_text(encoding="utf-8")
    section = text[text.index("## Export from PyTorch"):]
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1), {})
    assert (tmp_path / "xmoe-demo/model.safetensors").exists()


@needs_program
def test_the_server_computes_what_the_module_computes(folder, mapping):
    report = verify(modules.build(), folder, mapping=mapping)
    assert report.equal and report.largest < 1e-4, report
    assert [block.block for block in report.blocks] == ["0.feed_forward", "1.feed_forward"]
    assert all(block.rows == report.tokens > 50 and block.differing == 0 and not block.skipped
               for block in report.blocks)
    assert str(report).endswith("\nequal") and "0 rows differ" in str(report)
    assert list(folder.parent.iterdir()) == [folder]  # nothing stays


@needs_program
def test_other_routes_are_found(folder, mapping):
    module = modules.build()
    weight = module.h[1].moe.router.weight.data
    weight[[0, 1]] = weight[[1, 0]]
    report = verify(module, folder, IDS, mapping)
    assert not report.equal and report.tokens == len(IDS)
    assert report.blocks[0].differing == 0 < report.blocks[1].differing
    assert "first block 1.feed_forward" in str(report) and "moeserve [" in report.blocks[1].first
    assert str(report).endswith("different")


@needs_program
def test_other_numbers_are_found(folder, mapping):
    module = modules.build()
    module.h[1].moe.top_k = 1
    report = verify(module, folder, IDS, mapping)
    assert not report.equal and report.largest > 0.01
    assert report.first_at.startswith("position 1, token 6: moeserve -")
    assert not any(block.differing for block in report.blocks)
    assert "above 0.001" in str(report) and report.largest_at in str(report)
    assert verify(module, folder, IDS, mapping, tolerance=100).equal


@needs_program
@pytest.mark.parametrize("p, equal", [(0.6, True), (0.7, False)])
def test_selections_by_top_p(tmp_path, mapping, p, equal):
    feed_forward = json.loads(json.dumps(modules.CONFIG["feed_forward"]))
    feed_forward["routing"]["select"] = {"kind": "top_p", "p": p}
    export(modules.build(), {**modules.CONFIG, "feed_forward": feed_forward}, tmp_path / "model",
           mapping=mapping)
    report = verify(modules.build(top_p=0.6), tmp_path / "model", IDS, mapping)
    assert report.equal == equal, report
    # The configuration says how many experts follow from the scores of the first block.
    assert report.blocks[0].differing == 0 and report.blocks[0].from_scores


@needs_program
def test_models_without_routes(tmp_path):
    config = {**modules.CONFIG, "feed_forward": {
        "kind": "dense", "width": modules.WIDTH, "expert": {"form": "plain", "activation": "relu"}}}
    weights = {name: torch.zeros(shape)
               for name, (shape, _) in export_native.required_tensors(config).items()}
    export(weights, config, tmp_path / "model")
    even = torch.nn.Embedding.from_pretrained(torch.zeros(modules.V, modules.V))
    report = verify(even, tmp_path / "model", IDS)
    assert report.equal and report.blocks == [] and "routes" not in str(report)


class Ids(torch.nn.Module):
    """A router that returns weights and expert ids."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        weights, chosen = self.inner(x).topk(modules.K)
        self.chosen = chosen
        return self.inner(x), weights, chosen


@needs_program
def test_routers_by_name(folder, mapping):
    module = modules.build()
    # The mapping does not lead to the routers, because nothing says which tensors are theirs.
    report = verify(module, folder, IDS)
    assert report.equal and all("routers" in block.skipped for block in report.blocks)
    assert "routes of 0.feed_forward not compared" in str(report)
    report = verify(module, folder, IDS, routers={"{i}.feed_forward": "h.{i}.moe.router"})
    assert report.equal and not any(block.skipped for block in report.blocks)
    assert "from the module's scores" in str(report)
    report = verify(module, folder, IDS, routers={"0.feed_forward": "h.0.moe"})
    assert "expected scores [20, 6] or expert ids [20, selected], found [20, 32]" in \
        report.blocks[0].skipped
    with pytest.raises(ExportError, match="expected a submodule, found none named h.0.gate"):
        verify(module, folder, IDS, routers={"0.feed_forward": "h.0.gate"})
    with pytest.raises(ExportError, match="such as 0.feed_forward, found 7.feed_forward"):
        verify(module, folder, IDS, routers={"7.feed_forward": "h.0.moe.router"})
    module.h[0].moe.spare = torch.nn.Linear(1, 1)
    report = verify(module, folder, IDS, routers={"0.feed_forward": "h.0.moe.spare"})
    assert report.blocks[0].skipped == "the module did not call h.0.moe.spare"


@needs_program
def test_routers_that_return_expert_ids(folder, mapping):
    module = modules.build()
    for layer in module.h:
        layer.moe.ids = Ids(layer.moe.router)
        # Called beside the module's own selection.
        layer.moe.register_forward_pre_hook(lambda moe, inputs: moe.ids(inputs[0]) and None)
    report = verify(module, folder, IDS, routers={"{i}.feed_forward": "h.{i}.moe.ids"})
    assert report.equal and not any(block.skipped or block.from_scores for block in report.blocks)


@needs_program
def test_rounded_weights_are_explained(tmp_path, mapping):
    out = tmp_path / "rounded"
    export(modules.build(), modules.CONFIG, out, dtype=torch.bfloat16, mapping=mapping)
    report = verify(modules.build(), out, IDS, mapping, tolerance=1e-6)
    assert not report.equal and "module.to(torch.bfloat16).float()" in report.hint
    assert verify(modules.build().to(torch.bfloat16).float(), out, IDS, mapping).equal


@needs_program
def test_what_cannot_be_run(folder, tmp_path):
    with pytest.raises(ExportError, match=r"expected logits of shape \[1, 20, 96\], found"):
        verify(torch.nn.Embedding(96, 8), folder, IDS)
    with pytest.raises(ExportError, match=r"expected ids in \[0, 96\), found 96"):
        verify(modules.build(), folder, [1, 96])
    with pytest.raises(ExportError, match="expected at least 2, found 1"):
        verify(modules.build(), folder, [1])
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ExportError, match="moeserve cannot serve .*error: "):
        verify(modules.build(), tmp_path, IDS)
    with pytest.raises(OSError):
        verify(modules.build(), folder, IDS, moeserve=str(tmp_path / "none"))


@needs_program
def test_the_commands(tmp_path, capsys):
    def run(*arguments, status=0):
        got = export_native.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert got == status, printed
        return printed.out + printed.err

    config, weights, found = (tmp_path / name for name in ("c.json", "w.pt", "mapping.json"))
    config.write_text(json.dumps(modules.CONFIG))
    torch.save({"state_dict": modules.build().state_dict(), "epoch": 3}, weights)
    printed = run("propose", config, weights, "--output", found)
    assert "embed.weight [96, 32] <- wte.weight" in printed and f"wrote {found}" in printed
    out = tmp_path / "model"
    assert "wrote" in run("export", config, weights, out, "--mapping", found)
    place = f"{HERE / 'modules.py'}:build"
    printed = run("verify", out, "--module", place, "--mapping", found)
    assert printed.endswith("equal\n") and "0 rows differ" in printed
    printed = run("verify", out, "--module", place, "--ids", "1,2,3", "--router",
                  "0.feed_forward=h.0.moe.router", "--tolerance", "0", status=1)
    assert "of 3 tokens" in printed and "routes of 1.feed_forward not compared" in printed
    assert "error: --module: expected a function none in" in run(
        "verify", out, "--module", f"{HERE / 'modules.py'}:none", status=2)
    assert "error: " in run("propose", tmp_path / "none.json", weights, status=2)
    for wrong in (b"", b"text", b"\x08\0\0\0\0\0\0\0{}      "):
        weights.write_bytes(wrong)
        assert "expected a state dict that torch.save() wrote" in run("propose", config, weights,
                                                                      status=2)
    torch.save(torch.nn.Linear(2, 2), weights)
    assert "expected a state dict that torch.save() wrote" in run("propose", config, weights, status=2)


def test_the_script_runs(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "model_loaders/export_native.py", "propose",
                           tmp_path / "none.json", "w.pt"], text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


def test_ties_do_not_count():
    from pytorch_export import comparison

    block = {"sub_tokens": 1, "first_row": 0, "experts": 4}
    record = {"tokens": 2, "layout": {"rows_per_token": 1}, "offsets": [0, 2, 4],
              "experts": [0, 2, 0, 2]}
    scores = torch.tensor([[3.0, 1.0, 1.0 - 1e-6, 0.0], [3.0, 1.0, 0.9, 0.0]])
    result = comparison.BlockRoutes("0.feed_forward")
    comparison._compare_routes(result, block, record, {"select": {"kind": "top_k", "k": 2}}, scores,
                               "router")
    assert (result.rows, result.ties, result.differing) == (2, 1, 1)
    assert result.first == ("first token 1: moeserve [0, 2], module [0, 1], the module's scores "
                            "differ by 1.0e-01")
    biased = {"select": {"kind": "top_k", "k": 2, "bias": True}}
    result = comparison.BlockRoutes("0.feed_forward")
    comparison._compare_routes(result, block, record, biased, scores, "router")
    assert "scores do not determine these selections" in result.skipped


def stored_shapes(folder):
    """Returns {name: shape} of all tensors of a folder, from the headers of its files."""
    shapes = {}
    for path in folder.glob("model*.safetensors"):
        data = path.read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        header.pop("__metadata__", None)
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items()})
    return shapes


def test_every_native_folder_has_the_required_tensors():
    golden = ROOT / "tests/golden"
    folders = [path.parent for place in ("", "encoders/", "pairs/")
               for path in golden.glob(place + "tiny-*/config.json")]
    assert len(folders) > 30
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        wanted = {name: shape for name, (shape, _) in export_native.required_tensors(config).items()}
        assert wanted == stored_shapes(folder), folder.name
        parts = {part for name in wanted for part in name.split(".") if not part.isdigit()}
        # The projections of a short convolution have letters as names.
        unknown = {part for part in parts - names._CONTAINERS if names._meanings(part) is None}
        assert unknown <= {"b", "c", "x"}, folder.name


class TranslatorLayer(torch.nn.Module):
    """A layer with other names than those of the format."""

    def __init__(self, d, width, cross):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = self.attention(d), torch.nn.LayerNorm(d)
        if cross:
            self.encoder_attn = self.attention(d)
            self.encoder_attn_layer_norm = torch.nn.LayerNorm(d)
        self.fc1, self.fc2 = torch.nn.Linear(d, width), torch.nn.Linear(width, d)
        self.final_layer_norm = torch.nn.LayerNorm(d)

    @staticmethod
    def attention(d):
        return torch.nn.ModuleDict({name: torch.nn.Linear(d, d, bias=False)
                                    for name in ("q_proj", "k_proj", "v_proj", "out_proj")})


class Translator(torch.nn.Module):
    def __init__(self, d=16, width=24, source=40, target=48):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Module(), torch.nn.Module()
        for stack, rows, cross in ((self.encoder, source, False), (self.decoder, target, True)):
            stack.embed_tokens = torch.nn.Embedding(rows, d)
            stack.layers = torch.nn.ModuleList(TranslatorLayer(d, width, cross) for _ in range(2))
        self.decoder.output_projection = torch.nn.Linear(d, target, bias=False)


def translator_config():
    attention = {"kind": "dense", "num_heads": 2, "head_dim": 8}
    expert = {"form": "plain", "activation": "relu", "bias": True}
    stack = {"num_hidden_layers": 2, "max_position_embeddings": 64, "attention": attention,
             "norm": {"kind": "layer", "placement": "post"},
             "position": {"kind": "sinusoidal", "first": 2},
             "feed_forward": {"kind": "dense", "width": 24, "expert": expert}}
    return {"model_type": "routed_encoder_decoder", "vocab_size": 48, "hidden_size": 16,
            "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
            "share_embeddings": False, "encoder": {**stack, "vocab_size": 40},
            "decoder": {**stack, "cross_attention": attention}}


@needs_program
def test_encoder_decoders(tmp_path):
    module, config = Translator(), translator_config()
    mapping = propose(module, config).mapping()
    export(module, config, tmp_path / "out", mapping=mapping)
    assert json.loads((tmp_path / "out/config.json").read_text())["format_version"] == 2
    stored = stored_shapes(tmp_path / "out")
    assert stored["encoder.embed.weight"] == (40, 16) and stored["decoder.embed.weight"] == (48, 16)
    written = mappings_of(module, mapping)
    for native, original in (
            ("encoder.blocks.1.attention.q.weight", "encoder.layers.1.self_attn.q_proj.weight"),
            ("decoder.blocks.1.attention.q.weight", "decoder.layers.1.self_attn.q_proj.weight"),
            ("decoder.blocks.1.cross_attention.q.weight",
             "decoder.layers.1.encoder_attn.q_proj.weight"),
            ("decoder.blocks.0.cross_attention.norm.weight",
             "decoder.layers.0.encoder_attn_layer_norm.weight"),
            ("encoder.blocks.0.feed_forward.up.bias", "encoder.layers.0.fc1.bias")):
        assert torch.equal(written[native], module.state_dict()[original]), native
    result = subprocess.run([PROGRAM, "inspect", tmp_path / "out"],
                            capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    with pytest.raises(ExportError, match="expected a decoder, found routed_encoder_decoder"):
        verify(module, tmp_path / "out", mapping=mapping)


def mappings_of(module, mapping):
    """Returns the tensors that a mapping makes of those of a module."""
    wanted = export_native.required_tensors(translator_config())
    return export_native.mappings.apply(mapping, dict(module.state_dict()), wanted)


@needs_program
def test_encoders(tmp_path):
    folder = ROOT / "tests/golden/encoders/tiny-encoder-xmoe"
    config = json.loads((folder / "config.json").read_text())
    wanted = export_native.required_tensors(config)
    weights = {name: torch.ones(shape) * 0.1 for name, (shape, _) in wanted.items()}
    export(weights, config, tmp_path / "out")
    assert stored_shapes(tmp_path / "out") == stored_shapes(folder)
    result = subprocess.run([PROGRAM, "inspect", tmp_path / "out"],
                            capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    del weights["head.layer_norm.bias"]
    with pytest.raises(ExportError, match=r"head.layer_norm.bias: expected shape \[32\]"):
        export(weights, config, tmp_path / "other")


def test_the_proposal_of_a_state_dict_is_that_of_the_module():
    module = modules.build()
    assert export_native.propose(module.state_dict(), modules.CONFIG).mapping() == \
        propose(module, modules.CONFIG).mapping()
