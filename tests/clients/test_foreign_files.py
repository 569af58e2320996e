"""Checkpoints whose files are not what their names say, as `moeserve check` reports them."""

import json
import pathlib
import shutil
import subprocess
import zipfile

import pytest

from conftest import binary, model


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model(), copy)
    return copy


def check(folder):
    run = subprocess.run([binary(), "check", "--model", folder], capture_output=True, text=True,
                         timeout=60)
    return run.returncode, run.stdout + run.stderr


def make_sharded(folder, total_size):
    """Gives the weights an index with one shard."""
    weights = folder / "model.safetensors"
    shard = folder / "model-00001-of-00001.safetensors"
    weights.rename(shard)
    data = shard.read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    names = [name for name in header if name != "__metadata__"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": total_size}, "weight_map": {n: shard.name for n in names}}))
    return shard


def test_a_wrong_total_size_is_no_error(folder):
    make_sharded(folder, 1)
    status, text = check(folder)
    assert status == 0, text
    assert "total_size" in text


def test_links_do_not_leave_the_folder(folder, tmp_path):
    shard = make_sharded(folder, 1)
    elsewhere = tmp_path / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    status, text = check(folder)
    assert status == 1 and "link" in text, text


def as_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data", "x" * 100)


@pytest.mark.parametrize("content, name", [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "Git LFS"),
    (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    (b"GGUF\x03\0\0\0" + bytes(64), "GGUF"),
    (as_archive, "archive"),
    (b"\x1f\x8b\x08" + bytes(64), "gzip")])
def test_foreign_files_are_named(folder, content, name):
    path = folder / "model.safetensors"
    content(path) if callable(content) else path.write_bytes(content)
    status, text = check(folder)
    assert status == 1 and name.lower() in text.lower(), text


def test_a_configuration_without_weights_is_described(tmp_path):
    golden = pathlib.Path(__file__).parents[1] / "golden" / "families" / "qwen3-vl-moe"
    shutil.copy(golden / "config.json", tmp_path)
    code, text = check(tmp_path / "config.json")
    assert code == 0 and "there are no weights to check" in text and "qwen3_vl_moe_text" in text
    code, text = check(tmp_path)
    assert code == 1 and "are served" in text and "error: " in text
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    for path in (tmp_path, tmp_path / "config.json"):
        code, text = check(path)
        assert code == 1 and "several residual streams" in text and "served" not in text
