"""A GGUF file to a Hugging Face checkpoint directory: Llama, Qwen2 and Qwen3 models.

Tensors are dequantised, renamed and written one piece of rows at a time, so memory does not grow with the model. What a
GGUF file says in other words than config.json is translated back:

- Llama's q_proj and k_proj. GGUF turns adjacent pairs (2i, 2i+1) in rope, Hugging Face pairs i with i + D/2; its
  converter has reordered the rows of each head, w[h, i, s] -> w[h, 2i + s], for i in 0..D/2-1 and s in {0, 1}. Undone
  here. Qwen's rope pairs halves in both, its rows are as they were.
- Llama 3's rope scaling. GGUF has only its result, one divisor a frequency (rope_freqs.weight). The published
  parameters (low 1, high 4, original context 8192) are tried with the largest divisor as factor, and must give the
  same divisors.
- Tied embeddings: there is no output.weight.

What would change the maths and is not implemented (experts, partial rotation, other families) is an error, as with
config.json. The directory appears whole or not at all.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from cupyllm.config import PARAMETER_DTYPES, ModelConfig, RopeConfig
from cupyllm.convert.gguf_file import GgufFile
from cupyllm.convert.gguf_tokenizer import GgufTokenizer
from cupyllm.errors import CheckpointError, ConfigError, InputError, StorageError
from cupyllm.files import require_space, show_path, staged_directory, write_json
from cupyllm.model import names
from cupyllm.model.checkpoint import INDEX_FILE
from cupyllm.model.tokenizer import TOKENIZER_FILE, Tokenizer
from cupyllm.stream.safetensors import DTYPES, SafetensorsWriter
from cupyllm.synth import DEFAULT_SHARD_BYTES, plan_bytes, shard_plan

FAMILIES = ("llama", "qwen2", "qwen3")  # GGUF's architectures, which have Hugging Face's names
CONVERTER_VERSION = 1  # part of cache keys; raise it when the same file gives another directory

Progress = Callable[[int, int], None]  # (bytes written, bytes in all)

_WHOLE = {"token_embd.weight": names.EMBED, "output_norm.weight": names.FINAL_NORM, "output.weight": names.HEAD}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LLAMA3 = (1.0, 4.0, 8192)  # low_freq_factor, high_freq_factor, original_max_position_embeddings


@dataclass
class Imported:
    """What `import_gguf` wrote. `types` counts tensors by GGUF type; `tokenizer` describes it, None without one."""

    path: Path
    config: ModelConfig
    types: dict[str, int]
    tokenizer: str | None
    has_chat_template: bool = False
    notes: list[str] = field(default_factory=list)


def import_gguf(
    source: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Convert the file `source` into the directory `out_dir`, which must not exist or be empty.

    `dtype` is float32, bfloat16 or float16; None keeps what most of an unquantised file is in and takes bfloat16 for a
    quantised one. Raises CheckpointError (the file), InputError (dtype), StorageError (`out_dir`).
    """
    target = Path(out_dir)
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise StorageError(f"{show_path(target)} exists and is not an empty directory; choose another or remove it")
    with GgufFile(source) as file:
        require_space(target.parent, plan_bytes(gguf_config(file, dtype)[0]))
        try:
            with staged_directory(target) as staging:
                result = write_directory(file, staging, dtype, progress)
        except FileExistsError:
            raise StorageError(f"{show_path(target)} was made by somebody else meanwhile; it was left alone") from None
    result.path = target
    return result


def write_directory(
    file: GgufFile, directory: Path, dtype: str | None = None, progress: Progress | None = None
) -> Imported:
    """Write the checkpoint's files straight into `directory`, without the staging that `import_gguf` adds."""
    config, notes = gguf_config(file, dtype)
    sources = _sources(file, config)
    tokenizer = _write_tokenizer(file, directory, config, notes)
    if tokenizer is not None:
        # Not the padding token: in config.json it means that its embedding gets no gradient, and here it is often eos.
        eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        config = replace(config, eos_token_ids=eos, bos_token_id=tokenizer.bos_id)
    write_json(directory / "config.json", config.to_hf())
    write_json(directory / "generation_config.json", _generation_config(config, tokenizer))
    _write_weights(file, config, sources, directory, progress)
    types = Counter(tensor.type_name for name, tensor in file.tensors.items() if name != _ROPE_FREQS)
    return Imported(
        path=directory,
        config=config,
        types=dict(types.most_common()),
        tokenizer=None if tokenizer is None else tokenizer.description(),
        has_chat_template=tokenizer is not None and "chat_template" in tokenizer.settings(),
        notes=notes,
    )


def gguf_config(file: GgufFile, dtype: str | None = None) -> tuple[ModelConfig, list[str]]:
    """The model in the file, and one-line remarks for the user. Raises CheckpointError, InputError (dtype)."""
    try:
        return _Reader(file).config(dtype)
    except ConfigError as error:
        raise CheckpointError(f"{show_path(file.path)}: {error}") from None


