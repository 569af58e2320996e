"""Valid inputs for the targets that read the configuration of a model with the tensors of its files:
config and gguf_model. make_seeds.py calls write()."""

import json
import struct

SEPARATOR = b"\n\n\n"
# The sizes of the types of GGUF values by their numbers; 8 is a text, 9 an array.
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class Cursor:
    def __init__(self, data, at):
        self.data, self.at = data, at

    def number(self, code):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self):
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size:self.at]

    def skip(self, kind):
        """Skips a value of the metadata."""
        if kind == 8:
            self.text()
        elif kind == 9:
            item, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.skip(item)
        else:
            self.at += SIZES[kind]


def gguf_model(data):
    """The input of gguf_model for a file: tensors, then keys."""
    cursor = Cursor(data, 8)
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    begin = cursor.at
    for _ in range(keys):
        cursor.text()
        cursor.skip(cursor.number("I"))
    metadata = data[begin:cursor.at]
    rows = []
    for _ in range(tensors):
        name = cursor.text()
        dimensions = [cursor.number("Q") for _ in range(cursor.number("I"))]
        rows.append(b" ".join([name, *(b"%d" % n for n in [cursor.number("I"), *dimensions])]))
        cursor.number("Q")
    return b"\n".join(rows) + SEPARATOR + struct.pack("<H", keys) + metadata


def stored_names(folder):
    """The lines of all tensors in the files of a folder."""
    rows = []
    for path in sorted(folder.glob("model*.safetensors")):
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        rows += [" ".join(map(str, [name, *entry["shape"]])) for name, entry in header.items()
                 if name != "__metadata__"]
    return "\n".join(rows).encode()


def write(golden, out):
    """Writes inputs of the files in the folder `golden` to `out`."""
    for path in sorted([*golden.glob("families/*/config.json"), *golden.glob("tiny-*/config.json")]):
        name = "-".join(path.parent.relative_to(golden).parts)
        config, names = path.read_bytes(), stored_names(path.parent)
        (out / "config" / name).write_bytes(config + SEPARATOR + names if names else config)
    for path in sorted(golden.glob("gguf/*/*.gguf")):
        if path.parent.name != "tokenizers":
            (out / "gguf_model" / path.stem).write_bytes(gguf_model(path.read_bytes()))
