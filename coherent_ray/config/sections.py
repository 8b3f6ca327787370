"""The sections of a configuration: every setting, what it means, and what contradicts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from coherent_ray.commit.manifest import Claim, RunId
from coherent_ray.config.problems import COUNT, RANGE
from coherent_ray.config.section import Arguments, Factory, Positive, Seconds, Section, Text
from coherent_ray.digests import SHARD_ALGORITHM, Algorithm, Digest
from coherent_ray.storage.options import PART_BYTES, StorageOptions, conflicts

#: Updates between two generations where the user says nothing.
UPDATES_APART = 100


class Run(Section):
    """Where the run's history lies, and what it promises."""

    root: Text
    """Directory of the run, or its address: file://, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or
    az://CONTAINER/PREFIX. Each run has its own. A directory is relative to the current one."""
    run_id: RunId | None = None
    """Name of the run, kept in its history; null: the root's last part."""
    claim: Claim = "invariant"
    """What a resumed run promises. exact: the same bits at the same rank count and environment.
    invariant: the same bits at any rank count up to data.lanes.
    statistical: every example once an epoch, sums may round differently."""


class SigningKey(Section):
    """Where each process finds the key that the run's log is signed with; exactly one of these."""

    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of an environment variable."""
    file: Annotated[str, Field(pattern=r"^/")] | None = None
    """Absolute path of a file, the same on every node."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a key in two places, or in none."""
        if (self.env is None) == (self.file is None):
            yield "env", "give exactly one of env and file"


class Storage(Section):
    """How to talk to the object store that holds the run's root; or to its directory.

    Credentials are taken from the environment of each process, never from here.
    """

    endpoint: Text | None = None
    """Address of the store, https://HOST; null: the vendor's own, or what the environment says
    (AWS_ENDPOINT_URL, GOOGLE_BASE_URL, AZURE_STORAGE_ENDPOINT)."""
    region: Text | None = None
    """Region of an S3 bucket; null: what the environment says (AWS_REGION), or us-east-1."""
    account: Text | None = None
    """Azure's storage account; null: what the environment says (AZURE_STORAGE_ACCOUNT_NAME)."""
    allow_http: bool = False
    """Allow an endpoint without TLS."""
    part_bytes: Annotated[int, Field(ge=5 * 2**20, le=2**30)] = PART_BYTES
    """Bytes of one part of a large object. A shard has 10,000 parts at most."""
    parallel_parts: Annotated[int, Field(ge=1, le=64)] = 4
    """Parts of a shard that are sent at once; a worker holds these and one more in memory."""
    timeout_s: Seconds = 60.0
    """Seconds that one request may take."""
    retries: Annotated[int, Field(ge=0, le=100)] = 8
    """How often a request is sent again, with growing pauses between."""
    direct_io: bool = True
    """Directories only: write shards past the page cache where the file system takes it; false:
    always through the cache."""
    signing_key: SigningKey | None = None
    """Sign the run's log, and refuse what is not signed; null: neither. For directories too."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield an endpoint that could never be used."""
        yield from conflicts(self.endpoint, allow_http=self.allow_http)

    @property
    def options(self) -> StorageOptions:
        """What `coherent_ray.storage.open_storage` takes."""
        place = self.signing_key or SigningKey.model_construct()
        settings = self.model_dump(exclude={"signing_key"})
        return StorageOptions(**settings, key_env=place.env, key_file=place.file)


class Task(Section):
    """What is trained."""

    factory: Factory
    """package.module:Name of a class or function that makes the task."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments for the factory."""
    folder: Text | None = None
    """Where its modules are looked for after the current directory; null: beside this file."""


class Prepare(Section):
    """A function that makes the data's files before the run, where they are not there yet."""

    factory: Factory
    """package.module:Name of a function; it must do nothing where its files exist."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments for the function."""


class InitFrom(Section):
    """The weights that a new run starts from: fine-tuning. Read at its beginning, never again."""

    source: Text
    """RUN (its latest generation) or RUN@GENERATION, RUN being another run's root; or a local
    .safetensors file, the same on every node. A path is relative to the current directory."""
    digest: Digest | None = None
    """Refuse anything else: of the generation's manifest (see show), or of the file (sha256sum)."""
    strict: bool = True
    """Refuse weights that the model does not have, and tensors of it that are missing."""
    skip: list[Text] = Field(default_factory=list)
    """Patterns (head.*) of the model's tensors that keep their initial values."""
    averaged: bool = False
    """Take the averaged weights of the generation; see configure_average of the task protocol."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield an average that a file cannot have."""
        if self.averaged and self.source.endswith(".safetensors"):
            yield "averaged", "is for generations; a file has but its weights"


