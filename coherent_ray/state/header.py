"""The header of a shard file: what makes a byte range of the flat state a ``.safetensors`` file.

A tensor that lies whole in the range has its own name, dtype and shape. A tensor that is cut is
there as its part, a 1-D tensor ``name[first:last]`` (items in row-major order), and
``__metadata__`` says what it is a part of. The header follows from layout and range alone, byte for
byte, so a reader knows what it must be. Spaces fill it up to `HEADER_ALIGNMENT`, so that the
tensors' bytes can be written and mapped by pages.

Format of the file: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from coherent_ray import canonical
from coherent_ray.canonical import Json
from coherent_ray.state.layout import FlatState, Piece

HEADER_ALIGNMENT = 4096
_METADATA = "__metadata__"


def header_of(flat: FlatState, start: int, stop: int) -> bytes:
    """Return the file's bytes before the first tensor byte.

    Args:
        flat: The state.
        start: First byte of the range, which no item may reach across.
        stop: The byte after the last.
    """
    entries: dict[str, Json] = {}
    parts: dict[str, Json] = {}
    for piece in flat.pieces(start, stop):
        name = piece.name if piece.whole else part_name(piece)
        if not piece.whole:
            shape = list(piece.shape)
            parts[name] = {"tensor": piece.name, "first_item": piece.first_item, "shape": shape}
        at = piece.start - start
        entries[name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape) if piece.whole else [piece.items],
            "data_offsets": [at, at + piece.nbytes],
        }
    about = {"format": 1, "start": start, "stop": stop, "parts": parts}
    # "format": "pt" is what other readers of such files ask for.
    entries[_METADATA] = {"format": "pt", "coherent_ray": canonical.dump(about).decode("ascii")}
    text = canonical.dump(entries)
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def part_name(piece: Piece) -> str:
    """Return what a part of a tensor is called in a shard."""
    return f"{piece.name}[{piece.first_item}:{piece.first_item + piece.items}]"
