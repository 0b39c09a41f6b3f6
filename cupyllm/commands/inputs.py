"""Token ids, labels and output files: checked before any weight is read, each refusal one line."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm.config import ModelConfig
from cupyllm.engine import IGNORE_INDEX
from cupyllm.errors import InputError, StorageError
from cupyllm.files import output_file, read_regular, show_path, storage_error, temporary_beside, why_missing
from cupyllm.text import Codec, builtin_ids

DEFAULT_TOKENS = 256  # of the built-in text


def exclusive(**given: object) -> None:
    """Raise InputError when more than one of the options (by name, falsy = not given) was given."""
    names = ["--" + name.replace("_", "-") for name, value in given.items() if value not in (None, False, ())]
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} were given, expected at most one of them; leave out the others")


def token_ids(
    config: ModelConfig, codec: Codec, prompt: str | None, prompt_file: str | None, ids_file: str | None
) -> tuple[np.ndarray, str]:
    """int64 [B,T] from whichever was given (else the built-in text), and a phrase that says what it is."""
    if ids_file is not None:
        ids = load_ids(ids_file, "--ids", config.vocab_size)
        origin = show_path(ids_file)
    elif prompt is None and prompt_file is None:
        ids = builtin_ids(codec, DEFAULT_TOKENS)[None]
        origin = f"built-in text, {codec.description}"
    else:
        option = "--prompt" if prompt is not None else "--prompt-file"
        text = prompt if prompt is not None else _read_text(str(prompt_file))
        if not text:
            raise InputError(f"{option} is empty, expected text of at least one token")
        ids = codec.encode(text)[None]
        if not ids.size:
            raise InputError(f"{option} gives no token, expected at least one; the tokenizer dropped all of it")
        _check_range(ids, option, config.vocab_size)
        origin = f"{option}, {codec.description}"
    limit = max_positions(config)
    if ids.shape[1] > limit:
        raise InputError(
            f"the input has {ids.shape[1]} tokens, the model takes {limit} (max_position_embeddings); shorten it"
        )
    return ids, origin


def max_positions(config: ModelConfig) -> int:
    """Positions that the model is made for; YaRN and llama3 scaling extend their original range by their factor."""
    original = config.rope.original_max_position_embeddings
    scaled = int(original * config.rope.factor) if original and config.rope.rope_type != "default" else 0
    return max(config.max_position_embeddings, scaled)


def load_ids(path: str, option: str, vocab_size: int, *, labels: bool = False) -> np.ndarray:
    """int64 [B,T] from a .npy file of integers [T] or [B,T] in [0, vocab_size); labels may also be -100.

    Raises InputError that names the file, and the position, value and vocabulary of the first id out of range.
    """
    array = _load_npy(path, option)
    if array.dtype.kind not in "iu":
        raise InputError(f"{option} {show_path(path)} holds {array.dtype} values, expected integers")
    if array.ndim not in (1, 2) or array.size == 0:
        raise InputError(
            f"{option} {show_path(path)} has shape {list(array.shape)}, expected [T] or [B,T] with at least one token"
        )
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{option} {show_path(path)} holds {int(array.max())}, expected 0 <= id < {vocab_size}")
    ids = np.atleast_2d(array).astype(np.int64)
    _check_range(ids, f"{option} {show_path(path)}", vocab_size, labels=labels)
    return ids


def check_writable(path: str, option: str) -> None:
    """Raise StorageError unless a file can be created at `path`, or the regular file there replaced, now."""
    try:
        probe = temporary_beside(output_file(path))
    except StorageError as error:
        raise StorageError(f"{option}: {error}") from error
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise storage_error(path, error) from error


def check_not_read(path: str, option: str, read: Iterable[str | Path | None]) -> None:
    """Raise InputError when the output `path` is one of the files that the command reads."""
    for other in read:
        if other is not None and os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other):
            raise InputError(
                f"{option} {show_path(path)} is {show_path(other)}, which this command reads, expected another file; "
                "choose another name"
            )


def save_npy(path: str, array: np.ndarray) -> None:
    """Write `array` to `path` under exactly that name, whole or not at all. Raises StorageError."""
    target = output_file(path)
    temporary = temporary_beside(target)
    try:
        with open(temporary, "wb") as file:
            # numpy.save writes by C's fwrite, whose error carries no errno.
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(np.ascontiguousarray(array).data.cast("B"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_lines(path: str, option: str) -> list[str]:
    """The lines of a UTF-8 file, none of them empty. Raises InputError that names the line.

    A line ends with LF or CRLF; other separators of Unicode are text.
    """
    text = _read_text(path)
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    empty = next((number for number, line in enumerate(lines, 1) if not line), None)
    if not text or empty is not None:
        where = "is empty" if not text else f"has nothing in line {empty}"
        raise InputError(f"{option} {show_path(path)} {where}, expected one prompt a line; remove the line")
    return lines


def save_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path`, whole or not at all. Raises StorageError."""
    target = output_file(path)
    temporary = temporary_beside(target)
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def parent(path: str) -> Path:
    """The directory in which a file called `path` is written."""
    return output_file(path).parent


def _read_text(path: str) -> str:
    if not path:
        raise InputError("--prompt-file: got an empty name, expected a UTF-8 text file; leave it out or name one")
    try:
        return Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"--prompt-file: {why_missing(path)}; give a UTF-8 text file") from None
    except OSError as error:
        raise InputError(f"--prompt-file: cannot read {show_path(path)}: {os.strerror(error.errno or 0)}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"--prompt-file {show_path(path)} is not UTF-8 at byte {error.start}; convert it, or give ids with --ids"
        ) from None


def _load_npy(path: str, option: str) -> np.ndarray:
    remedy = "write it with numpy.save"
    try:
        data = io.BytesIO(read_regular(path))
        if bytes(data.getbuffer()[:2]) == b"PK":
            raise InputError(f"{option} {show_path(path)} is an archive of arrays, expected one .npy array; {remedy}")
        version = np.lib.format.read_magic(data)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise ValueError(f"its version is {version[0]}.{version[1]}, expected 1.0 or 2.0")
        shape, fortran, dtype = read_header[version](data)
        if dtype.hasobject or not dtype.itemsize:
            raise ValueError(f"it holds {dtype} values")
        expected, got = math.prod(shape) * dtype.itemsize, len(data.getbuffer()) - data.tell()
        if expected != got:
            raise ValueError(f"its header says {dtype} {list(shape)}, {expected} bytes, but {got} follow")
    except FileNotFoundError:
        raise InputError(f"{option}: {why_missing(path)}; give a file written by numpy.save") from None
    except IsADirectoryError:
        raise InputError(f"{option} {show_path(path)} is a directory, expected a .npy file") from None
    except OSError as error:
        raise InputError(f"{option}: cannot read {show_path(path)}: {error.strerror}; {remedy}") from None
    except (ValueError, SyntaxError) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split()) or "it is empty"
        raise InputError(f"{option} {show_path(path)} is no .npy file of integers: {reason}; {remedy}") from None
    flat = np.frombuffer(data.getbuffer(), dtype, offset=data.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def _check_range(ids: np.ndarray, what: str, vocab_size: int, *, labels: bool = False) -> None:
    bad = (ids < 0) | (ids >= vocab_size)
    if labels:
        bad &= ids != IGNORE_INDEX
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        also = f" or {IGNORE_INDEX}" if labels else ""
        raise InputError(
            f"{what}: id {int(ids[row, column])} at row {row}, position {column} is out of range, expected 0 <= id < "
            f"{vocab_size}{also}; check that it was encoded for this model"
        )
