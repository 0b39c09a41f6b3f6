"""The command line as tests/cli runs it."""

from tests.cli.conftest import cli, shared_cache

__all__ = ["cli", "shared_cache"]
