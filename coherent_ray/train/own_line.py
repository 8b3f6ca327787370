"""The line of a user's own that an exception came from, which was raised somewhere below it."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import numpy as np
import torch

import coherent_ray
from coherent_ray.errors import CoherentRayError

#: Where lines of code lie that say nothing to a user about an error of his.
_NOT_THE_USERS = tuple(
    f"{Path(str(module.__file__)).parent}{os.sep}" for module in (coherent_ray, torch, np)
)


def in_words(error: BaseException) -> str:
    """Return an exception's type, text and notes, and the user's own line that it came from."""
    words = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    place = own_line(error)
    return f"{words} ({place})" if place else words


def own_line(error: BaseException) -> str:
    """Return the user's own line that a foreign exception came from; empty: there is none."""
    if isinstance(error, CoherentRayError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    return f"in {own[-1].name}, {own[-1].filename}:{own[-1].lineno}" if own else ""
