#!/usr/bin/env bash
# Tests and measures on a machine with one NVIDIA GPU, within ten minutes; without a network.
#
#     perf/gpu/fetch_wheels.sh                 # before, where there is a network: fills perf/gpu/wheels/
#     perf/gpu/run.sh RESULTS [tiny|1b|3b]     # default 1b; tiny is the rehearsal, which a CPU does in some minutes
#
# Needs Python 3.12 with torch and transformers (PYTHON=...). Writes into the folder RESULTS: what machine it was, the
# tests' output, where a step's time goes, and adaptive verification against fixed numbers of drafts. A part that fails
# does not stop the others; the exit status says whether one did.
set -uo pipefail
results=$(realpath -m "${1:?usage: $0 RESULTS [tiny|1b|3b]}")
size=${2:-1b}
cd "$(dirname "$0")/../.."
root=$PWD
mkdir -p "$results"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export ADAPTIVE_VERIFICATION_HOME=${ADAPTIVE_VERIFICATION_HOME:-$work/home}
failed=()

part() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout --signal=INT --kill-after=20 "$seconds" "$@" >"$results/$name.log" 2>&1 || failed+=("$name")
    tail -n 3 "$results/$name.log"
}

# An environment of its own whose packages go before those of the given interpreter, which stay visible behind them.
base=$(command -v "${PYTHON:-python3}")
"$base" -m venv "$work/venv" || exit 1
python=$work/venv/bin/python
"$base" -c 'import site, sysconfig; print("\n".join(dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages()])))' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
if compgen -G "perf/gpu/wheels/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps perf/gpu/wheels/*.whl || exit 1
fi
export PATH=$work/venv/bin:$(dirname "$base"):$PATH PYTHONPATH=$root/backend
device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') || exit 1
{
    "$python" -c 'from perf.provenance import provenance; print(provenance())'
    nvidia-smi 2>/dev/null
} >"$results/machine.txt"

# the same tests as on a CPU, where they touch a model
ADAPTIVE_VERIFICATION_TEST_DEVICE=$device part tests 180 "$python" -m pytest -q -p no:cacheprovider \
    tests/unit/forward tests/unit/generation/test_in_process.py \
    tests/unit/test_lossless.py

pair=$work/pair
part pair 120 "$python" perf/gpu/random_pair.py "$pair" --size "$size"
drafter=$(tail -n 1 "$results/pair.log")
export ADAPTIVE_VERIFICATION_DATA=$pair/prompts
settings=(--set "target=$pair" --set "drafter=$drafter" --set "device=$device" --set lookup_min_match=0)
part step_parts 150 "$python" perf/step_parts.py "${settings[@]}" --num-draft-tokens 0 4 --concurrency 1 16 64 \
    --output "$results/step_parts.md"
part load 270 "$python" perf/load.py "${settings[@]}" --plain-text --samplings sampled --repeats 1 \
    --windows 2 --window-seconds 3 --arms k0 k2 k4 av --concurrency 1 16 64 --max-tokens 32 --learning-tokens 1000 \
    --output "$results/load"
if [ -d "$ADAPTIVE_VERIFICATION_HOME/models/SmolLM2-135M-Instruct" ]; then
    unset ADAPTIVE_VERIFICATION_DATA
    part default_pair 120 "$python" perf/step_parts.py --set "device=$device" --concurrency 1 64 \
        --output "$results/step_parts_default_pair.md"
fi

[ ${#failed[@]} -eq 0 ] || { echo "Failed: ${failed[*]}; see their logs in $results"; exit 1; }
echo "Results: $results"
