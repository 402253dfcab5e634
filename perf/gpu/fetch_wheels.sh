#!/usr/bin/env bash
# Fetches what a GPU machine without a network lacks beside torch and transformers, for Python 3.12, into perf/gpu/wheels/.
#
#     perf/gpu/fetch_wheels.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
mkdir -p perf/gpu/wheels
platforms=()
for glibc in 17 24 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest perf/gpu/wheels \
    nvidia-pytriton==0.7.0 tritonclient==2.50.0 'numpy<2' 'protobuf<6' grpcio python-rapidjson \
    numba llvmlite pytest pytest-timeout iniconfig pluggy hypothesis sortedcontainers 'scipy<1.15' gguf matplotlib contourpy
du -sh perf/gpu/wheels
