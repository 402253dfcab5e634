"""Finding a server and matching its Python backend, on made-up installations."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from adaptive_verification.errors import SetupError
from adaptive_verification.serving import tritonserver
from adaptive_verification.serving.tritonserver import PYTHON_VERSION, STUB_NAME


def make(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)
    return path


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layout of an NGC container, its server on PATH."""
    root = tmp_path / "opt" / "tritonserver"
    make(root / "bin" / "tritonserver")
    make(root / "backends" / "python" / STUB_NAME, f"\0libpython{PYTHON_VERSION}.so.1.0\0".encode())
    monkeypatch.setenv("PATH", str(root / "bin"))
    return root


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layout of the wheel; no server on PATH."""
    root = tmp_path / "pytriton" / "tritonserver"
    make(root / "bin" / "tritonserver")
    make(root / "backends" / "python" / "libtriton_python.so")
    for version in ("3.8", "3.9", PYTHON_VERSION):
        make(root / "python_backend_stubs" / version / STUB_NAME)
    spec = ModuleSpec("pytriton", None, is_package=True)
    spec.submodule_search_locations = [str(root.parent)]
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.26.4")
    return root


def test_the_containers_server_is_used_as_it_is(container: Path, tmp_path: Path) -> None:
    server = tritonserver.find_tritonserver()
    assert server.executable == container / "bin" / "tritonserver"
    assert tritonserver.prepare_backends(server, tmp_path / "run") == container / "backends"
    assert not (tmp_path / "run").exists()


def test_a_container_for_another_python_is_refused(container: Path) -> None:
    make(container / "backends" / "python" / STUB_NAME, b"\0libpython3.7.so.1.0\0")
    with pytest.raises(SetupError, match=r"runs Python 3\.7, this is 3\.\d+\. .*with python3\.7"):
        tritonserver.find_tritonserver()


def test_a_container_without_the_python_backend_is_refused(container: Path) -> None:
    (container / "backends" / "python" / STUB_NAME).unlink()
    with pytest.raises(SetupError, match="has no Python backend"):
        tritonserver.find_tritonserver()


def test_the_wheels_server_gets_a_backend_directory_with_this_pythons_stub(wheel: Path, tmp_path: Path) -> None:
    server = tritonserver.find_tritonserver()
    backends = tritonserver.prepare_backends(server, tmp_path / "run")
    assert backends == tmp_path / "run"
    stub = (backends / "python" / STUB_NAME).resolve()
    assert stub == wheel / "python_backend_stubs" / PYTHON_VERSION / STUB_NAME
    assert (backends / "python" / "libtriton_python.so").resolve().parent == wheel / "backends" / "python"
    assert (backends / "python" / "adaptive_verification" / "errors.py").is_file()


def test_a_python_without_a_stub_is_refused(wheel: Path) -> None:
    shutil.rmtree(wheel / "python_backend_stubs" / PYTHON_VERSION)
    with pytest.raises(SetupError, match=r"no stub for Python 3\.\d+; it has: 3\.8, 3\.9\."):
        tritonserver.find_tritonserver()


@pytest.mark.usefixtures("wheel")
def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.1.0")
    with pytest.raises(SetupError, match=r"numpy 2\.1\.0 .*pip install 'numpy<2'"):
        tritonserver.find_tritonserver()


@pytest.mark.usefixtures("wheel")
def test_no_server_at_all_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r"pip install 'adaptive-verification\[server\]'"):
        tritonserver.find_tritonserver()


@pytest.mark.parametrize("place", ["libdir", "multiarch", "base_prefix"])
def test_libpython_is_found_where_pythons_put_it(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"LIBDIR": str(tmp_path / "libdir"), "MULTIARCH": "x86_64-linux-gnu"}
    monkeypatch.setattr(sysconfig, "get_config_var", variables.get)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    directory = {
        "libdir": tmp_path / "libdir",
        "multiarch": tmp_path / "libdir" / "x86_64-linux-gnu",
        "base_prefix": tmp_path / "base" / "lib",
    }[place]
    library = make(directory / tritonserver.LIBPYTHON)
    assert tritonserver.find_libpython() == library
    assert [path.name for path in tritonserver.prepare_libraries(library, tmp_path / "lib").iterdir()] == [library.name]


def test_a_missing_libpython_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"LIBDIR": str(tmp_path)}.get)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(SetupError, match=rf"apt-get install libpython{PYTHON_VERSION}"):
        tritonserver.find_libpython()


def test_the_servers_environment_puts_this_interpreter_first(tmp_path: Path) -> None:
    inherited = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda", "OTHER": "kept"}
    variables = tritonserver.server_environment(inherited, tmp_path)
    assert variables["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]
    assert variables["LD_LIBRARY_PATH"].split(os.pathsep) == [str(tmp_path), "/cuda"]
    assert variables["OTHER"] == "kept"
