"""What ranks say of their replicas, tensor by tensor, so that the first that differs can be named.

The state's fingerprint decides whether replicas agree; these only tell where they part. One for
each tensor of each rank would be ranks times tensors: gigabytes at tens of thousands of both. So
all ranks' words together hold about `MOST` of them: where there are more tensors than a rank may
tell of, one print stands for several tensors in a row. How many follows from the numbers of ranks
and tensors alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from coherent_ray.digests import digest_of

#: Prints that all ranks send together: some 80 MB.
MOST = 2**22
#: Prints that each rank may send, however many ranks there are.
_LEAST = 64


def tensors_a_print(tensors: int, ranks: int) -> int:
    """Return how many tensors, in layout order, one print stands for; the last one may have fewer.

    Args:
        tensors: Number of tensors in the state.
        ranks: Number of ranks.
    """
    return max(-(-tensors // max(MOST // ranks, _LEAST)), 1)


def prints_of(hexes: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """Return what one rank sends.

    Args:
        hexes: Fingerprint of each tensor, 16 hex digits, in layout order.
        ranks: Number of ranks.

    Returns:
        As many hex digits each; `hexes` itself where each tensor has its own.
    """
    step = tensors_a_print(len(hexes), ranks)
    if step == 1:
        return hexes
    return tuple(_together(hexes[at : at + step]) for at in range(0, len(hexes), step))


def named(names: Sequence[str], place: int, ranks: int) -> tuple[str, list[str]]:
    """Return which tensors a print stands for: in words to follow "the first that differs is".

    Args:
        names: Of all tensors, in layout order.
        place: Of the print.
        ranks: Number of ranks.

    Returns:
        The words, and the names.
    """
    step = tensors_a_print(len(names), ranks)
    meant = list(names[place * step : (place + 1) * step])
    if len(meant) == 1:
        return repr(meant[0]), meant
    return f"one of the {len(meant)} from {meant[0]!r} to {meant[-1]!r}", meant


def _together(hexes: Sequence[str]) -> str:
    return digest_of("".join(hexes).encode("ascii"), "xxh3_128").partition(":")[2][:16]
