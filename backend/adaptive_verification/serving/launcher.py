"""Starts tritonserver over a rendered model repository, waits until every model is ready, and stops it cleanly.

    with running_server(ServerOptions(settings={"dtype": "float32"})) as server:
        requests.post(f"{server.http_url}/v2/models/generate/generate", json={"text_input": "..."})

Everything that can be known to be wrong beforehand (settings, ports, libraries, models) is checked before a process
starts. What the server needs only while it runs lies in a temporary directory that goes with it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from adaptive_verification.errors import SetupError
from adaptive_verification.serving import environment, repository, tritonserver
from adaptive_verification.serving.default_pair import resolve_drafter, resolve_model
from adaptive_verification.serving.server_log import failure_reason
from adaptive_verification.serving.server_process import ServerProcess

SHARED_MEMORY = Path("/dev/shm")
STAGE_SHARED_MEMORY_BYTES = 4 << 20
"""Shared memory of each Python model at the start, and by how much it grows. A step of 64 sequences takes well under
1 MB each way; the four models together fit Docker's default of 64 MB."""
STUB_TIMEOUT_S = 120
"""How long a stage's process may take to come up, before it loads its model."""
KILL_GRACE_S = 10.0
"""Beyond the exit timeout, which the server keeps by itself; then everything left is killed."""
POLL_INTERVAL_S = 0.1
ADMIN_HEADER = "adaptive-verification-admin"
RESTRICTED_APIS = ("model-repository", "shared-memory", "trace", "logging")
"""Triton would let any client load code of its own, map shared memory or redirect logs. These need the admin header."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What to serve, and where."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Setting -> value as in `config.pbtxt`, for every model that has the setting."""
    model_settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Model -> setting -> value, for that model alone; goes before `settings`."""
    model_repository: Path | None = None
    """Default: the `model_repository/` of the source checkout."""
    state_directory: Path | None = None
    """Learned state and logs. Default: `environment.state_directory()`."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    http_port: int = 0
    """0, for each of the three: any free port."""
    grpc_port: int = 0
    metrics_port: int = 0
    threads: int | None = None
    """OpenMP threads of each stage. Default: all processors available to this process."""
    start_timeout_s: float = 600.0
    exit_timeout_s: int = 30
    """How long requests in flight and then the unloading of the models may take when the server is told to stop."""
    verbose: bool = False
    """Show the server's whole log on standard error."""


@dataclass(frozen=True)
class RunningServer:
    """A server and where to reach it from this machine."""

    process: ServerProcess
    models: tuple[str, ...]
    address: str
    http_port: int
    grpc_port: int
    metrics_port: int
    log_file: Path
    admin_headers: Mapping[str, str]
    """What an HTTP request must carry to load or unload a model; for gRPC, see `grpc_admin_headers`."""

    @property
    def http_url(self) -> str:
        return f"http://{self.address}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Without a scheme, as tritonclient takes it."""
        return f"{self.address}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.address}:{self.metrics_port}/metrics"

    @property
    def grpc_admin_headers(self) -> dict[str, str]:
        return {f"triton-grpc-protocol-{name}": value for name, value in self.admin_headers.items()}

    def wait(self) -> None:
        """Waits for as long as the server runs.

        Raises:
            SetupError: it ended by itself.
        """
        self.process.wait()
        raise SetupError(f"tritonserver ended by itself ({self.process.describe_end()}). Its log: {self.log_file}")


