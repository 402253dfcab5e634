#!/usr/bin/env bash
# Trains the default target's drafter, on a GPU where there is one. Stopped at any time, the same command goes on.
#
#     perf/drafter/train_default.sh WORK_DIRECTORY MINUTES [HELD_OUT.jsonl ...]
#
# Ten minutes on a data-centre GPU write and train on far more text than two hours on a few CPU cores.
set -euo pipefail
work=${1:?usage: $0 WORK_DIRECTORY MINUTES [HELD_OUT.jsonl ...]}
minutes=${2:?usage: $0 WORK_DIRECTORY MINUTES [HELD_OUT.jsonl ...]}
shift 2
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
rows=$("$python" -c 'import torch; print(512 if torch.cuda.is_available() else 112)')
mkdir -p "$work"
[ -f "$work/prompts.jsonl" ] || "$python" perf/drafter/make_prompts.py --output "$work/prompts.jsonl"
options=(--output "$work/drafter" --work "$work" --minutes "$minutes" --collect-share 0.6 --rows "$rows")
options+=(--prompts "$work/prompts.jsonl" --max-held-out 16 --learning-rate 1e-3)
[ $# -eq 0 ] || options+=(--held-out "$@")
"$python" -m adaptive_verification.serving.cli train-drafter "${options[@]}"
echo "To serve it by default: cp -r $work/drafter/. backend/adaptive_verification/drafters/SmolLM2-135M-Instruct/"
