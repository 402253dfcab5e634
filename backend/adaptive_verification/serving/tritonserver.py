"""Finds a tritonserver on this machine and makes its Python backend run this interpreter.

Triton runs a Python model in a "stub": a small program that embeds one Python version. Two kinds of server are known:
the one of an NGC container (on PATH, `/opt/tritonserver`), whose stub is of the container's Python, and the one in the
wheel `nvidia-pytriton`, which carries stubs for several versions beside the backend. This module knows nothing of the
models that will be served.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import adaptive_verification
from adaptive_verification.errors import SetupError

STUB_NAME = "triton_python_backend_stub"
CONTAINER_EXECUTABLE = Path("/opt/tritonserver/bin/tritonserver")
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGE = Path(adaptive_verification.__file__).parent
LIBPYTHON = f"libpython{PYTHON_VERSION}.so.1.0"


@dataclass(frozen=True)
class TritonServer:
    """One installation of tritonserver.

    `python_backend` is the directory with `libtriton_python.so`; `stub` the program that runs Python models, which need
    not lie in it.
    """

    executable: Path
    python_backend: Path
    stub: Path

    @property
    def stub_is_in_place(self) -> bool:
        """Whether Triton finds the stub where it looks for it: beside the backend's library."""
        return self.stub.parent == self.python_backend


def find_tritonserver() -> TritonServer:
    """The server of the container we run in, otherwise that of the wheel.

    Raises:
        SetupError: none is installed, or none can run this Python or this numpy.
    """
    on_path = shutil.which("tritonserver") or shutil.which(CONTAINER_EXECUTABLE)
    if on_path:
        return _container_server(Path(on_path).resolve())
    package = importlib.util.find_spec("pytriton")
    if package is None or not package.submodule_search_locations:
        raise SetupError(
            "No tritonserver on PATH, and the package nvidia-pytriton, which carries one, is not installed. "
            "Run: pip install 'adaptive-verification[server]', or start inside an NGC Triton container."
        )
    return _wheel_server(Path(next(iter(package.submodule_search_locations))) / "tritonserver")


def _container_server(executable: Path) -> TritonServer:
    backend = executable.parent.parent / "backends" / "python"
    stub = backend / STUB_NAME
    if not stub.is_file():
        raise SetupError(f"{executable} has no Python backend: {stub} is missing. Use a Triton image that includes it.")
    stub_version = _python_version_of(stub)
    if stub_version not in (PYTHON_VERSION, None):
        raise SetupError(
            f"The Python backend of {executable} runs Python {stub_version}, this is {PYTHON_VERSION}. "
            f"Install and start adaptive-verification with python{stub_version}."
        )
    return TritonServer(executable, backend, stub)


def _wheel_server(root: Path) -> TritonServer:
    stubs = root / "python_backend_stubs"
    stub = stubs / PYTHON_VERSION / STUB_NAME
    if not stub.is_file():
        versions = ", ".join(sorted((path.name for path in stubs.glob("3.*")), key=lambda name: int(name[2:])))
        raise SetupError(f"nvidia-pytriton has no stub for Python {PYTHON_VERSION}; it has: {versions or 'none'}.")
    numpy_version = importlib.metadata.version("numpy")
    if int(numpy_version.split(".")[0]) >= 2:
        raise SetupError(
            f"numpy {numpy_version} is installed, with which this tritonserver hands empty tensors to models. "
            "Run: pip install 'numpy<2'"
        )
    return TritonServer(root / "bin" / "tritonserver", root / "backends" / "python", stub)


def _python_version_of(stub: Path) -> str | None:
    """The Python version whose shared library a stub links; None where it cannot be told."""
    linked = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return linked[1].decode() if linked else None


def find_libpython() -> Path:
    """This interpreter's shared library, which the stub links.

    Raises:
        SetupError: it is not there; Debian packages it separately, and pyenv builds it only on request.
    """
    library_directory = sysconfig.get_config_var("LIBDIR") or ""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    directories = [Path(library_directory), Path(library_directory, multiarch), Path(sys.base_prefix, "lib")]
    for directory in directories:
        if (directory / LIBPYTHON).is_file():
            return directory / LIBPYTHON
    raise SetupError(
        f"{LIBPYTHON} is missing, which Triton's Python backend needs (looked in "
        f"{', '.join(map(str, dict.fromkeys(directories)))}). For Debian's or Ubuntu's own Python: "
        f"apt-get install libpython{PYTHON_VERSION}. For pyenv: reinstall this Python with "
        "PYTHON_CONFIGURE_OPTS=--enable-shared, and make the virtual environment anew."
    )


def prepare_backends(server: TritonServer, directory: Path) -> Path:
    """What to pass as `--backend-directory`: made in `directory` if the stub is not beside the backend's library.

    Symbolic links do: the loader resolves them before it looks for the libraries that the wheel carries.
    """
    if server.stub_is_in_place:
        return server.python_backend.parent
    python_backend = directory / "python"
    python_backend.mkdir(parents=True)
    # The stub finds packages through this directory too, so a checkout that is not installed works as well.
    (python_backend / PACKAGE.name).symlink_to(PACKAGE)
    for path in server.python_backend.iterdir():
        if path.name != "__pycache__":
            (python_backend / path.name).symlink_to(path)
    (python_backend / STUB_NAME).symlink_to(server.stub)
    return directory


def prepare_libraries(libpython: Path, directory: Path) -> Path:
    """A directory for `LD_LIBRARY_PATH` that holds libpython and nothing else.

    Its own directory may hold other libraries (conda's C++ runtime, say) that the server must not pick up.
    """
    directory.mkdir(parents=True)
    (directory / libpython.name).symlink_to(libpython.resolve())
    return directory


def server_environment(inherited: Mapping[str, str], libraries: Path) -> dict[str, str]:
    """Environment in which the server's stubs run this interpreter with the packages that are importable here.

    Args:
        inherited: usually `os.environ`.
        libraries: directory of `prepare_libraries`.
    """
    return {
        **inherited,
        "LD_LIBRARY_PATH": _join(str(libraries), inherited.get("LD_LIBRARY_PATH")),
        # An embedded Python takes the first `python3` on PATH for its own, with that one's virtual environment. The
        # stubs for 3.11 and later ignore PYTHONPATH and the like.
        "PATH": _join(str(Path(sys.executable).parent), inherited.get("PATH")),
        "PYTHONPATH": _join(str(PACKAGE.parent), inherited.get("PYTHONPATH")),
    }


def _join(*paths: str | None) -> str:
    return os.pathsep.join(dict.fromkeys(path for path in paths if path))
