"""Model shapes and switches.

One frozen dataclass serves the three families: Qwen3 is the code path, Qwen2 and Llama are switches on it (bias on
q/k/v, no q/k norm, other rope types). The alternative, a class a family, was rejected: the differences are five
booleans.

`ModelConfig.from_hf` reads both dialects of config.json: rope_theta + rope_scaling + torch_dtype (transformers 4) and
rope_parameters + dtype (transformers 5). What would change the maths and is not implemented is a ConfigError that
names the key; it is never ignored. Sizes must be stated. Where Hugging Face's own class defines a default that
published checkpoints rely on, it is used (head_dim: 128 for qwen3, else hidden_size / heads; rms_norm_eps 1e-6;
tie_word_embeddings false; a llama without rope_theta: 10000, said in the notes). A Qwen config without any rope
information is an error: no published one lacks it, so it has been damaged.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from cupyllm.errors import ConfigError, InputError
from cupyllm.files import load_json, read_regular, show_path, why_missing

FAMILIES = ("qwen3", "qwen2", "llama")
PARAMETER_DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MAX_LAYERS = 10_000  # far over any model, and few enough that a list of them costs nothing
_MAX_SIZE = 2**31 - 1
_SHOWN_CHARACTERS = 80  # of a wrong value in a message


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters under Hugging Face's names (rope_parameters / rope_theta + rope_scaling)."""

    theta: float
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: ramp boundaries floored and ceiled


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model. Names are Hugging Face's where it has one. Raises ConfigError when sizes do not fit."""

    family: Literal["qwen3", "qwen2", "llama"]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    qk_norm: bool = True  # qwen3: RMSNorm over head_dim on q and k before rope
    qkv_bias: bool = False  # qwen2: True; qwen3/llama: attention_bias
    o_bias: bool = False  # qwen3/llama: attention_bias
    mlp_bias: bool = False  # llama: mlp_bias
    layer_windows: tuple[int | None, ...] = ()  # per layer: sliding window in tokens (self included), None = full
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # as config.json states; files decide per tensor
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None  # its embedding row gets no gradient, as torch's padding_idx

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _most(name):
                raise _wrong(name, value, f"an integer from 1 to {_most(name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, expected an even number (rope rotates pairs)")
        if self.layer_windows and len(self.layer_windows) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_windows)} entries, expected num_hidden_layers "
                f"({self.num_hidden_layers})"
            )

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any], notes: list[str] | None = None) -> ModelConfig:
        """From a config.json (its path, its directory, or its parsed object).

        One-line remarks a user should see (a default that was assumed, an id that was ignored) are appended to
        `notes`; without a list they are warnings. Raises ConfigError.
        """
        if isinstance(source, Mapping):
            where, raw = "config.json", source
        else:
            where, raw = _read_config(Path(source))
        found: list[str] = []
        try:
            config = _Reader(raw, found).model()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        for note in found:
            if notes is None:
                warnings.warn(f"{where}: {note}", stacklevel=2)
            else:
                notes.append(f"{where}: {note}")
        return config

    def to_hf(self) -> dict[str, Any]:
        """The config.json object (transformers 4's dialect, which 4 and 5 both read)."""
        result: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope.theta,
            "rope_scaling": _rope_scaling(self.rope),
            "torch_dtype": self.dtype,
        }
        result.update({name: getattr(self, name) for name in _SIZES})
        if self.family != "qwen2":
            result["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            result["mlp_bias"] = self.mlp_bias
        else:
            result.update(_window_keys(self))
        if self.eos_token_ids:
            result["eos_token_id"] = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)
        else:
            result["eos_token_id"] = None
        result["bos_token_id"] = self.bos_token_id
        result["pad_token_id"] = self.pad_token_id
        return result

    def with_layers(self, num_layers: int) -> ModelConfig:
        """The first `num_layers` layers. Raises InputError unless 1 <= num_layers <= num_hidden_layers."""
        if type(num_layers) is not int or not 1 <= num_layers <= self.num_hidden_layers:
            raise InputError(f"layers is {num_layers!r}, expected 1 to {self.num_hidden_layers} (what the model has)")
        return replace(self, num_hidden_layers=num_layers, layer_windows=self.layer_windows[:num_layers])

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, self included; None is full attention."""
        return self.layer_windows[layer] if self.layer_windows else None


PUBLISHED_SIZES = ("0.6b", "1.7b", "4b", "8b", "14b", "32b")


def published(size: str) -> ModelConfig:
    """The published Qwen3 of that size (one of PUBLISHED_SIZES). Raises ConfigError."""
    shapes = {
        "0.6b": (1024, 28, 16, 3072, True),
        "1.7b": (2048, 28, 16, 6144, True),
        "4b": (2560, 36, 32, 9728, True),
        "8b": (4096, 36, 32, 12288, False),
        "14b": (5120, 40, 40, 17408, False),
        "32b": (5120, 64, 64, 25600, False),
    }
    if size.lower() not in shapes:
        raise ConfigError(f"size is {size!r}, expected one of {', '.join(PUBLISHED_SIZES)}")
    hidden, layers, heads, ffn, tied = shapes[size.lower()]
    return ModelConfig(
        family="qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=ffn,
        vocab_size=151936,
        rope=RopeConfig(theta=1e6),
        tie_word_embeddings=tied,
        layer_windows=(None,) * layers,
        eos_token_ids=(151645,),
        bos_token_id=151643,
    )


def default_proportions(layers: int) -> ModelConfig:
    """Qwen3-32B's proportions, a thousandth of its bytes: what commands use when no model is named.

    hidden : q width : FFN = 5120 : 8192 : 25600 = 160 : 256 : 800, and 8 query heads a KV head. 320 ids are the 256
    bytes and 64 specials.
    """
    return ModelConfig(
        family="qwen3",
        hidden_size=160,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=800,
        vocab_size=320,
        rope=RopeConfig(theta=1e6),
        layer_windows=(None,) * layers,
    )


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
_DEFAULT_MAX_POSITIONS = {"qwen3": 32768, "qwen2": 32768, "llama": 2048}  # Hugging Face's classes
_LLAMA_DEFAULT_THETA = 10000.0
_MISSING = object()


class _Reader:
    """Reads one config.json object; messages name key, got and expected, `from_hf` puts the file's path before."""

    def __init__(self, raw: Mapping[str, Any], notes: list[str]) -> None:
        self.raw = raw
        self.notes = notes

    def model(self) -> ModelConfig:
        family = self.raw.get("model_type")
        if family not in FAMILIES:
            raise _wrong("model_type", family, f"one of {', '.join(FAMILIES)} (dense models)")
        self._refuse_unsupported()
        sizes = {name: self._integer(name) for name in _SIZES if name in _REQUIRED}
        heads = sizes["num_attention_heads"]
        layers = sizes["num_hidden_layers"]
        kv_default = heads if family == "llama" or "num_key_value_heads" in self.raw else None
        head_default = 128 if family == "qwen3" else self._even_split(sizes["hidden_size"], heads)
        attention_bias = family != "qwen2" and self._boolean("attention_bias", False)
        vocab = sizes["vocab_size"]
        max_positions = self._integer("max_position_embeddings", _DEFAULT_MAX_POSITIONS[family])
        return ModelConfig(
            family=family,
            **sizes,
            num_key_value_heads=self._integer("num_key_value_heads", kv_default),
            head_dim=self._integer("head_dim", head_default),
            max_position_embeddings=max_positions,
            rope=self._rope(family, max_positions),
            rms_norm_eps=self._number("rms_norm_eps", self.raw, 1e-6),
            tie_word_embeddings=self._boolean("tie_word_embeddings", False),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == "llama" and self._boolean("mlp_bias", False),
            layer_windows=self._windows(family, layers),
            dtype=self._dtype(),
            eos_token_ids=self._eos(vocab),
            bos_token_id=self._token("bos_token_id", self.raw.get("bos_token_id"), vocab),
            pad_token_id=self._pad(vocab),
        )

    def _refuse_unsupported(self) -> None:
        act = self.raw.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise _wrong("hidden_act", act, "'silu'")
        if self.raw.get("quantization_config") is not None:
            method = self.raw["quantization_config"]
            method = method.get("quant_method", method) if isinstance(method, dict) else method
            raise _wrong("quantization_config", method, "none: use the unquantized (bf16, fp16 or fp32) checkpoint")
        for key in ("num_experts", "num_local_experts"):
            if self.raw.get(key):
                raise _wrong(key, self.raw[key], "a dense model")
        if self.raw.get("partial_rotary_factor", 1.0) not in (1, None):
            raise _wrong("partial_rotary_factor", self.raw["partial_rotary_factor"], "1.0")
        if self.raw.get("attention_dropout"):
            self.notes.append(f"attention_dropout {self.raw['attention_dropout']} is not applied in training")

    def _rope(self, family: str, max_positions: int) -> RopeConfig:
        scaling, parameters = self.raw.get("rope_scaling"), self.raw.get("rope_parameters")
        if scaling and parameters and scaling != parameters:
            raise _wrong("rope_scaling", scaling, f"to agree with rope_parameters ({parameters!r}) or to be absent")
        key = "rope_parameters" if parameters else "rope_scaling"
        rope = parameters or scaling or {}
        if not isinstance(rope, Mapping):
            raise _wrong(key, rope, "an object")
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise _wrong(key, "one object per layer type", "one for all layers")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise _wrong(f"{key}.rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
        if rope.get("partial_rotary_factor", 1.0) not in (1, None):
            raise _wrong(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
        unknown = sorted(k for k, v in rope.items() if k not in _ROPE_KEYS and v is not None)
        if unknown:
            raise _wrong(f"{key}.{unknown[0]}", rope[unknown[0]], f"only {', '.join(sorted(_ROPE_KEYS))}")
        theta = self._theta(family, key, rope)
        if rope_type == "default":
            return RopeConfig(theta)
        return self._scaled_rope(key, rope, rope_type, theta, max_positions)

    def _theta(self, family: str, key: str, rope: Mapping[str, Any]) -> float:
        """rope_parameters' own theta comes first, then the top-level one, as in transformers."""
        top = self.raw.get("rope_theta")
        inner = rope.get("rope_theta")
        if inner is not None:
            if top is not None and top != inner:
                self.notes.append(f"rope_theta is {top} beside {key}.rope_theta {inner}; the latter is used")
            return self._number("rope_theta", rope)
        if top is not None:
            return self._number("rope_theta", self.raw)
        if family == "llama":
            self.notes.append(f"no rope_theta: the llama family's default {_LLAMA_DEFAULT_THETA:g} is used")
            return _LLAMA_DEFAULT_THETA
        raise _wrong("rope_theta", "nothing", "rope_theta, or rope_parameters with rope_theta inside")

    def _scaled_rope(
        self, key: str, rope: Mapping[str, Any], rope_type: str, theta: float, max_positions: int
    ) -> RopeConfig:
        values: dict[str, Any] = {"theta": theta, "rope_type": rope_type}
        if rope_type in ("llama3", "yarn"):
            outer = self.raw.get("original_max_position_embeddings")
            original = outer if outer is not None else rope.get("original_max_position_embeddings", max_positions)
            if type(original) is not int or not 1 <= original <= _MAX_SIZE:
                raise _wrong(f"{key}.original_max_position_embeddings", original, f"an integer from 1 to {_MAX_SIZE}")
            values["original_max_position_embeddings"] = original
        if rope_type == "yarn" and theta <= 1:
            raise _wrong("rope_theta", theta, "a number > 1 with yarn, which divides by its logarithm")
        if rope_type == "yarn" and rope.get("factor") is None:
            values["factor"] = max_positions / values["original_max_position_embeddings"]
        else:
            values["factor"] = self._scaling("factor", rope, key)
        if values["factor"] < 1:
            raise _wrong(f"{key}.factor", values["factor"], "a number >= 1")
        if rope_type == "llama3":
            low, high = (self._scaling(name, rope, key) for name in ("low_freq_factor", "high_freq_factor"))
            if low >= high:
                raise _wrong(f"{key}.high_freq_factor", high, f"more than low_freq_factor ({low})")
            values.update(low_freq_factor=low, high_freq_factor=high)
        if rope_type == "yarn":
            for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
                # null means the default, and so does 0 except in attention_factor, as in transformers
                if rope.get(name) or (name == "attention_factor" and rope.get(name) is not None):
                    values[name] = self._scaling(name, rope, key)
            truncate = rope.get("truncate", True)
            if not isinstance(truncate, bool):
                raise _wrong(f"{key}.truncate", truncate, "true or false")
            values["truncate"] = truncate
        return RopeConfig(**values)

    def _windows(self, family: str, layers: int) -> tuple[int | None, ...]:
        """Explicit layer_types win over max_window_layers; use_sliding_window decides whether there is a window."""
        types = self.raw.get("layer_types")
        on = family != "llama" and self._boolean("use_sliding_window", False)
        window = self.raw.get("sliding_window", 4096) if on else None
        if window is not None and (type(window) is not int or window < 1):
            raise _wrong("sliding_window", window, "null or an integer >= 1")
        if types is None:
            if window is None:
                return (None,) * layers
            first = self._integer("max_window_layers", 28, least=0)
            return tuple(window if i >= first else None for i in range(layers))
        if not isinstance(types, list) or len(types) != layers:
            got = f"{len(types)} entries" if isinstance(types, list) else types
            raise _wrong("layer_types", got, f"a list of num_hidden_layers ({layers}) entries")
        bad = next((t for t in types if t not in ("full_attention", "sliding_attention")), None)
        if bad is not None:
            raise _wrong("layer_types", bad, "full_attention or sliding_attention")
        if window is None and "sliding_attention" in types:
            got = f"sliding_attention with use_sliding_window {on} and sliding_window {self.raw.get('sliding_window')}"
            raise _wrong("layer_types", got, "use_sliding_window true and a sliding_window, or only full_attention")
        return tuple(window if t == "sliding_attention" else None for t in types)

    def _dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        key = "dtype" if self.raw.get("dtype") is not None else "torch_dtype"
        value = self.raw.get(key)
        if value is None or value == "auto":
            return "float32"  # torch's default; an opened checkpoint says what the files hold
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name not in PARAMETER_DTYPES:
            raise _wrong(key, value, f"one of {', '.join(PARAMETER_DTYPES)}")
        return cast(Literal["float32", "bfloat16", "float16"], name)

    def _eos(self, vocab: int) -> tuple[int, ...]:
        value = self.raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        kept = [self._token("eos_token_id", i, vocab) for i in ids]
        return tuple(i for i in dict.fromkeys(kept) if i is not None)

    def _pad(self, vocab: int) -> int | None:
        """torch's padding_idx counts from the end when negative; some published Llamas say -1."""
        value = self.raw.get("pad_token_id")
        if type(value) is int and -vocab <= value < 0:
            return value + vocab
        return self._token("pad_token_id", value, vocab)

    def _token(self, key: str, value: Any, vocab: int) -> int | None:
        if value is None:
            return None
        if type(value) is not int:
            raise _wrong(key, value, "an integer (eos_token_id: or a list of them) or null")
        if not 0 <= value < vocab:
            self.notes.append(f"{key} {value} is outside the vocabulary of {vocab} and is ignored")
            return None
        return value

    def _integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if type(value) is not int or not least <= value <= _most(key):
            raise _wrong(key, "nothing" if value is None else value, f"an integer from {least} to {_most(key)}")
        return value

    def _number(self, key: str, source: Mapping[str, Any], default: float | None = None, prefix: str = "") -> float:
        value = source.get(key)
        if value is None:
            value = default
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise _wrong(name, "nothing" if value is None else value, "a number > 0")
        return float(value)

    def _scaling(self, name: str, rope: Mapping[str, Any], key: str) -> float:
        """A number with which rope tables are finite; published ones lie within 0.1 and 100."""
        value = self._number(name, rope, prefix=key)
        if not 1e-6 <= value <= 1e6:
            raise _wrong(f"{key}.{name}", value, "a number from 1e-6 to 1e6")
        return value

    def _boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, value, "true or false")
        return value

    @staticmethod
    def _even_split(hidden: int, heads: int) -> int | None:
        return hidden // heads if hidden % heads == 0 else None


_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_ROPE_KEYS = {f.name for f in fields(RopeConfig)} - {"theta"} | {"rope_theta", "type", "partial_rotary_factor"}


def _most(key: str) -> int:
    return MAX_LAYERS if key == "num_hidden_layers" else _MAX_SIZE


def _wrong(key: str, got: Any, expected: str) -> ConfigError:
    shown = got if got == "nothing" else repr(got)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}…"
    return ConfigError(f"{key} is {shown}, expected {expected}")