class _Reader:
    """Reads the metadata; messages name the file, the key, what was got and what was expected."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._where = show_path(file.path)
        self._family = file.metadata.get("general.architecture")
        self.notes: list[str] = []

    def config(self, dtype: str | None) -> tuple[ModelConfig, list[str]]:
        if self._family not in FAMILIES:
            raise CheckpointError(
                f"{self._where} is a {self._family!r} model (general.architecture), expected {', '.join(FAMILIES)}"
            )
        self._refuse_unsupported()
        heads = self._integer("attention.head_count")
        hidden = self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden // heads if hidden % heads == 0 else None)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, head_dim) != head_dim:
                raise self._wrong(key, self._get(key), f"{head_dim} (the head size)")
        layers = self._integer("block_count")
        tensors = self._file.tensors
        biased = "blk.0.attn_q.bias" in tensors
        config = ModelConfig(
            family=cast(Literal["qwen3", "qwen2", "llama"], self._family),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=self._integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=self._integer("feed_forward_length"),
            vocab_size=self._vocab_size(),
            rope=self._rope(head_dim),
            rms_norm_eps=self._eps(),
            tie_word_embeddings="output.weight" not in tensors,
            max_position_embeddings=self._integer("context_length"),
            qk_norm=self._family == "qwen3",
            qkv_bias=self._family == "qwen2" or biased,
            o_bias=self._family != "qwen2" and biased,  # one switch in config.json: attention_bias
            mlp_bias=self._family == "llama" and "blk.0.ffn_gate.bias" in tensors,
            layer_windows=(None,) * layers,
            dtype=self._dtype(dtype),
        )
        return config, self.notes

    def _refuse_unsupported(self) -> None:
        for key in ("expert_count", "attention.sliding_window"):
            if self._get(key):
                raise self._wrong(key, self._get(key), "nothing: a dense model with full attention")
        if self._get("attention.causal") is False:
            raise self._wrong("attention.causal", False, "true: a model that generates text")

    def _vocab_size(self) -> int:
        tensor = self._file.tensors.get("token_embd.weight")
        if tensor is None:
            raise CheckpointError(f"{self._where} has no token_embd.weight, expected a whole model; use another file")
        rows = tensor.shape[0]
        tokens = self._file.metadata.get("tokenizer.ggml.tokens", [])
        if len(tokens) > rows:
            raise CheckpointError(f"{self._where} has {len(tokens)} tokens for {rows} embedding rows; it is damaged")
        return rows

    def _rope(self, head_dim: int) -> RopeConfig:
        theta = self._number("rope.freq_base", 10000.0)
        kind = self._get("rope.scaling.type") or "none"
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if _ROPE_FREQS in self._file.tensors:
            return self._llama3(RopeConfig(theta), head_dim)
        if kind == "none" or factor == 1.0:
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, "linear", factor)
        if kind != "yarn":
            raise self._wrong("rope.scaling.type", kind, "none, linear or yarn")
        original = self._integer("rope.scaling.original_context_length")
        return RopeConfig(theta, "yarn", factor, original)

    def _llama3(self, rope: RopeConfig, head_dim: int) -> RopeConfig:
        """The llama3 scaling whose divisors rope_freqs.weight holds (transformers' _compute_llama3_parameters)."""
        stored = np.concatenate([rows for _, rows in self._file.chunks(_ROPE_FREQS)]).reshape(-1).astype(np.float64)
        factor = float(stored.max())
        low, high, original = _LLAMA3
        frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        blend = (original * frequencies / (2 * math.pi) - low) / (high - low)
        divisors = 1 / ((1 - np.clip(blend, 0, 1)) / factor + np.clip(blend, 0, 1))
        # Stored as float32, computed in float32 by the converter: a few eps of 6e-8, and the blend cancels at its ends.
        if stored.shape != divisors.shape or not np.allclose(stored, divisors, rtol=1e-4):
            raise CheckpointError(
                f"{self._where}: {_ROPE_FREQS} is not Llama 3's rope scaling (low 1, high 4, context 8192), expected "
                "that or none"
            )
        if np.allclose(stored, 1):
            return rope
        return replace(
            rope,
            rope_type="llama3",
            factor=round(factor, 4),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )

    def _eps(self) -> float:
        """The number that was meant: the file has it in float32 (1e-05 as 9.999999747378752e-06)."""
        value = self._number("attention.layer_norm_rms_epsilon")
        return float(np.format_float_positional(np.float32(value), unique=True))

    def _dtype(self, dtype: str | None) -> Literal["float32", "bfloat16", "float16"]:
        if dtype is None:
            sizes: Counter[str] = Counter()
            for tensor in self._file.tensors.values():
                sizes[tensor.type_name] += math.prod(tensor.shape)
            dtype = _PLAIN.get(sizes.most_common(1)[0][0], "bfloat16")
        if dtype not in PARAMETER_DTYPES:
            raise InputError(f"dtype is {dtype!r}, expected one of {', '.join(PARAMETER_DTYPES)}")
        return cast(Literal["float32", "bfloat16", "float16"], dtype)

    def _get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self._family}.{key}")

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        value = default if value is None else value
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one number a layer, all alike
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "an integer >= 1")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._wrong(key, value, "a number > 0")
        return float(value)

    def _wrong(self, key: str, got: Any, expected: str) -> CheckpointError:
        shown = "missing" if got is None else f"{got!r:.60}"
        return CheckpointError(f"{self._where}: {self._family}.{key} is {shown}, expected {expected}")


