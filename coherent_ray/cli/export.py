"""``export``: a generation's weights, or all of its state, as one ordinary file."""

from __future__ import annotations

from typing import Any

import click

from coherent_ray import canonical
from coherent_ray.cli.output import count_text, json_option, show_json, show_line, size_text
from coherent_ray.cli.place import place_of, run_argument
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.holds import holding
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest, dump


@click.command()
@run_argument
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--model", "part", flag_value="model", help="The model's weights alone.")
@click.option("--average", "part", flag_value="average", help="Their average, if there is one.")
@json_option
def export(run: str, directory: str, part: str | None, as_json: bool) -> int:
    """Write a generation of RUN into DIR, as other programs read it.

    The latest, or the one that is named. With --model or --average DIR gets model.safetensors, with
    the names that the model has; else state.safetensors with every tensor, and state.json with what
    is no tensor. Every byte is verified on the way. A file has its name once it is whole, and
    nothing is overwritten.
    """
    place = place_of(run)
    storage = place.open_warned()
    log = CommitLog(storage)
    generations = Generations(storage, log)
    publish = generations.find(place.generation or "latest")

    from coherent_ray.state.capture import AVERAGE, MODEL
    from coherent_ray.state.export import export as write
    from coherent_ray.storage.local import LocalStorage

    prefixes = {"model": MODEL, "average": f"{AVERAGE}module."}
    name = "model" if part else "state"
    target = LocalStorage(directory)
    # Held, so that no prune deletes it meanwhile.
    with holding(storage, log, publish):
        manifest = generations.manifest(publish)
        about = {
            "source": f"{manifest.header.run_id}@{publish.name}",
            "manifest": publish.manifest_digest,
        }
        path = f"{name}.safetensors"
        found = write(
            storage, manifest, target, path, prefix=prefixes.get(part or "", ""), about=about
        )
        if part is None:
            target.create("state.json", _values(manifest))
    value: dict[str, Any] = {
        "generation": publish.name,
        "update": publish.update,
        "path": f"{target.uri}/{path}",
        "tensors": found.tensors,
        "size": found.size,
        "digest": found.digest,
    }
    if as_json:
        show_json(value)
    else:
        many = count_text(found.tensors, "tensor")
        show_line(
            f"{publish.name} (update {publish.update:,}): {many}, {size_text(found.size)}, in "
            f"{target.uri}/{path}",
            style="good",
        )
        show_line(f"  {found.digest}", style="faint")
    return 0


def _values(manifest: Manifest) -> bytes:
    """Return what a generation holds that is no tensor: its header, without the layout."""
    header = canonical.load(dump(manifest.header))
    assert isinstance(header, dict)
    return canonical.dump({key: value for key, value in header.items() if key != "layout"})


COMMANDS = (export,)
