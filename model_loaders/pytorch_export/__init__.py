"""The parts of export_native.py: names of tensors, and the comparison with a running server."""
