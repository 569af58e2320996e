#!/bin/sh
# Compares lm_eval's results and perplexities with the PyTorch reference; see README.md in this
# folder.
#   MOESERVE_BIN=build/release/moeserve tests/lm_eval/run.sh [MODEL ...]
# PYTHON names the interpreter; default: build/lm_eval/bin/python if it exists, else python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
default=$here/../../build/lm_eval/bin/python
[ -x "$default" ] || default=python3
exec "${PYTHON:-$default}" "$here/run.py" "$@"
