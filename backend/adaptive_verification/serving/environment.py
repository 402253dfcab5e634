"""The environment variables that this package reads, and those it sets for the server's processes.

The stages are separate processes that Triton starts: what the launcher wants to tell all of them, other than a model's
own `parameters`, goes through here. Nothing else in the package reads `os.environ`.
"""

from __future__ import annotations

import os
from pathlib import Path

HOME = "ADAPTIVE_VERIFICATION_HOME"
"""Where prepared models and, unless told otherwise, state are kept. Default: `~/.cache/adaptive-verification`."""
STATE_DIRECTORY = "ADAPTIVE_VERIFICATION_STATE_DIRECTORY"
"""Where the estimator keeps what it has learned. Set by the launcher for the stages."""
EVIDENCE_KEY = "ADAPTIVE_VERIFICATION_EVIDENCE_KEY"
"""A random 64-bit number, new at each start, known to the server's own processes only. Set by the launcher."""

CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def home() -> Path:
    """The directory of everything that outlives a server."""
    return Path(os.environ.get(HOME) or "~/.cache/adaptive-verification").expanduser().resolve()


def state_directory() -> Path:
    """The directory of learned state. It need not exist yet."""
    configured = os.environ.get(STATE_DIRECTORY)
    return Path(configured).expanduser().resolve() if configured else home() / "state"


def evidence_key() -> int | None:
    """The server's secret in [1, 2**64), or None in a process that the launcher did not start."""
    value = os.environ.get(EVIDENCE_KEY)
    return int(value) if value else None


def process_variables(threads: int) -> dict[str, str]:
    """Variables for processes that take turns computing on the same cores, and allocate the same sizes in every step.

    The stages work one after another, each with its own OpenMP pool. A pool's idle threads spin for a while in case
    more work comes (libgomp: 300,000 rounds, about a millisecond), on exactly the cores that the next stage needs. So
    they spin only across the gap between two operations of one forward pass, and then sleep.

    Memory that a step gave back stays with the process for the next one. By default large tensors (64 rows of logits
    are 13 MB) go back to the system each time, and every page of the next one is a fault: copying 192 rows took 21 ms
    instead of 3.

    Args:
        threads: OpenMP threads of each stage.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        # what was compiled stays compiled, also where the package's own directory cannot be written
        "NUMBA_CACHE_DIR": str(home() / "compiled"),
        # libgomp, which torch's CPU wheels use: rounds of spinning before an idle thread sleeps. Overrides the policy.
        "GOMP_SPINCOUNT": "10000",
        # LLVM's and Intel's OpenMP, in builds that use them: milliseconds of spinning.
        "KMP_BLOCKTIME": "0",
        # The front tokenizes prompts one by one from several threads; a pool of its own would only compete.
        "TOKENIZERS_PARALLELISM": "false",
        # glibc: take memory from the heap whatever its size, and keep it.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    }


def available_cpus() -> int:
    """Processors this process may use: its affinity, and a container's CPU limit where there is one."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = CGROUP_CPU_LIMIT.read_text().split()
        return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus
