"""The tiny model of the server's tests."""

from tests.server.conftest import model_file, preset

__all__ = ["model_file", "preset"]
