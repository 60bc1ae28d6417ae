"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """As in pyproject.toml, or ``unknown`` when run from a folder that is not installed."""
    try:
        return version("reelwright")
    except PackageNotFoundError:
        return "unknown"
