#!/usr/bin/env python3
"""Makes the packed copies of models and of reference results compress better.

    shrink_data.py results FILE...     rounds the results in files golden.safetensors
    shrink_data.py weights FILE...     rounds the weights in files model.safetensors

Results keep far more digits than the tests compare (1e-4 for f32, 0.05 for bf16). Weights keep their
sign, their exponent and one bit of the mantissa. So the model is another one: it has no reference
results, and serves to compare a device with the CPU.
"""

import array
import json
import pathlib
import sys

# The tensors of results by the ends of their names, and the step to which they are rounded.
STEPS = {"bf16_target_logprobs": 2.0**-10, "target_logprobs": 2.0**-16, "top_logprobs": 2.0**-16,
         "logprobs": 2.0**-16}
UNUSED = {"bf16_top_logprobs"}  # no test reads them
SMALLEST = 4096  # elements of a weight that is rounded


def one_bit(bits):
    """Returns the bits of the bf16 nearest to one that has one bit of mantissa."""
    sign, size = bits & 0x8000, bits & 0x7FFF
    if size >= 0x7F80 - 0x3F:  # infinity, NaN, and what would become infinity
        return bits
    return sign | (size + 0x1F + (size >> 6 & 1)) & ~0x3F


ONE_BIT = [one_bit(bits) for bits in range(1 << 16)]


def smaller_weight(entry, data):
    if entry["dtype"] != "BF16" or len(data) < 2 * SMALLEST:
        return data
    return array.array("H", map(ONE_BIT.__getitem__, array.array("H", data))).tobytes()


def smaller_result(name, entry, data):
    if entry["dtype"] != "F32":
        return data
    if name in UNUSED:
        return bytes(len(data))
    step = STEPS.get(name)
    if step is None:
        return data
    return array.array("f", (round(value / step) * step if abs(value) < 1e30 else value
                             for value in array.array("f", data))).tobytes()


def shrink(path, what):
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        data = bytes(content[begin:end])
        content[begin:end] = (smaller_weight(entry, data) if what == "weights" else
                              smaller_result(name, entry, data))
    path.write_bytes(content)


def main():
    if sys.byteorder != "little" or len(sys.argv) < 3 or sys.argv[1] not in ("results", "weights"):
        sys.exit(__doc__)
    for name in sys.argv[2:]:
        shrink(pathlib.Path(name), sys.argv[1])


if __name__ == "__main__":
    main()
