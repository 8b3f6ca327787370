"""States and generations to test with: small, seeded, with every dtype and every awkward shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from coherent_ray.commit.manifest import (
    DataPosition,
    GenerationHeader,
    Manifest,
    PlanIdentity,
    StateLayout,
)
from coherent_ray.digests import Algorithm, digest_of
from coherent_ray.state.layout import TORCH_DTYPES, layout_of
from coherent_ray.state.shards import write_shard
from coherent_ray.state.snapshot import Snapshot

DIGEST = digest_of(b"nothing")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits: NaNs, infinities and denormals are among them."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for side in shape:
        count *= side
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def every_dtype(shape: tuple[int, ...] = (3, 5)) -> dict[str, torch.Tensor]:
    """Return one tensor of each dtype, and the shapes that go wrong first."""
    result = {
        f"model/{name}": random_tensor(dtype, shape, seed)
        for seed, (name, dtype) in enumerate(TORCH_DTYPES.items())
    }
    result["model/scalar"] = random_tensor(torch.float32, (), 50)
    result["model/empty"] = torch.empty(0, 4)
    result["model/last-and-empty"] = torch.empty(0, dtype=torch.uint8)
    result["model/transposed"] = random_tensor(torch.float32, (7, 9), 51).t()
    result["model/strided"] = random_tensor(torch.bfloat16, (11, 6), 52)[:, ::2]
    return result


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in row-major order, by the slowest way there is."""
    raw = bytearray()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    for item in flat:
        raw += bytes(item.clone().reshape(1).view(torch.uint8).tolist())
    return bytes(raw)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are the same to the bit, NaNs too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for t in (a, b))
    return torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Check that two states are the same to the bit."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert same_bits(tensor, b[name]), name


def save(
    storage,
    tensors: dict[str, torch.Tensor],
    ranks: int,
    block_bytes: int = 4096,
    algorithm: Algorithm = "xxh3_128",
    values: dict | None = None,
    number: int = 1,
    attempt: int | None = None,
    run_id: str = "test",
) -> Manifest:
    """Write a generation as `ranks` ranks would, and return its manifest."""
    layout = layout_of(tensors)
    header = header_for(layout, ranks, values)
    header = replace(header, number=number, attempt=attempt or header.attempt, run_id=run_id)
    shards = []
    for rank in range(ranks):
        snapshot = Snapshot(layout, rank, ranks)
        snapshot.take(tensors)
        directory, memory = header.directory, snapshot.memory
        shards.append(
            write_shard(storage, directory, rank, ranks, layout, memory, algorithm, block_bytes)
        )
    return Manifest(header, DIGEST, tuple(shards))


def header_for(layout: StateLayout, ranks: int, values: dict | None = None) -> GenerationHeader:
    """Return a header that only the layout matters of."""
    return GenerationHeader(
        format=1,
        run_id="test",
        number=1,
        attempt=ranks,
        claim="invariant",
        ranks=ranks,
        position=DataPosition(0, 0, 0),
        plan=PlanIdentity(DIGEST, 10, 0, "feistel-v1", 4, 4, 1),
        layout=layout,
        values=values or {},
        environment={},
        recipe={},
        receipt_tip=DIGEST,
        receipts=None,
    )
