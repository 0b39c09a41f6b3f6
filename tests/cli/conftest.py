"""Running the command line inside the test process, with a cache of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cupyllm import runtime
from cupyllm.backend.base import Backend
from cupyllm.cli import cli as commands
from cupyllm.config import ModelConfig, RopeConfig
from cupyllm.synth import synthesize


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    status: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        """stdout as the one JSON object that it must be."""
        value = json.loads(self.stdout, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
        assert isinstance(value, dict)
        return value

    def refused(self) -> str:
        """The one line of a refusal: exit status 2, nothing on stdout."""
        assert self.status == 2, (self.status, self.stdout, self.stderr)
        assert self.stdout == ""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("cupyllm: error: "), self.stderr
        return lines[0]


Cli = Callable[..., Ran]


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cli(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """cli("forward", "--layers", 2): never a GPU, so that the same holds on every machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    monkeypatch.setattr(runtime, "ask_driver", lambda: (None, []))

    def run(*arguments: object, stdin: str | bytes | None = None) -> Ran:
        result = CliRunner().invoke(commands, [str(argument) for argument in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    yield run


@pytest.fixture
def on_device(cli: Cli, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """The same with --backend auto opening the emulator, or the GPU where there is one."""
    monkeypatch.setattr(backend, "close", lambda: None)  # it is the session's

    def opened(cls: type[runtime.Runtime], name: str) -> runtime.Runtime:
        return cls("cuda", "for a test", backend)

    monkeypatch.setattr(runtime.Runtime, "open", classmethod(opened))
    yield cli


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, every size different."""
    values: dict[str, Any] = {
        "family": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": 300,
        "rope": RopeConfig(theta=1e6),
        "layer_windows": (None, None),
        "max_position_embeddings": 400,
    }
    return ModelConfig(**{**values, **changes})


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A checkpoint of `tiny_config`, without a tokenizer."""
    return synthesize(tiny_config(), tmp_path / "tiny", 0)