@contextlib.contextmanager
def running_server(options: ServerOptions) -> Iterator[RunningServer]:
    """A server whose models are all ready; stopped when the context is left.

    Raises:
        SetupError: something is missing here, a port is taken, or a model did not load; the message says why.
        SettingsError: a setting is unknown or its value not allowed.
    """
    source = repository.find_repository(options.model_repository)
    configs = repository.read(source)
    repository.apply_settings(configs, options.settings, options.model_settings)
    triton = tritonserver.find_tritonserver()
    libpython = tritonserver.find_libpython()
    _check_shared_memory(len(configs))
    http_port, grpc_port, metrics_port = _choose_ports(options)
    repository.resolve_models(configs, resolve_model, resolve_drafter)
    state_directory = (options.state_directory or environment.state_directory()).resolve()
    repository.fill_in(configs, "state_directory", str(state_directory))
    log_file = state_directory / "logs" / f"server-{http_port}.log"
    admin_key = secrets.token_hex(16)

    with tempfile.TemporaryDirectory(prefix="adaptive-verification-") as temporary:
        run_directory = Path(temporary)
        repository.write(configs, source, run_directory / "models")
        backends = tritonserver.prepare_backends(triton, run_directory / "backends")
        libraries = tritonserver.prepare_libraries(libpython, run_directory / "lib")
        arguments = {
            "model-repository": run_directory / "models",
            # Explicit control can bring a killed stage back; so, unlike the default mode, `*` must be asked for.
            "model-control-mode": "explicit",
            "load-model": "*",
            # One model after another: the stages time themselves as they load, and must not time each other.
            "model-load-thread-count": 1,
            "disable-auto-complete-config": None,
            "backend-directory": backends,
            "http-address": options.host,
            "http-port": http_port,
            "grpc-address": options.host,
            "grpc-port": grpc_port,
            "metrics-address": options.host,
            "metrics-port": metrics_port,
            "exit-timeout-secs": options.exit_timeout_s,
            "log-verbose": int(options.verbose),
            "http-restricted-api": f"{','.join(RESTRICTED_APIS)}:{ADMIN_HEADER}={admin_key}",
            "grpc-restricted-protocol": f"{','.join(RESTRICTED_APIS)}:{ADMIN_HEADER}={admin_key}",
        }
        python_backend = {
            "shm-default-byte-size": STAGE_SHARED_MEMORY_BYTES,
            "shm-growth-byte-size": STAGE_SHARED_MEMORY_BYTES,
            "shm-region-prefix-name": run_directory.name,
            "stub-timeout-seconds": STUB_TIMEOUT_S,
        }
        variables = {
            **tritonserver.server_environment(os.environ, libraries),
            **environment.process_variables(options.threads or environment.available_cpus()),
            environment.STATE_DIRECTORY: str(state_directory),
            environment.EVIDENCE_KEY: str(1 + secrets.randbelow(2**64 - 1)),
        }
        server = RunningServer(
            process=ServerProcess(
                [
                    str(triton.executable),
                    *(f"--{name}" if value is None else f"--{name}={value}" for name, value in arguments.items()),
                    *(f"--backend-config=python,{name}={value}" for name, value in python_backend.items()),
                ],
                variables,
                log_file,
                verbose=options.verbose,
            ),
            models=tuple(configs),
            address={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            log_file=log_file,
            admin_headers={ADMIN_HEADER: admin_key},
        )
        # Until the models are loaded the server does not listen to a signal, and there is nothing to finish.
        stop_timeout_s = 0.0
        try:
            _wait_until_ready(server, options.start_timeout_s)
            stop_timeout_s = options.exit_timeout_s + KILL_GRACE_S
            yield server
        finally:
            try:
                server.process.stop(stop_timeout_s)
            finally:
                for leftover in SHARED_MEMORY.glob(f"{run_directory.name}*"):
                    leftover.unlink(missing_ok=True)


def _check_shared_memory(num_models: int) -> None:
    needed = num_models * STAGE_SHARED_MEMORY_BYTES
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise SetupError(
            f"{SHARED_MEMORY} has {free >> 20} MB free; {num_models} models need {needed >> 20} MB to start. "
            "In Docker: run with --shm-size=256m. Elsewhere, look for files of servers that were killed."
        )


def _choose_ports(options: ServerOptions) -> list[int]:
    """The HTTP, gRPC and metrics ports, free at this moment.

    Raises:
        SetupError: naming the port that is taken and the option that chooses another.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    ports = []
    with contextlib.ExitStack() as stack:
        for name in ("http_port", "grpc_port", "metrics_port"):
            wanted = getattr(options, name)
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((options.host, wanted))
            except OSError as error:
                option = f"--{name.replace('_', '-')}"
                raise SetupError(
                    f"Cannot listen on port {wanted} of {options.host} ({error.strerror}). "
                    f"Stop what uses it, or choose another with {option}."
                ) from None
            ports.append(listener.getsockname()[1])
    return ports


def _wait_until_ready(server: RunningServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    waiting_for = [f"/v2/models/{model}/ready" for model in server.models] + ["/v2/health/ready"]
    while waiting_for:
        if _answers_ok(server, waiting_for[-1]):
            waiting_for.pop()
            continue
        if server.process.has_ended:
            problem = f"The server did not start ({server.process.describe_end()})"
        elif time.monotonic() > deadline:
            problem = f"The server was not ready after {timeout_s:.0f} s (waiting for {waiting_for[-1]})"
        else:
            time.sleep(POLL_INTERVAL_S)
            continue
        server.process.stop(0.0)  # completes the log
        raise SetupError(f"{problem}:\n{failure_reason(server.log_file.read_text())}\nThe whole log: {server.log_file}")


def _answers_ok(server: RunningServer, path: str) -> bool:
    connection = http.client.HTTPConnection(server.address, server.http_port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
