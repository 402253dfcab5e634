"""The comparison with peers: its table, its protocol, and a peer that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from perf.peers import compare
from perf.peers.compare import OURS, Measurement, Peer, markdown, peer_process

from adaptive_verification.errors import SetupError

BATCH = {"prompts": ["a", "b", "c"], "concurrency": 2, "max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 0}
ECHO = """
from protocol import serve, waves
def generate(batch):
    print("what a library prints is no answer")
    if batch["seed"]:
        raise ValueError("no such seed")
    return sum(len(wave) ** 2 for wave in waves(batch))
def load():
    print("nor what it prints while it loads")
    return generate
serve(load)
"""


def _measurement(peer: str, tokens: int, repeat: int = 0, error: str = "") -> Measurement:
    return Measurement(peer, "greedy", 8, repeat, 8, tokens, 2.0, error)


def test_ours_is_compared_with_the_fastest_peers_median() -> None:
    measurements = [
        *(_measurement(OURS, tokens, repeat) for repeat, tokens in enumerate((300, 100, 200))),
        *(_measurement("vLLM", tokens, repeat) for repeat, tokens in enumerate((80, 90, 1000))),
        _measurement("transformers", 60),
    ]
    lines = markdown(measurements).splitlines()
    assert f"| {OURS} | 100.0 |" in lines
    assert "| vLLM | 45.0 |" in lines
    assert "| **ours / fastest peer** | 2.22 |" in lines


def test_a_peer_that_failed_is_named_with_its_reason() -> None:
    table = markdown([_measurement(OURS, 100), _measurement("vLLM", 0, error="SetupError: no such instruction")])
    assert "| vLLM | - |" in table
    assert "vLLM failed: `SetupError: no such instruction`" in table


def test_no_prompt_is_sent_twice_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", "--requests-per-stream", "2"])
    options = compare.parse_arguments()
    texts = compare.prompts_of_points(options)
    assert {point: len(of_point) for point, of_point in texts.items()} == {
        ("", 0): 2,
        **{(sampling, n): max(4, 2 * n) for sampling in ("greedy", "sampled") for n in (1, 8, 32, 64)},
    }
    monkeypatch.setattr(compare, "prompts", lambda count, *_, **__: [str(i) for i in range(count)])
    numbers = [number for of_point in compare.prompts_of_points(options).values() for number in of_point]
    assert len(set(numbers)) == len(numbers)


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setenv("PYTHONPATH", str(compare.FOLDER))
    (tmp_path / "echo.py").write_text(ECHO)
    return Peer(Path(sys.executable), str(tmp_path / "echo.py"), "mode")


def test_a_peer_serves_batches_in_waves_of_the_concurrency(echo: Peer) -> None:
    with peer_process(echo, "model") as run:
        assert run(BATCH).output_tokens == 2**2 + 1
        assert run({**BATCH, "concurrency": 3}).output_tokens == 3**2
        assert run(BATCH).duration_s < 5


def test_what_a_peer_raises_is_said(echo: Peer) -> None:
    with peer_process(echo, "model") as run:
        with pytest.raises(SetupError, match="ValueError: no such seed"):
            run({**BATCH, "seed": 1})
        assert run(BATCH).output_tokens == 5


def test_a_peer_that_ends_is_said_with_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no such model')")
    broken = Peer(Path(sys.executable), str(tmp_path / "broken.py"), "mode")
    with peer_process(broken, "model") as run, pytest.raises(SetupError, match=r"it ended.*no such model"):
        run(BATCH)


def test_a_missing_environment_is_named() -> None:
    missing = Peer(Path("/nowhere/python"), "run_vllm.py", "plain")
    with pytest.raises(SetupError, match="/nowhere/python is missing"), peer_process(missing, "model"):
        pass
