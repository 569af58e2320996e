"""Which tokens end a text, in structured output and elsewhere."""

import json
import shutil
import urllib.request

from conftest import model, post, start_server, stop_server


def test_ends_that_generation_config_names_are_no_text_of_structured_output(tmp_path):
    """A full stop ends texts here. In a JSON string it must not end the answer."""
    folder = tmp_path / "model"
    shutil.copytree(model(), folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ends = [json.loads((folder / "config.json").read_text())["eos_token_id"], vocabulary["."]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
              "additionalProperties": False}
    server = start_server(folder=folder)
    try:
        for seed in range(12):
            choice = post(server, "/v1/completions", {
                "prompt": "In the beginning", "guided_json": schema, "max_tokens": 400,
                "seed": seed})["choices"][0]
            assert choice["finish_reason"] == "stop" and list(json.loads(choice["text"])) == ["name"]
        with urllib.request.urlopen(f"{server.url}/tokenizer_info") as answer:
            assert json.load(answer)["eos_token_ids"] == ends
    finally:
        assert stop_server(server) == 0
