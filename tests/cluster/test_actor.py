"""The coordinator actor on real Ray: found, waited for, killed, restarted, fenced, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ranks import RUN, Ranks, check_published_is_whole

from coherent_ray.commit.fates import Fate
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import dump, manifest_path
from coherent_ray.commit.read_back import Request, read_back, reply_from_json
from coherent_ray.errors import ClusterError, ConfigError, LogDamaged, NotFound, WrongRun
from coherent_ray.storage import open_storage
from coherent_ray.train import coordinators
from coherent_ray.train.coordinators import answer
from coherent_ray.train.identity import derived

pytestmark = pytest.mark.usefixtures("ray_cluster")

RANKS = Ranks(ranks=3)
ANSWER_S = 30.0


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "run")
    coordinators.stop(RUN)


def acknowledge(handle: Any, group: Ranks, ranks: Any = None) -> list[Any]:
    chosen = range(group.ranks) if ranks is None else ranks
    return [handle.acknowledge.remote(dump(group.ack(rank))) for rank in chosen]


def fates(references: list[Any]) -> list[Fate]:
    return [Fate.from_json(value) for value in ray.get(references, timeout=ANSWER_S)]


def restarted(handle: Any, old_pid: int) -> dict[str, Any]:
    """Wait until another process answers: a killed one may answer once more."""
    deadline = time.monotonic() + ANSWER_S
    while (facts := answer(handle.ping.remote(), ANSWER_S))["pid"] == old_pid:
        assert time.monotonic() < deadline, "the actor was not restarted"
        time.sleep(0.05)
    return facts


def waiting_for(handle: Any, words: str) -> None:
    deadline = time.monotonic() + ANSWER_S
    while words not in str(answer(handle.status.remote())["in_flight"]):
        assert time.monotonic() < deadline, f"never waited for {words}"
        time.sleep(0.02)


def test_a_generation_is_published_and_shown(root: str) -> None:
    storage = open_storage(root)
    handle = coordinators.connect(RUN, root)
    assert answer(handle.open_attempt.remote("first")) == 1
    assert answer(handle.open_attempt.remote("first")) == 1
    RANKS.write(storage)
    assert fates(acknowledge(handle, RANKS)) == [Fate("published", 1, 1, seq=2)] * 3
    assert check_published_is_whole(storage).latest.name == "g1-a1"

    status = answer(handle.status.remote())
    assert (status["run_id"], status["attempt"], status["in_flight"]) == (RUN, 1, {})
    generation = status["generation"]
    assert (generation["name"], generation["update"], generation["seq"]) == ("g1-a1", 10, 2)
    timings = generation["timings"]
    assert set(timings) == {"acknowledged_s", "checked_s", "appended_s", "published_s"}
    assert 0 <= timings["appended_s"] <= timings["published_s"]
    assert status["last_error"] is None
    assert status["degraded"] is None


def test_everybody_finds_the_same_coordinator(root: str) -> None:
    assert coordinators.find(RUN) is None
    handle = coordinators.connect(RUN, root)
    pid = answer(handle.ping.remote())["pid"]
    assert pid != os.getpid()
    assert answer(coordinators.connect(RUN, root).ping.remote())["pid"] == pid
    assert answer(coordinators.find(RUN).ping.remote())["pid"] == pid


def test_another_root_under_the_same_run_id_is_refused(root: str, tmp_path: Path) -> None:
    coordinators.connect(RUN, root)
    with pytest.raises(ClusterError, match="serves") as caught:
        coordinators.connect(RUN, str(tmp_path / "other"))
    assert caught.value.details == {"found": root, "wanted": str(tmp_path / "other")}


def test_other_options_replace_the_coordinator(root: str) -> None:
    first = answer(coordinators.connect(RUN, root, ack_timeout_s=5.0).ping.remote())
    second = answer(coordinators.connect(RUN, root, ack_timeout_s=6.0).ping.remote())
    assert (first["options"]["ack_timeout_s"], second["options"]["ack_timeout_s"]) == (5.0, 6.0)
    assert first["pid"] != second["pid"]


def test_stop_is_for_good(root: str) -> None:
    handle = coordinators.connect(RUN, root)
    answer(handle.ping.remote())
    assert coordinators.stop(RUN)
    assert coordinators.find(RUN) is None
    assert not coordinators.stop(RUN)
    with pytest.raises(ClusterError, match="gone"):
        answer(handle.ping.remote())


def test_stop_is_for_good_even_if_the_actor_is_frozen(root: str) -> None:
    handle = coordinators.connect(RUN, root)
    os.kill(answer(handle.ping.remote())["pid"], signal.SIGSTOP)
    assert coordinators.stop(RUN, timeout_s=2.0)
    assert coordinators.find(RUN) is None


def test_one_that_does_not_start_in_time_is_not_left(root: str) -> None:
    with pytest.raises(ClusterError, match=r"did not answer within 0\.001 s") as caught:
        coordinators.connect(RUN, root, timeout_s=0.001)
    assert caught.value.details == {"may_pass": True}, "the supervisor tries again"
    until = time.monotonic() + 60.0
    while coordinators.find(RUN) is not None:
        assert time.monotonic() < until
    handle = coordinators.connect(RUN, root)
    with pytest.raises(ClusterError, match="did not answer"):
        coordinators.connect(RUN, root, timeout_s=0.0)
    assert answer(handle.ping.remote())["run_id"] == RUN, "one that was there is left alone"


def test_the_command_stops_one_whose_workers_were_never_admitted(
    ray_cluster: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "run")
    answer(coordinators.connect(derived(root), root).ping.remote())
    words = [sys.executable, "-m", "coherent_ray", "stop", root, "--address", ray_cluster]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, "has ended" in done.stdout) == (0, True), done.stderr
    assert coordinators.find(derived(root)) is None


def test_stop_answers_those_who_wait(root: str) -> None:
    handle = coordinators.connect(RUN, root)
    answer(handle.open_attempt.remote("first"))
    calls = acknowledge(handle, RANKS, ranks=[0, 1])
    waiting_for(handle, "rank 2")
    begun = time.monotonic()
    assert coordinators.stop(RUN)
    assert time.monotonic() - begun < 10.0
    assert {fate.reason for fate in fates(calls)} == {"the coordinator was stopped"}


@pytest.mark.parametrize("killer", ["ray", "operating system"])
def test_killed_before_publish_the_same_generation_completes(root: str, killer: str) -> None:
    storage = open_storage(root)
    answer(coordinators.connect(RUN, root).open_attempt.remote("first"))
    handle = coordinators.find(RUN)  # as a worker gets it
    assert handle is not None
    RANKS.write(storage)
    calls = acknowledge(handle, RANKS, ranks=[0, 1])
    waiting_for(handle, "rank 2")
    pid = answer(handle.ping.remote())["pid"]
    if killer == "ray":
        ray.kill(handle, no_restart=False)
    else:
        os.kill(pid, signal.SIGKILL)
    assert restarted(handle, pid)["attempt"] == 1
    calls += acknowledge(handle, RANKS, ranks=[2])
    assert fates(calls) == [Fate("published", 1, 1, seq=2)] * 3
    assert [p.name for p in check_published_is_whole(storage).publishes] == ["g1-a1"]


def test_killed_again_and_again_it_completes_every_generation(root: str) -> None:
    storage = open_storage(root)
    handle = coordinators.connect(RUN, root)
    answer(handle.open_attempt.remote("first"))
    for number in (1, 2, 3):
        group = Ranks(number=number, update=10 * number)
        group.write(storage)
        pid = answer(handle.ping.remote())["pid"]
        calls = acknowledge(handle, group)
        ray.kill(handle, no_restart=False)
        assert {fate.kind for fate in fates(calls)} == {"published"}
        restarted(handle, pid)
    history = check_published_is_whole(storage)
    assert [p.number for p in history.publishes] == [1, 2, 3]
    assert answer(handle.status.remote())["generation"]["name"] == "g3-a1"


def test_killed_right_after_publish_the_generation_is_published(root: str) -> None:
    """The record is in the log, and no rank has heard: the window between steps 5 and 6."""
    storage = open_storage(root)
    handle = coordinators.connect(RUN, root)
    answer(handle.open_attempt.remote("first"))
    RANKS.write(storage)
    fates(acknowledge(handle, RANKS))
    pid = answer(handle.ping.remote())["pid"]
    ray.kill(handle, no_restart=False)
    facts = restarted(handle, pid)
    assert facts["degraded"] is None
    status = answer(handle.status.remote())
    assert status["generation"]["name"] == "g1-a1"
    # One rank alone is answered: the log knows, no other rank is needed.
    assert fates(acknowledge(handle, RANKS, ranks=[1])) == [Fate("published", 1, 1, seq=2)]
    assert len(check_published_is_whole(storage).publishes) == 1


def test_killed_while_ranks_read_back_the_same_generation_completes(root: str) -> None:
    """It forgets all acknowledgements; the word of a rank that has read holds its own."""
    storage = open_storage(root)
    handle = coordinators.connect(RUN, root, read_back=True)
    answer(handle.open_attempt.remote("first"))
    RANKS.write(storage)
    asked = map(reply_from_json, ray.get(acknowledge(handle, RANKS), timeout=ANSWER_S))
    shards = [reply.shard for reply in asked if isinstance(reply, Request)]
    assert [shard.rank for shard in shards] == [2, 0, 1]
    read = [read_back(storage, RANKS.header, shard) for shard in shards]
    words = [dump(RANKS.ack(rank, read_back=read[rank])) for rank in range(3)]
    first = handle.acknowledge.remote(words[0])
    waiting_for(handle, "the read-back by ranks 1 and 2")
    pid = answer(handle.ping.remote())["pid"]
    os.kill(pid, signal.SIGKILL)
    restarted(handle, pid)
    others = [handle.acknowledge.remote(word) for word in words[1:]]
    assert fates([first, *others]) == [Fate("published", 1, 1, seq=2)] * 3
    assert check_published_is_whole(storage).latest.name == "g1-a1"


def test_the_older_of_two_coordinators_is_fenced_by_the_log(root: str) -> None:
    """Ray believes in one actor a name; the storage must not depend on that."""
    storage = open_storage(root)
    handle = coordinators.connect(RUN, root, ack_timeout_s=1.0)
    answer(handle.open_attempt.remote("first"))
    RANKS.write(storage)
    rival = (
        ray.remote(coordinators.CoordinatorActor)
        .options(num_cpus=0)
        .remote(RUN, root, ack_timeout_s=60.0, read_back=False)
    )
    assert answer(rival.open_attempt.remote("second")) == 2

    older = fates(acknowledge(handle, RANKS))
    assert {fate.kind for fate in older} == {"fenced"}
    assert older[0].reason == "attempt 1 is over: attempt 2 has opened"
    assert not storage_publishes(root)

    newer = Ranks(attempt=2)
    newer.write(storage)
    assert {fate.kind for fate in fates(acknowledge(rival, newer))} == {"published"}
    # The older one learned of attempt 2 when it was fenced. Before it says that ranks are missing,
    # it asks the log.
    assert fates(acknowledge(handle, newer, ranks=[0])) == [Fate("published", 1, 2, seq=3)]
    ray.kill(rival)


def storage_publishes(root: str) -> list[str]:
    return [publish.name for publish in CommitLog(open_storage(root)).read().publishes]


def test_an_attempt_that_was_opened_elsewhere_is_looked_up(root: str) -> None:
    storage = open_storage(root)
    handle = coordinators.connect(RUN, root)
    answer(handle.ping.remote())
    CommitLog(storage).open_attempt(RUN, "by-hand")
    RANKS.write(storage)
    assert {fate.kind for fate in fates(acknowledge(handle, RANKS))} == {"published"}


def test_a_time_out_names_the_missing_rank(root: str) -> None:
    handle = coordinators.connect(RUN, root, ack_timeout_s=0.3)
    answer(handle.open_attempt.remote("first"))
    for fate in fates(acknowledge(handle, RANKS, ranks=[0, 2])):
        assert (fate.kind, fate.details) == ("failed", {"missing": [1]})
    assert "rank 1 did not acknowledge" in answer(handle.status.remote())["last_error"]


def test_a_shard_that_is_not_there_fails_the_generation(root: str) -> None:
    storage = open_storage(root)
    handle = coordinators.connect(RUN, root)
    answer(handle.open_attempt.remote("first"))
    RANKS.write(storage)
    storage.delete(RANKS.shard(1).path)
    for fate in fates(acknowledge(handle, RANKS)):
        assert fate.kind == "failed"
        assert "of rank 1 is missing" in fate.reason
    with pytest.raises(NotFound):
        storage.read(manifest_path(1, 1))


def test_a_damaged_acknowledgement_is_answered(root: str) -> None:
    handle = coordinators.connect(RUN, root)
    (fate,) = fates([handle.acknowledge.remote(b'{"rank": 1}')])
    assert fate.kind == "failed"
    assert "the acknowledgement is damaged" in fate.reason


def test_wishes_reach_the_ranks_through_their_words(root: str) -> None:
    handle = coordinators.connect(RUN, root)
    answer(handle.open_attempt.remote("first"))

    def report(update: int) -> str:
        return answer(handle.report.remote({"update": update}))["wish"]

    def stand(attempt: int = 1) -> dict[str, Any]:
        return answer(handle.stand.remote(attempt, 1, 2, [1, "task", "no-such-node"]))

    assert report(1) == "none"
    answer(handle.request.remote("save", 7))
    answer(handle.request.remote("save", 7))
    assert [report(2), report(3)] == ["save", "save"], "it stands until the ranks have voted it"
    assert stand() == {"wish": "save", "token": 7}
    assert stand(attempt=0)["wish"] == "none"
    told = {"update": 3, "settled": [7]}
    assert answer(handle.report.remote(told))["wish"] == "none"
    assert stand()["wish"] == "none"
    answer(handle.leave.remote(1, 1, "SIGTERM"))
    assert (report(4), stand()["wish"]) == ("leave", "leave")
    answer(handle.left.remote(1, "g1-a1"))
    leave = answer(handle.status.remote())["leave"]
    assert (leave["ranks"], leave["why"], leave["left"]) == ([1], "SIGTERM", "g1-a1")
    answer(handle.request.remote("stop"))
    answer(handle.request.remote("save"))
    assert [report(4), report(5)] == ["stop", "stop"]
    assert answer(handle.status.remote())["progress"] == {"update": 5}
    answer(handle.open_attempt.remote("first"))
    assert report(6) == "stop", "a repeated call must not clear a wish"
    answer(handle.open_attempt.remote("second"))
    assert report(7) == "none"
    with pytest.raises(ConfigError, match="no wish"):
        answer(handle.request.remote("dance"))


def test_a_root_that_cannot_be_read_degrades_and_heals(root: str) -> None:
    log = Path(root) / "log"
    log.mkdir(parents=True)
    record = log / f"{1:020d}.json"
    record.write_bytes(b"torn")
    handle = coordinators.connect(RUN, root)
    facts = answer(handle.ping.remote())
    assert "damaged" in facts["degraded"]
    assert facts["attempt"] == 0
    (fate,) = fates(acknowledge(handle, RANKS, ranks=[0]))
    assert fate.kind == "failed"
    assert record.name in fate.reason
    with pytest.raises(LogDamaged):
        answer(handle.open_attempt.remote("first"))
    assert "damaged" in answer(handle.status.remote())["degraded"]

    record.unlink()
    deadline = time.monotonic() + ANSWER_S
    while answer(handle.ping.remote())["degraded"]:
        assert time.monotonic() < deadline, "it never healed"
        time.sleep(0.1)
    assert answer(handle.open_attempt.remote("first")) == 1


def test_another_run_s_root_is_refused_in_every_answer(root: str) -> None:
    CommitLog(open_storage(root)).open_attempt("another-run", "theirs")
    handle = coordinators.connect(RUN, root)
    assert "another-run" in answer(handle.ping.remote())["degraded"]
    with pytest.raises(WrongRun, match="another-run"):
        answer(handle.open_attempt.remote("first"))


def test_hundreds_of_ranks_wait_without_a_thread_each(root: str) -> None:
    crowd = Ranks(ranks=200)
    storage = open_storage(root)
    handle = coordinators.connect(RUN, root)
    answer(handle.open_attempt.remote("first"))
    with_files = {rank: dump(crowd.ack(rank)) for rank in range(crowd.ranks)}
    crowd.write(storage)
    calls = [handle.acknowledge.remote(with_files[rank]) for rank in range(1, crowd.ranks)]
    waiting_for(handle, "rank 0")
    calls.append(handle.acknowledge.remote(with_files[0]))
    assert {fate.kind for fate in fates(calls)} == {"published"}