class Source(Section):
    """The files that hold the examples."""

    format: Literal["parquet", "arrow", "tokens"]
    """parquet or arrow: one example a row. tokens: raw token files, cut into windows."""
    paths: Annotated[list[Text], Field(min_length=1)]
    """Files, in order; relative to the current directory."""
    columns: Annotated[list[Text], Field(min_length=1)] | None = None
    """Columns to read; all where it is not given."""
    window: Positive | None = None
    """Tokens an example; for the format tokens only."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of a stored token, little-endian; for the format tokens only."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield what only the format tokens has, or lacks."""
        if self.columns and len(set(self.columns)) < len(self.columns):
            yield "columns", "names a column twice"
        if self.format == "tokens":
            if self.columns is not None:
                yield "columns", "token files have no columns"
            for name in ("window", "dtype"):
                if getattr(self, name) is None:
                    yield name, "is required for the format tokens"
            return
        for name in ("window", "dtype"):
            if getattr(self, name) is not None:
                yield name, f"is for the format tokens, not for {self.format}"


class Data(Section):
    """Which examples an update takes. Nothing here depends on the number of workers."""

    source: Source
    """The files that hold the examples."""
    prepare: Prepare | None = None
    """A function that makes these files where they are not there yet."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Decides the order of every epoch, dropout and the initial weights."""
    global_batch: Positive
    """Examples an update, over all workers."""
    lanes: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Logical shards of every batch; the most workers that the run can ever use."""
    microbatch: Positive
    """Examples of one forward and backward pass at most."""
    prefetch: Annotated[int, Field(ge=0, le=1_024)] = 2
    """Updates that are read ahead; 0: none."""
    verify: Literal["content", "structure"] = "content"
    """How the data is compared on a resume. content: every byte. structure: names, sizes, rows and
    footers, which misses an edit that keeps them."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield lanes that could never hold an example."""
        if self.lanes > self.global_batch:
            yield (
                "lanes",
                f"{self.lanes} lanes need a global_batch of {self.lanes} or more, not "
                f"{self.global_batch}",
            )


class Training(Section):
    """How long and how the model is trained."""

    updates: Positive | None = None
    """Optimizer steps of the whole run; give this or epochs."""
    epochs: Positive | None = None
    """Passes over the data of the whole run; give this or updates."""
    strategy: Literal["replicated", "fsdp2"] = "replicated"
    """How workers hold the model. replicated: each all of it. fsdp2: each some rows of every
    parameter and of its moments (torch's fully_shard); for the claims exact and statistical."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast precision of forward and backward; fp16 brings a gradient scaler."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the gradient; null: no clipping."""
    clip_value: Annotated[float, Field(gt=0)] | None = None
    """Largest magnitude of each item of the gradient, before clip_norm; null: no clipping."""
    on_nonfinite: Literal["stop", "go_on"] = "stop"
    """What a NaN or an infinity in the loss or the gradient does. stop: the run ends before the
    step, and its latest generation is from before it. go_on: the step is taken, and it is told."""
    threads: Annotated[int, Field(ge=1, le=1_024)] = 1
    """CPU threads of torch in each worker; part of what decides the bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: cuda where cluster.use_gpu is set, else cpu."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a length that is not there, or there twice."""
        if self.updates is None and self.epochs is None:
            yield "updates", "is required, or epochs instead"
        if self.updates is not None and self.epochs is not None:
            yield "epochs", "cannot be given together with updates"
        if self.strategy == "fsdp2" and self.precision == "fp16":
            yield (
                "precision",
                "fp16 needs strategy: replicated: with fsdp2 each worker would scale by the rows "
                "that it has; use bf16",
            )


