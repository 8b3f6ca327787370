"""Everything at once, drawn from a seed that the failure prints.

Two phases: everything may fail, and safety must hold after every step; then the faults stop, and a
generation must be published.
"""

from __future__ import annotations

import random

import pytest
from ranks import Ranks, Shell, check_published_is_whole

from coherent_ray.commit.events import HistoryRead
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.log import CommitLog
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage


class World:
    """Ranks, mortal coordinators and a storage that fails, moved by one random generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.storage = MemoryStorage()
        self.shells = [self.shell()]
        self.shells[0].open("0")
        self.attempt, self.number, self.now = 1, 0, 0.0
        self.told: dict[str, set[str]] = {}
        self.new_generation()

    def shell(self) -> Shell:
        """A coordinator; some read back and others do not, as after a change of configuration."""
        return Shell(self.storage, ack_timeout_s=60.0, read_back=self.random.random() < 0.5)

    def new_generation(self) -> None:
        self.number += 1
        self.group = Ranks(number=self.number, attempt=self.attempt, update=10 * self.number)
        self.group.write(self.storage)
        self.waiting: dict[int, tuple[Shell, int]] = {}
        self.heard: dict[int, Fate] = {}

    def step(self) -> None:
        """One thing happens."""
        weights = {
            self.rank_calls: 8,
            self.shell_steps: 12,
            self.shell_dies: 1,
            self.shell_fails: 1,
            self.attempt_opens: 1,
            self.time_passes: 1,
            self.twin_rises: 1,
        }
        (happens,) = self.random.choices(list(weights), list(weights.values()))
        happens()
        self.listen()
        check_published_is_whole(self.storage)

    def rank_calls(self) -> None:
        rank = self.random.randrange(3)
        if rank not in self.heard and rank not in self.waiting:
            shell = self.random.choice(self.shells)
            self.waiting[rank] = (shell, shell.acknowledge(self.group.ack(rank), self.now))

    def shell_steps(self) -> None:
        shell = self.random.choice(self.shells)
        if shell.asked:
            shell.read(self.now)
        elif shell.todo:
            shell.step()

    def shell_fails(self) -> None:
        shell = self.random.choice(self.shells)
        effect = self.random.choice(["refuse", "lose_answer", "full"])
        whole, log = shell.storage, shell.log
        shell.storage = FaultyStorage(self.storage, [Fault(effect, at=self.random.randint(1, 3))])
        shell.log = CommitLog(shell.storage)
        if shell.todo:
            shell.step()
        shell.storage, shell.log = whole, log

    def shell_dies(self) -> None:
        dead = self.random.choice(self.shells)
        if dead.todo and self.random.random() < 0.5:
            dead.step(lose_event=True)
        self.shells.remove(dead)
        self.shells = self.shells or [self.shell()]
        self.waiting = {r: (s, c) for r, (s, c) in self.waiting.items() if s is not dead}

    def twin_rises(self) -> None:
        if len(self.shells) < 3:
            self.shells.append(self.shell())

    def attempt_opens(self) -> None:
        shell = self.random.choice(self.shells)
        # The ranks of the generation in flight know nothing of it, and call on.
        self.attempt = shell.open(str(self.random.random()))

    def time_passes(self) -> None:
        self.now += self.random.choice([1.0, 70.0])
        for shell in self.shells:
            # As the service does: the log is asked before ranks are called missing.
            shell.tell(HistoryRead(shell.log.read()), self.now)
            shell.tick(self.now)

    def listen(self) -> None:
        """Ranks hear their answers; when all have, the next generation begins."""
        for rank, (shell, call) in list(self.waiting.items()):
            if call in shell.answers:
                fate = shell.answers[call]
                if "has not been opened" not in fate.reason:  # a shell that has to read first
                    self.heard[rank] = fate
                    self.told.setdefault(fate.name, set()).add(fate.kind)
                else:
                    shell.tell(HistoryRead(shell.log.read()), self.now)
                del self.waiting[rank]
        if len(self.heard) == 3:
            self.new_generation()

    def calm(self) -> Fate:
        """Faults stop: one coordinator, an attempt of its own, one generation."""
        shell = Shell(self.storage)
        self.attempt = shell.open("calm")
        self.new_generation()
        fates = shell.save(self.group)
        assert len({str(fate) for fate in fates}) == 1
        return fates[0]


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_safety_holds_and_afterwards_it_works(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.step()
    published = {p.name for p in check_published_is_whole(world.storage).publishes}
    for name, kinds in world.told.items():
        if "published" in kinds:
            assert name in published, f"seed {seed}: {name} was answered, and is not in the log"
        if name in published:
            assert "fenced" not in kinds, f"seed {seed}: {name} is published, and was fenced"
    assert world.calm().kind == "published"


def test_the_seeds_reach_every_fate() -> None:
    kinds: set[str] = set()
    for seed in range(30):
        world = World(seed)
        for _ in range(60):
            world.step()
        kinds |= set().union(*world.told.values())
    assert kinds == {"published", "failed", "fenced"}