def _sources(file: GgufFile, config: ModelConfig) -> dict[str, str]:
    """Parameter -> the file's tensor, complete and of the right shapes. Raises CheckpointError."""
    where = show_path(file.path)
    shapes = names.model_params(config)
    sources: dict[str, str] = {}
    for tensor in file.tensors.values():
        name = _hf_name(tensor.name)
        if tensor.name == _ROPE_FREQS:
            continue
        if name not in shapes:
            raise CheckpointError(
                f"{where}: tensor {tensor.name!r} is no part of a {config.family} model of {config.num_hidden_layers} "
                "layers; expected another file"
            )
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{where}: tensor {tensor.name!r} has shape {list(tensor.shape)}, expected {list(shapes[name])} by the "
                "metadata; it is damaged"
            )
        sources[name] = tensor.name
    missing = [name for name in shapes if name not in sources]
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} of {len(shapes)} tensors, {missing[0]} first; it is damaged"
        )
    return sources


def _hf_name(name: str) -> str | None:
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match.group(2) not in _IN_LAYER:
        return None
    return f"{names.layer_prefix(int(match.group(1)))}{_IN_LAYER[match.group(2)]}.{match.group(3)}"


def _write_weights(
    file: GgufFile, config: ModelConfig, sources: dict[str, str], directory: Path, progress: Progress | None
) -> None:
    shards = shard_plan(config, DEFAULT_SHARD_BYTES)
    total, done = plan_bytes(config), 0
    stored = next(dtype for dtype in DTYPES.values() if dtype.name == config.dtype)
    for file_name, shapes in shards.items():
        announced = {name: (stored, shape) for name, shape in shapes.items()}
        with SafetensorsWriter(directory / file_name, announced, {"format": "pt"}) as writer:
            for name in shapes:
                done += _write_tensor(file, config, sources[name], name, stored, writer)
                if progress is not None:
                    progress(done, total)
    if len(shards) > 1:
        weight_map = {name: file_name for file_name, shapes in shards.items() for name in shapes}
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_tensor(
    file: GgufFile, config: ModelConfig, source: str, name: str, stored: np.dtype[Any], writer: SafetensorsWriter
) -> int:
    """Dequantise, put rows back in order, round to the stored type; the bytes written."""
    permuted = config.family == "llama" and (".q_proj." in name or ".k_proj." in name)
    at = 0
    for _, rows in file.chunks(source, config.head_dim if permuted else 1):
        if permuted:
            rows = unpermute(rows, config.head_dim)
        with np.errstate(over="ignore"):
            data = rows.astype(stored)
        if not np.isfinite(data.astype(np.float32)).all():
            what = f"overflows {stored.name}" if np.isfinite(rows).all() else "holds inf or NaN"
            raise CheckpointError(
                f"{show_path(file.path)}: tensor {source!r} {what}, expected finite numbers; use --dtype float32 or "
                "another file"
            )
        writer.write_at(name, at, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        at += data.nbytes
    return at


def unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [H*D, N] of whole heads, or one vector [1, H*D], from GGUF's rope order (adjacent pairs) to halves."""
    if rows.shape[0] == 1:
        return unpermute(rows.reshape(-1, 1), head_dim).reshape(1, -1)
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _write_tokenizer(file: GgufFile, directory: Path, config: ModelConfig, notes: list[str]) -> GgufTokenizer | None:
    """tokenizer.json and tokenizer_config.json, read back once; None (noted) where the file has no tokenizer."""
    where = show_path(file.path)
    if file.metadata.get("tokenizer.ggml.model", "no_vocab") in ("no_vocab", "none"):
        notes.append(f"{where} has no tokenizer; the checkpoint takes token ids only")
        return None
    tokenizer = GgufTokenizer(file.metadata, where)
    write_json(directory / TOKENIZER_FILE, tokenizer.tokenizer_json())
    write_json(directory / "tokenizer_config.json", tokenizer.settings())
    try:
        opened = Tokenizer.open(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: its tokenizer cannot be rebuilt: {error}") from None
    assert opened.size <= config.vocab_size
    return tokenizer


def _generation_config(config: ModelConfig, tokenizer: GgufTokenizer | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if tokenizer is not None:
        pairs = (("bos_token_id", tokenizer.bos_id), ("pad_token_id", tokenizer.pad_id))
        result.update({key: number for key, number in pairs if number is not None})
        stop = [number for number in tokenizer.stop_ids() if number < config.vocab_size]
        if stop:
            result["eos_token_id"] = stop
    return result
