"""Weights alone: of a generation, or of a .safetensors file; verified, and put into a model.

No resume: optimizer, schedule, position and receipts stay behind. What is read is verified before
one byte of it is used: a generation's blocks by the digests that its manifest has, and the manifest
by the commit log's; a file by its own digest. Needs no Ray, no process group and no configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import nn

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.holds import holding
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest
from coherent_ray.commit.references import FORMS, Reference, parse_reference
from coherent_ray.digests import Algorithm, Digest, digest_of
from coherent_ray.errors import ConfigError, NotARun, NotFound, StateMismatch, StorageError
from coherent_ray.state.blocks import FlatReader
from coherent_ray.state.capture import AVERAGE, MODEL, model_tensors, plain
from coherent_ray.state.flat import from_bytes
from coherent_ray.state.layout import TORCH_DTYPES, Piece, describe
from coherent_ray.state.sharded import is_distributed, like
from coherent_ray.storage import StorageOptions, open_storage

#: How the name of a file of weights ends.
SUFFIX = ".safetensors"
#: Before the names of the weights in torch's ``AveragedModel``.
_INNER = "module."
#: Tensors that a message names.
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Weights:
    """Verified tensors, and what they were read from."""

    tensors: dict[str, torch.Tensor]
    """By the model's own names, on the CPU."""
    source: str
    """``RUN-ID@g12-a3``, or the name of the file: no path of this machine."""
    digest: Digest
    """Of the generation's manifest, or of the file."""


def load_weights(
    source: str | Path,
    model: nn.Module | None = None,
    *,
    strict: bool = True,
    skip: Sequence[str] = (),
    averaged: bool = False,
) -> dict[str, torch.Tensor]:
    """Read the weights of a run's generation or of a file, and put them into a model.

    Args:
        source: ``RUN`` (its latest generation), ``RUN@g12``, or a ``.safetensors`` file. A run is
            its root: a directory, or the address of an object store.
        model: Gets them: in place, or in new tensors where it is on the ``meta`` device. Of a model
            that is on it in part, the rest stays where it is. None: only returned.
        strict: Refuse tensors that the model does not have, and tensors of it that are missing.
        skip: Patterns (``head.*``) of names that the model keeps as they are.
        averaged: Take the averaged weights of the generation instead of the trained ones.

    Returns:
        All weights by the model's names, on the CPU, as they are stored.

    Raises:
        NotARun: There is no run at this place.
        NoGeneration: The run has not published it.
        Damage: A byte of it is not what its digest says.
        StateMismatch: They do not fit the model; names the tensors. Nothing was changed.
    """
    weights = read_weights(str(source), averaged=averaged)
    if model is not None:
        put_weights(model, fitted(weights, model, strict=strict, skip=skip))
    return weights.tensors


def read_weights(
    source: str,
    options: StorageOptions | None = None,
    *,
    averaged: bool = False,
    algorithm: Algorithm = "sha256",
) -> Weights:
    """Read and verify weights; see `load_weights`.

    Args:
        source: A run, one of its generations, or a file.
        options: How to talk to an object store; None: as the environment says.
        averaged: Take the averaged weights of a generation.
        algorithm: What a file's digest is made with.

    Raises:
        ConfigError: Nothing that can be read is named.
    """
    if source.endswith(SUFFIX):
        if averaged:
            raise ConfigError("a file has no averaged weights beside others", where=source)
        return _of_file(source, algorithm)
    return _of_generation(source, options, AVERAGE + _INNER if averaged else MODEL)


