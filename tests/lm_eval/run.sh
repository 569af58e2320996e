#!/bin/sh
# lm_eval and perplexity against the PyTorch reference; see README.md in this folder.
#   MOESERVE_BIN=build/release/moeserve tests/lm_eval/run.sh [MODEL ...]
# PYTHON names the interpreter; default: that of build/lm_eval where it exists, else python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
default=$here/../../build/lm_eval/bin/python
[ -x "$default" ] || default=python3
exec "${PYTHON:-$default}" "$here/run.py" "$@"
