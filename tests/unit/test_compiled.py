"""Where compiled functions are kept."""

from __future__ import annotations

from pathlib import Path

import numba

from adaptive_verification import compiled
from adaptive_verification.sampling import loops
from adaptive_verification.verification import rejection_walk


def test_a_change_of_any_source_is_another_directory(tmp_path: Path) -> None:
    sources = [tmp_path / "one.py", tmp_path / "two.py"]
    for source in sources:
        source.write_text("x = 1")
    directory = compiled._directory_for(sources)
    assert compiled._directory_for(sources) == directory
    sources[1].write_text("x = 2")
    assert compiled._directory_for(sources) != directory


def test_functions_are_kept_by_all_sources_that_compiled_code_comes_from() -> None:
    sources = compiled._sources()
    assert {Path(loops.__file__), Path(rejection_walk.__file__)} <= set(sources)
    assert compiled._directory_for(sources) == numba.config.CACHE_DIR  # type: ignore[attr-defined]  # made at run time
