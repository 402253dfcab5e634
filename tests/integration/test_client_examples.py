"""Each example runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adaptive_verification.serving.launcher import RunningServer


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (["http_client.py", "The capital of France is", "--max-tokens", "4"], "http"),
        (["http_client.py", "The capital of France is", "--max-tokens", "4", "--stream"], "http"),
        (["grpc_stream_client.py", "The capital of France is", "Roses are", "--max-tokens", "4"], "grpc"),
        (["step_client.py", "The capital of France is", "Roses are", "--max-tokens", "4"], "grpc"),
    ],
    ids=["http", "http stream", "grpc stream", "step"],
)
def test_an_example_prints_the_models_text(
    server: RunningServer, repository_root: Path, arguments: list[str], url: str
) -> None:
    address = server.http_url if url == "http" else server.grpc_url
    example = repository_root / "client_examples" / arguments[0]
    run = subprocess.run(
        [sys.executable, str(example), *arguments[1:], "--url", address], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout
