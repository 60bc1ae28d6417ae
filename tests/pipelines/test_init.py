"""The package's public names, and that importing it is cheap."""

import subprocess
import sys

import pytest

import pipelines


def test_import_does_not_load_torch() -> None:
    code = "import pipelines, sys; print('torch' in sys.modules, 'diffusers' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "False"]


@pytest.mark.parametrize("name", pipelines.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    assert getattr(pipelines, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'pipelines' has no attribute 'run_jobs'"):
        pipelines.run_jobs  # noqa: B018