def fitted(
    weights: Weights, model: nn.Module, *, strict: bool = True, skip: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Return what each tensor of a model takes of some weights; changes nothing.

    Args:
        weights: Of which tied ones may stand under any of their names.
        model: Any device, the ``meta`` device too.
        strict: Refuse what is missing, and what the model does not have.
        skip: Patterns of names that are left alone.

    Raises:
        StateMismatch: They do not fit; names the tensors.
    """
    model = plain(model)
    live, others = dict(model_tensors(model)), _other_names(model)
    given = {others.get(name, name): t for name, t in weights.tensors.items()}

    def counts(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in skip)

    taken = {n: t for n, t in given.items() if n in live and counts(n)}
    wrong = [
        f"{n} (stored is {describe(t)}, the model has {describe(live[n])})"
        for n, t in taken.items()
        if not _fits(t, live[n])
    ]
    problems = {"do not fit": wrong}
    if strict:
        problems["are missing"] = [n for n in live if counts(n) and n not in given]
        problems["are not the model's"] = [n for n in given if counts(n) and n not in live]
    if told := [f"{_listed(sorted(names))} {how}" for how, names in problems.items() if names]:
        raise _misfit(weights, "; ".join(told))
    if not taken:
        raise _misfit(weights, "none of them is the model's")
    return taken


@torch.no_grad()
def put_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put what `fitted` returned into a model.

    Raises:
        StateMismatch: A tensor on the ``meta`` device would stay there. Nothing was changed.
    """
    model = plain(model)
    names = {tensor: name for name, tensor in model_tensors(model)}
    slots: list[dict[str, Any]] = []
    for module in model.modules():
        slots += [module._parameters, module._buffers]
    hollow = [t for slot in slots for t in slot.values() if t is not None and t.is_meta]
    if any(names.get(tensor) not in tensors for tensor in hollow):
        hollow_names = _listed(sorted(_without_memory(model, tensors)))
        raise StateMismatch(
            f"{hollow_names} would stay on the meta device: the weights do not hold it",
            where="model",
            remedy="Make it on a real device; buffers that are not persistent are never stored.",
        )
    for live, name in names.items():
        if name in tensors and not live.is_meta:
            source = tensors[name]
            live.copy_(like(live, source) if is_distributed(live) else source)
    # By tensor, so that what was tied stays tied.
    made = {tensor: _made(tensor, tensors[names[tensor]]) for tensor in hollow}
    for slot in slots:
        for key, tensor in slot.items():
            if tensor in made:
                slot[key] = made[tensor]


def _made(hollow: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    value = source.to(hollow.dtype, copy=True)
    if isinstance(hollow, nn.Parameter):
        return nn.Parameter(value, requires_grad=hollow.requires_grad)
    return value


def _without_memory(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and name not in tensors:
            yield name


def _fits(stored: torch.Tensor, live: torch.Tensor) -> bool:
    # Weights may be kept in another precision than they are trained in.
    kinds = stored.is_floating_point() and live.is_floating_point()
    return stored.shape == live.shape and (kinds or stored.dtype == live.dtype)


def _other_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor that has several, by each of the others."""
    first = {tensor: name for name, tensor in model_tensors(model)}
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first[t] for name, t in every if t in first and first[t] != name}


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _misfit(weights: Weights, what: str) -> StateMismatch:
    return StateMismatch(
        f"the weights of {weights.source} are not those of the model: {what}",
        where=weights.source,
        remedy="Build the model that they are of; `skip` names what it keeps as it is, and "
        "`strict: false` takes what is there.",
    )


# --- reading --------------------------------------------------------------------------------------


def _of_file(source: str, algorithm: Algorithm) -> Weights:
    path = Path(source).expanduser()
    try:
        # In one piece: what is parsed are the bytes that were hashed.
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFound("there is no such file of weights", where=source) from None
    except OSError as error:
        raise StorageError(f"it cannot be read: {error.strerror}", where=source) from error
    digest = digest_of(data, algorithm)
    try:
        return Weights(load_safetensors(data), path.name, digest)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(
            f"it is no whole .safetensors file: {error}",
            where=source,
            remedy="Name a file that safetensors has written.",
        ) from error


def _of_generation(source: str, options: StorageOptions | None, prefix: str) -> Weights:
    reference = _reference(source)
    storage = open_storage(reference.run, options)
    if next(iter(storage.list("log")), None) is None:
        raise NotARun(
            "no run lies here: there is no commit log",
            where=storage.uri,
            remedy=f"Write {FORMS}, or a {SUFFIX} file.",
        )
    log = CommitLog(storage)
    generations = Generations(storage, log)
    publish = generations.find(reference.generation)
    # Held, so that no prune deletes it meanwhile.
    with holding(storage, log, publish):
        manifest = generations.manifest(publish)
        found = _tensors_under(prefix, FlatReader(storage, manifest), manifest)
    if not found:
        raise ConfigError(
            f"{publish.name} has no tensors under {prefix}",
            where=storage.uri,
            remedy="Only a run that tracked an average of its weights has averaged ones.",
        )
    return Weights(found, f"{manifest.header.run_id}@{publish.name}", publish.manifest_digest)


def _reference(source: str) -> Reference:
    """Return which generation of which run is meant; a path that exists is meant as it stands."""
    if "://" not in source and Path(source).expanduser().exists():
        return Reference(source)
    return parse_reference(source)


def _tensors_under(prefix: str, reader: FlatReader, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Read the tensors whose names begin so, without the prefix; neighbours in one piece."""
    found: dict[str, torch.Tensor] = {}
    named = [t.name for t in manifest.header.layout.tensors if t.name.startswith(prefix)]
    for run in _runs([reader.flat.find(name) for name in named]):
        start = run[0].start
        data = reader.read(start, run[-1].start + run[-1].nbytes)
        for piece in run:
            part = data[piece.start - start : piece.start - start + piece.nbytes]
            tensor = from_bytes(part, TORCH_DTYPES[piece.dtype]).view(piece.shape)
            found[piece.name.removeprefix(prefix)] = tensor
    return found


def _runs(pieces: list[Piece]) -> list[list[Piece]]:
    """Return pieces that lie one behind the other together."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and runs[-1][-1].start + runs[-1][-1].nbytes == piece.start:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs
