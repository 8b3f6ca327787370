"""A tensor as a row of items: any range of it, in row-major order, in bounded memory.

Parameters need not lie in row-major order (``channels_last``, transposed weights), and no room of
this house may depend on how they lie: stored bytes and fingerprints are those of the logical order.
"""

from __future__ import annotations

import torch

#: Integers by size: what items are moved as, so that every dtype moves alike, bit for bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype that carries a dtype's items."""
    return _CARRIERS[dtype.itemsize]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's items as integers of the same size: a view, except of lazy conjugates."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.view(carrier_of(plain.dtype))


def items_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return items ``[first, last)`` of a tensor in row-major order, as integers of the same size.

    Args:
        tensor: Any device, dtype, shape and strides.
        first: First item.
        last: The item after the last.

    Returns:
        A contiguous 1-D integer tensor: a view where the tensor is contiguous, else a copy.
    """
    bits = bits_of(tensor)
    if bits.is_contiguous():
        # Not view(-1): a single item counts as contiguous whatever its stride, and would keep it.
        return bits.as_strided((last - first,), (1,), bits.storage_offset() + first)
    if last - first == bits.numel():
        # One row, or one dimension, may be a view that still strides.
        return bits.reshape(-1).contiguous()
    return torch.take(bits, torch.arange(first, last, device=bits.device))


def put_items(tensor: torch.Tensor, first: int, bits: torch.Tensor) -> None:
    """Overwrite items of a tensor, in row-major order: the inverse of `items_of`.

    Args:
        tensor: Any device, dtype, shape and strides; changed in place.
        first: The first item to overwrite.
        bits: 1-D, as `items_of` returns them; any device.
    """
    target = tensor.detach().view(carrier_of(tensor.dtype))
    count = bits.numel()
    if target.is_contiguous():
        target.view(-1)[first : first + count].copy_(bits)
    elif count == target.numel():
        target.copy_(bits.view(target.shape))
    else:
        where = torch.arange(first, first + count, device=target.device)
        target.put_(where, bits.to(target.device))


def from_bytes(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return the items of some bytes as a 1-D tensor that shares them.

    Args:
        data: Writable; a whole number of items.
        dtype: Of the result.
    """
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)