def _read_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    if path.is_dir():
        path = path / "config.json"
    where = show_path(path)
    try:
        raw = load_json(read_regular(path))
    except FileNotFoundError:
        raise ConfigError(f"{why_missing(path)}; a checkpoint's config.json was expected") from None
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} holds a JSON {type(raw).__name__}, expected an object")
    return where, raw


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.rope_type == "default":
        return None
    result: dict[str, Any] = {"rope_type": rope.rope_type, "factor": rope.factor}
    if rope.rope_type in ("llama3", "yarn"):
        result["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.rope_type == "llama3":
        result.update(low_freq_factor=rope.low_freq_factor, high_freq_factor=rope.high_freq_factor)
    if rope.rope_type == "yarn":
        result.update(beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, truncate=rope.truncate)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, name) is not None:
                result[name] = getattr(rope, name)
    return result


def _window_keys(config: ModelConfig) -> dict[str, Any]:
    windows = config.layer_windows or (None,) * config.num_hidden_layers
    sizes = {w for w in windows if w is not None}
    if len(sizes) > 1:
        raise ConfigError(f"layer_windows has sizes {sorted(sizes)}, config.json can state one sliding_window")
    return {
        "use_sliding_window": bool(sizes),
        "sliding_window": next(iter(sizes), None),
        "max_window_layers": config.num_hidden_layers,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }
