#!/usr/bin/env python3
"""Writes models for OpenVINO GenAI.

    write_openvino.py MODELS/medium-hf-bf16 MODELS/medium-openvino-bf16 --type bf16
    write_openvino.py MODELS/medium-openvino-bf16 MODELS/medium-openvino-int8 --type int8

The first command converts a Qwen3-MoE folder; weights are stored as f16. The second one makes the
weights of a converted folder int8 (one scale per output row) or int4 (one scale per row and 32
columns), both symmetric. The script needs optimum-intel and nncf; measuring needs neither. A folder
appears when it is complete.
"""

import argparse
import os
import pathlib
import shutil


def convert(source, target):
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig
    main_export(str(source), str(target), task="text-generation-with-past", framework="pt",
                library_name="transformers", ov_config=OVConfig(dtype="fp16"), stateful=True)


def compress(source, target, kind):
    import nncf
    import openvino
    model = openvino.Core().read_model(str(source / "openvino_model.xml"))
    if kind == "int8":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    else:
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT4_SYM,
                                      group_size=32, ratio=1.0)
    openvino.save_model(model, str(target / "openvino_model.xml"), compress_to_fp16=True)
    for file in source.glob("*.json"):
        shutil.copy(file, target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--type", choices=["bf16", "int8", "int4"], required=True)
    a = parser.parse_args()
    if a.target.exists():
        parser.error(f"{a.target} exists")
    partial = a.target.with_name(a.target.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if a.type == "bf16":
        convert(a.source, partial)
    else:
        compress(a.source, partial, a.type)
    partial.rename(a.target)


if __name__ == "__main__":
    main()