class Optimizer(Section):
    """AdamW's settings, for tasks that bring no optimizer of their own."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)
    ] = [0.9, 0.999]  # noqa: RUF012 (pydantic copies it)
    """Decay rates of the two moments."""


class Memory(Section):
    """Snapshots that stay in host memory outside the workers; never durable."""

    every_updates: Positive = 1
    """Updates between two snapshots."""
    replicas: Annotated[int, Field(ge=0, le=1)] = 1
    """Copies on another node, where the workers are on several."""


class Checkpoint(Section):
    """When generations are saved, and how they are checked."""

    every: Literal["auto"] | None = None
    """auto: the interval follows from what saves cost and how often the run fails. Or give
    every_updates or every_seconds."""
    every_updates: Positive | None = None
    """Updates between two generations; the last update always makes one. null: 100, unless another
    form is given."""
    every_seconds: Seconds | None = None
    """Seconds between two generations, by rank 0's clock; each begins where an update ends."""
    mtbf_s: Seconds | None = None
    """For every: auto, seconds from one failure to the next, as long as the run's own failures tell
    nothing else. null: a day."""
    on_busy: Literal["wait", "skip"] = "wait"
    """What a save does that is due while one is in flight on any worker. wait: training stands
    still. skip: there is none until the next is due. Saves that end a run, or that are asked for,
    wait in any case."""
    mid_update: bool = False
    """Whether a save that is asked for may happen between two microbatches of an update."""
    digest: Algorithm = SHARD_ALGORITHM
    """Hash of the shards' blocks. xxh3_128 finds damage; blake3 and sha256 find forgery too."""
    block_bytes: Annotated[int, Field(ge=4_096, le=2**30, multiple_of=4_096)] = 4 * 2**20
    """Bytes that share one digest; a multiple of 4096."""
    reuse_generations: Annotated[int, Field(ge=0, le=100_000)] = 64
    """Generations through which a block that does not change is referred to and not written; then
    it is written again. Unless keep is 1, the newest two share nothing. 0: all are whole."""
    verify: Literal["size", "read_back"] = "size"
    """What is checked before a generation is published. size: every shard's size. read_back: every
    byte is read again from the storage, each worker's by the next one."""
    on_damage: Literal["fall_back", "refuse"] = "fall_back"
    """What a resume does where the latest generation is damaged."""
    max_failed_saves: Annotated[int, Field(ge=0)] = 3
    """Failed saves in a row that training survives."""
    ack_timeout_s: Seconds = 300.0
    """Seconds from the first worker's acknowledgement until a save without the others fails; with
    verify: read_back as many again until all have read."""
    storage_timeout_s: Seconds = 300.0
    """Seconds that the storage may owe a save the answer to one call: then the save fails, and
    training goes on."""
    check_replicas_every_updates: Positive | None = None
    """Updates between two comparisons of the workers' whole states; each save makes one anyway, and
    names the first tensor that differs. null: at saves only."""
    on_divergence: Literal["refuse", "heal"] = "refuse"
    """What workers whose states differ do. refuse: the run ends. heal: the workers start again from
    the last good generation."""
    max_divergences: Positive = 3
    """Divergences that heal survives, in one driver's life; the next one ends the run."""
    keep: Positive | None = None
    """Newest whole generations to keep; older ones are deleted behind each publish. null: all."""
    keep_every: Positive | None = None
    """Besides, for ever, the last generation of each so many updates; null: no more."""

    scrub_every_s: Seconds | None = None
    """Seconds within which each published generation is read again, every byte, to find damage
    before a resume does; one at a time, behind the training. null: never."""
    scrub_bytes_per_s: Positive = 64 * 2**20
    """Bytes a second that this reads at most, and none while a generation is being saved."""

    memory: Memory | None = None
    """Keep the newest snapshots in host memory, too, so that a killed worker resumes from the last
    update; takes two more copies of the state, shared out over the workers. null: none."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a second cadence, and settings of what is not there."""
        forms = ("every", "every_updates", "every_seconds")
        given = [form for form in forms if getattr(self, form) is not None]
        for form in given[1:]:
            yield (
                form,
                f"cannot be given together with checkpoint.{given[0]}; one of them decides, and "
                "null takes the other away",
            )
        if self.mtbf_s is not None and self.every is None:
            yield "mtbf_s", "needs checkpoint.every: auto; nothing else asks for it"
        if self.keep_every is not None and self.keep is None:
            yield "keep_every", "needs checkpoint.keep; without it all generations are kept"

    @property
    def updates_apart(self) -> int | None:
        """Updates between two generations; None: a clock decides."""
        if self.every is None and self.every_seconds is None:
            return self.every_updates or UPDATES_APART
        return None


