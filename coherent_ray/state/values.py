"""State that is no tensor, as JSON that means the same Python value: encoded exactly, or refused.

Schedulers and parameter groups keep numbers, strings, lists and dictionaries, but also infinities,
tuples, Counters and tensors of one item. What JSON cannot say is an object with one key that begins
with ``$``. Nothing is pickled, and nothing is rounded or turned into its text: what has no exact
form here is refused with the place where it stands.

| value | JSON |
|---|---|
| None, bool, str, list, finite float, int of 64 bits | itself |
| dict whose keys are strings without ``$`` | itself (the order of its keys is not kept) |
| other int, other float | ``{"$int": "0x..."}``, ``{"$float": "inf" | "-inf" | "nan"}`` |
| tuple | ``{"$tuple": [...]}`` |
| other dict, Counter | ``{"$dict": [[key, value]...]}``, ``{"$counter": [[key, value]...]}`` |
| NumPy scalar | ``{"$numpy": [dtype, hex]}`` |
| CPU or CUDA tensor up to `MAX_TENSOR_BYTES` | ``{"$tensor": [dtype, shape, hex]}`` |
| torch.dtype | ``{"$dtype": "F32"}`` |
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch

from coherent_ray.canonical import Json
from coherent_ray.commit.manifest import TensorSpec
from coherent_ray.errors import ManifestDamaged, TaskError
from coherent_ray.state.flat import items_of
from coherent_ray.state.layout import TORCH_DTYPES, spec_of

#: Larger tensors belong into the flat state, not into the manifest.
MAX_TENSOR_BYTES = 4096
_MAX_DEPTH = 32
_NUMPY_SCALAR = re.compile(r"[<>|]?[biuf][0-9]{1,2}", re.ASCII)
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def encode(value: object, where: str) -> Json:
    """Return a value's exact JSON form.

    Args:
        value: Any Python value.
        where: The name of its place, for the error: ``scheduler``.

    Raises:
        TaskError: The value, or something in it, has no exact form; names its place and type.
    """
    return _encode(value, where, 0)


def decode(value: Json) -> Any:
    """Return the value of a form made by `encode`. Tensors come back on the CPU.

    Raises:
        ManifestDamaged: `encode` makes no such form.
    """
    try:
        return _decode(value, 0)
    except (
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RuntimeError,
        ValueError,
    ) as error:
        raise ManifestDamaged(
            f"a stored value cannot be read: {str(error)[:200]!a}",
            remedy="Use the version of coherent-ray that wrote it, or an earlier generation.",
        ) from error


def _encode(value: Any, where: str, depth: int) -> Json:
    if depth > _MAX_DEPTH:
        raise _refused(where, value, "is nested too deeply, or holds itself")
    match value:
        case None | bool():
            return value
        case torch.dtype() if value in _NAMES:
            return {"$dtype": _NAMES[value]}
        case torch.Tensor():
            return _encode_tensor(value, where)
        case np.generic() if value.dtype.kind in "biuf":
            return {"$numpy": [value.dtype.str, value.tobytes().hex()]}
        case _ if type(value) in _ENCODERS:
            return _ENCODERS[type(value)](value, where, depth)
    raise _refused(where, value, "has no exact form in JSON")


def _encode_int(value: int, where: str, depth: int) -> Json:
    return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}


def _encode_float(value: float, where: str, depth: int) -> Json:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _encode_text(value: str, where: str, depth: int) -> Json:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _refused(where, value, "is not valid Unicode text") from None
    return value


def _encode_list(value: list[Any] | tuple[Any, ...], where: str, depth: int) -> Json:
    items = [_encode(item, f"{where}.{i}", depth + 1) for i, item in enumerate(value)]
    return items if type(value) is list else {"$tuple": items}


def _encode_dict(value: dict[Hashable, Any], where: str, depth: int) -> Json:
    tag = "$counter" if type(value) is Counter else "$dict"
    if tag == "$dict" and all(type(key) is str and key[:1] != "$" for key in value):
        return {
            _encode_text(str(key), where, depth): _encode(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    pairs = [
        [_encode(key, f"{where}, key {key!r}", depth + 1), _encode(v, f"{where}.{key}", depth + 1)]
        for key, v in value.items()
    ]
    return {tag: pairs}


def _encode_tensor(value: torch.Tensor, where: str) -> Json:
    if type(value) is not torch.Tensor or value.requires_grad:
        raise _refused(where, value, "is a tensor that takes part in training")
    spec = spec_of(where, value)
    if spec.nbytes > MAX_TENSOR_BYTES:
        raise _refused(where, value, f"is a tensor of more than {MAX_TENSOR_BYTES} bytes")
    raw = items_of(value, 0, value.numel()).cpu().numpy().tobytes()
    return {"$tensor": [spec.dtype, list(spec.shape), raw.hex()]}


_ENCODERS: dict[type, Callable[[Any, str, int], Json]] = {
    int: _encode_int,
    float: _encode_float,
    str: _encode_text,
    list: _encode_list,
    tuple: _encode_list,
    dict: _encode_dict,
    Counter: _encode_dict,
}


def _refused(where: str, value: object, why: str) -> TaskError:
    kind = type(value)
    return TaskError(
        f"{where} ({kind.__module__}.{kind.__qualname__}) cannot be stored: it {why}",
        where=where,
        remedy="Keep numbers, strings, lists, tuples and dictionaries there, or leave it out of "
        "state_dict() and rebuild it when the job starts.",
    )


def _decode(value: Json, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:  # a form and what is in it are two levels
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, depth + 1) for key, item in value.items()}
    if len(value) != 1 or tag not in _DECODERS:
        raise ValueError(f"unknown form {tag!r}")
    return _DECODERS[tag](value[tag], depth + 1)


def _decode_float(text: str, depth: int) -> float:
    if text not in {"inf", "-inf", "nan"}:
        raise ValueError(f"unknown float {text!r}")
    return float(text)


def _decode_numpy(form: Json, depth: int) -> Any:
    dtype, raw = form
    if not _NUMPY_SCALAR.fullmatch(dtype):
        raise ValueError(f"unknown NumPy scalar {dtype!r}")
    (scalar,) = np.frombuffer(bytes.fromhex(raw), dtype=np.dtype(dtype))
    return scalar


def _decode_pairs(pairs: Json, depth: int) -> dict[Any, Any]:
    result = {_decode(key, depth): _decode(item, depth) for key, item in pairs}
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _decode_tensor(form: Json, depth: int) -> torch.Tensor:
    name, shape, raw = form
    spec = TensorSpec("value", name, tuple(shape))
    data = bytearray.fromhex(raw)
    if len(data) != spec.nbytes:
        raise ValueError("a tensor has the wrong number of bytes")
    if not data:
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[name])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[name]).view(spec.shape)


_DECODERS: dict[str, Callable[[Json, int], Any]] = {
    "$int": lambda text, _: int(text, 16),
    "$float": _decode_float,
    "$tuple": lambda items, depth: tuple(_decode(item, depth) for item in items),
    "$dict": _decode_pairs,
    "$counter": lambda pairs, depth: Counter(_decode_pairs(pairs, depth)),
    "$numpy": _decode_numpy,
    "$tensor": _decode_tensor,
    "$dtype": lambda name, _: TORCH_DTYPES[name],
}
