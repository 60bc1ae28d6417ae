"""The tiny model and the shared server of the server's tests."""

from tests.server.conftest import model_file, preset, server

__all__ = ["model_file", "preset", "server"]