Count = Annotated[int, Field(ge=1, le=65_536)]


class WorkerRange(Section):
    """How few and how many workers: as many run as the cluster has room for."""

    min: Count
    """Fewest; with room for less, the run waits."""
    max: Count
    """Most; data.lanes at most."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a range that holds no number."""
        if self.min > self.max:
            yield "max", f"must be min ({self.min}) or more, not {self.max}"


def _count_or_range(value: object) -> str:
    return RANGE if isinstance(value, dict | WorkerRange) else COUNT


class Cluster(Section):
    """The Ray cluster, and what a failure may cost."""

    workers: Annotated[
        Annotated[Count, Tag(COUNT)] | Annotated[WorkerRange, Tag(RANGE)],
        Discriminator(_count_or_range),
    ] = 1
    """Ray Train workers: the rank count. A number, or {min: 1, max: 4}: it grows and shrinks with
    the cluster, for the claims invariant and statistical."""
    resize_interval_s: Annotated[float, Field(ge=0.1, le=86_400)] = 30.0
    """Seconds between two looks for room for more workers, where they are a range. A group that
    grows saves one more generation and starts again."""
    resources_per_worker: dict[Text, Annotated[float, Field(ge=0)]] = Field(
        default_factory=lambda: {"CPU": 1.0}
    )
    """Ray resources of one worker."""
    use_gpu: bool = False
    """One GPU for each worker."""
    address: Text | None = None
    """Address of a Ray cluster, or auto; null: a local one is started for the run."""
    num_cpus: Positive | None = None
    """CPUs that the local cluster claims to have; null: as many as its workers need at most."""
    max_failures: Annotated[int, Field(ge=-1)] = 100
    """Failures of the workers that the run survives; and, each counted by itself, as many of Ray
    Train's controller and of drivers that had reached Ray. -1: without limit."""
    admission_timeout_s: Seconds = 300.0
    """Seconds until a worker that has not been admitted is named and given up."""
    collective_timeout_s: Seconds = 600.0
    """Seconds until a collective that does not end is given up."""
    quiet_warning_s: Seconds = 60.0
    """Seconds without a finished update, or ten times the usual update where that is longer, after
    which the workers that are behind are named."""
    reconnect_timeout_s: Seconds = 600.0
    """Seconds that a cluster which was lost has to come back; for cluster.address only."""
    health_check_interval_s: Annotated[float, Field(ge=0.05, le=3600)] = 0.2
    """Seconds between Ray's looks at the workers: decides how fast a death is seen."""
    spare_workers: bool = False
    """Keep as many idle worker processes on each node as it has workers, with their imports behind
    them: a group starts again in a fraction of the time, for about 0.5 GB of memory each."""

    @property
    def elastic(self) -> bool:
        """Whether the rank count follows the cluster."""
        return isinstance(self.workers, WorkerRange)

    @property
    def fewest(self) -> int:
        """Workers that the run needs to go on."""
        return self.workers.min if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def most(self) -> int:
        """Workers that the run ever has at once."""
        return self.workers.max if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def num_workers(self) -> int | tuple[int, int]:
        """The workers as Ray's ``ScalingConfig`` takes them."""
        return (self.fewest, self.most) if self.elastic else self.fewest

    @property
    def needs(self) -> dict[str, float]:
        """All that the fewest workers ask of Ray, by its names for resources."""
        return self.needs_of(self.fewest)

    def needs_of(self, workers: int) -> dict[str, float]:
        """Return all that so many workers ask of Ray, by its names for resources."""
        each = dict(self.resources_per_worker)
        if self.use_gpu:
            each.setdefault("GPU", 1.0)
        return {name: amount * workers for name, amount in each.items() if amount > 0}

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield settings of a local cluster that is not started, and GPUs that nobody uses."""
        if self.address is not None and self.num_cpus is not None:
            yield "num_cpus", "is for a local cluster; cluster.address names another"
        gpus = self.resources_per_worker.get("GPU")
        if gpus is not None and (gpus > 0) != self.use_gpu:
            yield (
                "resources_per_worker.GPU",
                f"{gpus:g} contradicts use_gpu: {self.use_gpu}".lower(),
            )
