"""A study that runs stages by itself starts anew with the server's process variables, once."""

from __future__ import annotations

import os
from typing import Any

import pytest
from perf.as_served import restart_as_served

from adaptive_verification.serving import environment


def test_a_study_is_restarted_with_the_servers_variables_and_then_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda program, arguments, variables: started.append((arguments, variables)))
    monkeypatch.setattr("sys.argv", ["perf/verify.py", "--repeats", "3"])
    restart_as_served()
    ((arguments, variables),) = started
    assert arguments[1:] == ["perf/verify.py", "--repeats", "3"]
    expected: dict[str, Any] = environment.process_variables(environment.available_cpus())
    assert {name: variables[name] for name in expected} == expected

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    restart_as_served()
    assert len(started) == 1
