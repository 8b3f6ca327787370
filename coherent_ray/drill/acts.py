"""The deeds of a drill: each does one thing to a run, from outside, and says to whom.

Called in the drill's main thread while a process of the run is held (`stage`). What is stopped here
is remembered by the scene, which never leaves a stopped process behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray

from coherent_ray.drill import victims
from coherent_ray.drill.injections import Injection
from coherent_ray.drill.stage import Held
from coherent_ray.drill.victims import Victim
from coherent_ray.errors import ClusterError
from coherent_ray.train import coordinators
from coherent_ray.train.supervisor import Supervisor

if TYPE_CHECKING:
    from coherent_ray.drill.scene import Scene

Deed = Callable[["Scene", Injection, Held], str]

#: Seconds that an old process has, once it goes on, to be told that its attempt is over.
LATE_S = 60.0
#: Seconds that a cluster is without its head's service.
HEADLESS_S = 3.0
#: Seconds until Ray has seen a new node, and decided to use it.
JOIN_S = 120.0
#: Before what the coordinator has written of a late rank.
LATE_WORD = "the coordinator wrote: "


def kill(scene: Scene, injection: Injection, held: Held) -> str:
    """Kill a worker, the controller or the driver by SIGKILL, the coordinator by `ray.kill`."""
    match injection.target:
        case "driver":
            os.kill(scene.driver, signal.SIGKILL)
            return f"pid {scene.driver}"
        case "controller":
            (victim,) = victims.of_job(scene.job, "controller")[:1]
        case "coordinator":
            handle, victim = victims.coordinator_of(scene.run_id)
            ray.kill(handle, no_restart=False)
            return str(victim)
        case _:
            victim = Victim(held.pid, held.node)
            if injection.or_later and not victim.alive:
                victim = victims.of_job(scene.job, "worker")[0]
    if not victim.send(signal.SIGKILL):
        raise ClusterError(f"the {injection.target} was gone before it could be killed: {victim}")
    return str(victim)


def stop(scene: Scene, injection: Injection, held: Held) -> str:
    """Stop who is held."""
    victim = Victim(held.pid, held.node)
    scene.freeze(victim)
    return str(victim)


def go_on(scene: Scene, injection: Injection, held: Held) -> str:
    """Let all that was stopped go on, after a later publish; wait for what the old ones say."""
    scene.await_publish(held.update, held.attempt)
    frozen = list(scene.frozen)
    alive = scene.thaw()
    gone = [str(victim) for victim in frozen if victim not in alive]
    told = [f"{', '.join(gone)}: ended by Ray meanwhile"] if gone else []
    if injection.target == "node":
        told.append(_late_answer(scene))
    scene.say("; ".join(told))
    return ", ".join(map(str, alive)) or "nobody is left"


def remove(scene: Scene, injection: Injection, held: Held) -> str:
    """Take away the node of who is held, and bring another."""
    scene.ground.remove(held.node)
    scene.ground.add()
    return f"node {held.node[:12]}"


def lose(scene: Scene, injection: Injection, held: Held) -> str:
    """Take away the node of who is held."""
    scene.ground.remove(held.node)
    return f"node {held.node[:12]}"


def join(scene: Scene, injection: Injection, held: Held) -> str:
    """Bring a node, and wait until the workers are told that they start again with one more."""
    scene.ground.add()
    until = time.monotonic() + JOIN_S
    while time.monotonic() < until:
        handle, _ = victims.coordinator_of(scene.run_id)
        leave = coordinators.answer(handle.status.remote())["leave"]
        if leave is not None and leave["attempt"] == held.attempt:
            return f"for {leave['resized']} workers"
        time.sleep(0.1)
    raise ClusterError(f"a node joined, and the run was not resized within {JOIN_S:g} s")


def freeze(scene: Scene, injection: Injection, held: Held) -> str:
    """Stop the node of who is held: its raylet and the worker; bring another."""
    scene.late = held
    _, coordinator = victims.coordinator_of(scene.run_id)
    scene.coordinator = coordinator.pid
    # The raylet goes on last: the worker then speaks while Ray still counts its node as lost.
    scene.freeze(Victim(held.pid, held.node))
    scene.freeze(Victim(scene.ground.raylet(held.node), held.node), wakes_last=True)
    scene.ground.add()
    return f"node {held.node[:12]}, pid {held.pid}"


def fill(scene: Scene, injection: Injection, held: Held) -> str:
    """Leave no room in the run's storage."""
    scene.await_publish(held.update, 1)
    return scene.disk.fill()


def free(scene: Scene, injection: Injection, held: Held) -> str:
    """Make room again."""
    return scene.disk.free()


def flip(scene: Scene, injection: Injection, held: Held) -> str:
    """Flip a byte in the middle of the newest generation's last shard; kill who is held."""
    scene.await_publish(held.update, 1)
    where = scene.flip_newest()
    kill(scene, injection, held)
    return where


def part(scene: Scene, injection: Injection, held: Held) -> str:
    """Stop everything of the run, complete it in another Ray, and let the old ones go on."""
    scene.await_publish(held.update, 1)
    _, coordinator = victims.coordinator_of(scene.run_id)
    scene.coordinator = coordinator.pid
    workers = victims.of_job(scene.job, "worker")
    driver = Victim(scene.driver, ray.get_runtime_context().get_node_id())
    for victim in (driver, *victims.of_job(scene.job, "controller"), coordinator, *workers):
        scene.freeze(victim)
    names = ", ".join(map(str, scene.frozen))
    cluster = scene.config.cluster.model_copy(update={"address": None})
    elsewhere = scene.config.model_copy(update={"cluster": cluster})
    try:
        outcome = Supervisor(elsewhere, lambda event: None).run()
    finally:
        scene.thaw()
    scene.require_complete(outcome)
    scene.say(f"completed in another Ray by then, at {outcome.facts['latest']}")
    return names


def restart(scene: Scene, injection: Injection, held: Held) -> str:
    """Kill the head's service, leave the cluster without one for a while, and start another."""
    pid = scene.ground.kill_head_service()
    time.sleep(HEADLESS_S)
    scene.ground.start_head_service()
    return f"pid {pid}"


def _late_answer(scene: Scene) -> str:
    """Wait until the coordinator has told the late rank, in its log, that its attempt is over."""
    late, until = scene.late, time.monotonic() + LATE_S
    words = f"rank {late.rank} is too late" if late else "nobody is late"
    while time.monotonic() < until:
        for line in (scene.ground.said(scene.coordinator) or "").splitlines():
            if words in line:
                scene.wake_last()
                return f"{LATE_WORD}{line}"
        time.sleep(0.1)
    scene.wake_last()
    return "no late rank was heard"


DEEDS: dict[str, Deed] = {
    "kill": kill, "stop": stop, "go on": go_on, "remove": remove, "lose": lose, "join": join,
    "freeze": freeze,
    "fill": fill, "free": free, "flip": flip, "part": part, "restart": restart,
}  # fmt: skip
