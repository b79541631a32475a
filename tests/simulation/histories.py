"""One history of a cluster, made from a seed and from nothing else."""

import asyncio
import dataclasses
import random

import virtual_time
from simulated_controller import Controller
from simulated_faults import Faults
from simulated_head import SimulatedCluster
from simulated_network import SimulationFailure, World

from ridgeway.cluster.topology import Topology
from ridgeway.launch import supervision
from ridgeway.settings import Settings

SETTINGS = Settings(
    heartbeat_interval_seconds=0.5,
    heartbeat_timeout_seconds=2.0,
    suspect_after_seconds=1.0,
    progress_deadline_seconds=4.0,
    drain_deadline_seconds=0.5,
    generation_create_timeout_seconds=2.0,
    membership_settle_seconds=0.4,
    disagreement_seconds=0.3,
    executor_start_timeout_seconds=4.0,
    probe_hold_seconds=2.0,
    transfer_timeout_seconds=2.0,
    compile_timeout_seconds=20.0,
    preemption_notice_seconds=6.0,
    suspend_timeout_seconds=20.0,
)
"""Proportions like those of the defaults, in a world that is about five times as fast."""

TOPOLOGIES = (
    (Topology(1, 1, 1), 1), (Topology(1, 2, 1), 2), (Topology(2, 1, 1), 4), (Topology(2, 1, 2), 3),
    (Topology(3, 1, 1), 4), (Topology(2, 2, 1), 3), (Topology(3, 2, 1), 1), (Topology(4, 1, 1), 1),
)  # fmt: skip
"""Shapes, and how often each comes."""

SCHEDULED_PROBABILITY = 0.3
"""How often workers are started by a scheduler and outlive their head, which then may die as well."""

RECOVERY_BOUND_SECONDS = 40.0
"""Once faults have stopped, everything is well again within so many seconds: more than the longest chain of deadlines
that one fault can set off (a stopped process, a hung executor, refused restarts with their growing pauses)."""
ANSWER_BOUND_SECONDS = 12.0
"""... and each operation, be it a probe of a slice, is answered in so many: the longest of the deadlines that can
follow each other for one (progress, drain, generation, settling), and a hold for a returning slice."""


def run_history(seed: str) -> None:
    """Live through a history and check it.

    Raises:
      SimulationFailure: a rule was broken; the message ends with how it came to that.
    """
    virtual_time.run(_History(seed).run())


class _Clients:
    """The controllers of a history; each keeps its slices when it is replaced by a new process."""

    def __init__(self, cluster: SimulatedCluster):
        self._cluster = cluster
        self._started = 0
        self._tasks: dict[Controller, asyncio.Task[None]] = {}
        self.gone: list[Controller] = []

    @property
    def running(self) -> list[Controller]:
        """Those that train."""
        return list(self._tasks)

    def start(self, slices: tuple[int, ...] | None = None) -> None:
        """Another one connects: the first uses every slice."""
        world = self._cluster.world
        chance = world.random
        if slices is None:
            every = self._cluster.manager.topology.slices
            count = chance.randint(1, every) if self._started else every
            slices = tuple(sorted(chance.sample(range(every), count)))
        name = f"controller {self._started}"
        self._started += 1
        controller = Controller(self._cluster, name, slices, donates=chance.random() < 0.5, depth=chance.randint(1, 4))
        self._tasks[controller] = world.task(controller.run(1000))

    def replace_one(self) -> None:
        """One dies in the middle of whatever it does, and is started again."""
        controller = self._cluster.world.random.choice(self.running)
        self._end(controller)
        self.start(controller.slices)

    def replace_all(self) -> None:
        """Their head had died, and all they had with it."""
        for controller, task in list(self._tasks.items()):
            del self._tasks[controller]
            task.cancel()
            controller.abandon()
            self.start(controller.slices)

    def stop(self) -> None:
        """All go away."""
        for controller in self.running:
            self._end(controller)

    def _end(self, controller: Controller) -> None:
        self._tasks.pop(controller).cancel()
        if self._cluster.process.alive:
            controller.close()
            self.gone.append(controller)
        else:
            controller.abandon()


class _History:
    def __init__(self, seed: str):
        self._seed = seed

    async def run(self) -> None:
        world = World(random.Random(self._seed))
        history = world.task(self._live(world))
        try:
            await asyncio.wait([history, world.failure], return_when=asyncio.FIRST_COMPLETED)
            for ended in (world.failure, history):
                if ended.done():
                    ended.result()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            story = "\n".join(world.log[-120:])
            replay = f".venv/bin/python tests/simulation/histories.py {self._seed}"
            raise SimulationFailure(
                f"history {self._seed}: {type(error).__name__}: {error}\n{story}\nAgain: {replay}"
            ) from error
        finally:
            world.over = True
            world.failure.cancel()

    async def _live(self, world: World) -> None:
        chance = world.random
        topologies, weights = zip(*TOPOLOGIES, strict=True)
        topology = chance.choices(topologies, weights)[0]
        standbys = chance.choice((0, 0, 1, 2))
        count = chance.choices((0, 1, 2, 3, 4), (1, 4, 3, 2, 1))[0]
        scheduled = chance.random() < SCHEDULED_PROBABILITY
        options = None if scheduled else supervision.Options(
            topology.slices, topology.hosts_per_slice, standbys=standbys, max_slice_restarts=None,
            replacement_delay_seconds=chance.choice((0.0, 0.0, 0.5)), join_timeout_seconds=6.0,
            standby_take_over_seconds=1.0, lost_exit_seconds=0.5, backoff_first_seconds=0.1, backoff_limit_seconds=1.0,
            standby_failure_limit=1000,
        )  # fmt: skip
        settings = dataclasses.replace(SETTINGS, orphan_policy="wait") if scheduled else SETTINGS
        cluster = SimulatedCluster(world, topology, settings, options, standbys)
        who = "a scheduler" if scheduled else "a supervisor"
        world.say(f"a cluster of {topology} with {standbys} standbys and {who}, {count} faults")
        only_preemptions = count > 0 and chance.random() < 0.2
        if count and not only_preemptions:
            cluster.hole_probability = chance.choice((0.0, 0.0, 0.2))
            cluster.worn_probability = chance.choice((0.0, 0.5))
            cluster.crash_probability = chance.choice((0.0, 0.0, 0.1))
        clients = _Clients(cluster)
        for _ in range(chance.choice((1, 1, 2))):
            clients.start()
        await Faults(cluster, clients.replace_one, clients.replace_all).run(count, only_preemptions)
        world.say("no more faults")
        cluster.quiet_since = world.now
        await self._until_well(world, cluster, clients)
        if count == 0 or only_preemptions:
            self._check_untouched(world, cluster, clients.running)
        clients.stop()
        await self._until_empty(world, cluster, clients)

    async def _until_well(self, world: World, cluster: SimulatedCluster, clients: "_Clients") -> None:
        """Liveness: every slice comes up, and every controller trains on them from beginning to end."""
        quiet = world.now
        controllers = clients.running
        slices = range(cluster.manager.topology.slices)
        while True:
            up = all(cluster.manager.slice_is_up(index) for index in slices)
            trained = all(c.rounds > 0 and c.round_began >= quiet for c in controllers)
            for controller in controllers:
                self._check_answers(world, controller, quiet)
            if up and trained:
                return
            if world.now - quiet > RECOVERY_BOUND_SECONDS:
                down = [index for index in slices if not cluster.manager.slice_is_up(index)]
                waiting = [what for c in controllers for what in c.waiting.values()]
                world.violation(
                    f"{RECOVERY_BOUND_SECONDS} s after the last fault slices {down} are down, "
                    f"{[c.rounds for c in controllers]} trainings went through, operations wait: {waiting}"
                )
            await asyncio.sleep(0.25)

    def _check_answers(self, world: World, controller: Controller, quiet: float) -> None:
        """Everything that is asked once faults have stopped, and everything that was open then, is answered in time,
        be it with an error: a probe that is never answered would hold a program for ever."""
        for began, what in controller.waiting.values():
            if world.now - max(began, quiet) > ANSWER_BOUND_SECONDS:
                world.violation(f"{controller.name} has waited {ANSWER_BOUND_SECONDS} s for {what}")

    def _check_untouched(self, world: World, cluster: SimulatedCluster, controllers: list[Controller]) -> None:
        """Without a fault there is neither a loss nor an error, but for what was asked before the hosts had joined; and
        an announced preemption is no fault."""
        bad = {k: n for k, n in cluster.counts.items() if k in ("host_lost", "generation_aborted", "executor_recycled")}
        if bad:
            world.violation(f"nothing was done to the cluster, but: {bad}")
        for controller in controllers:
            errors = [str(e) for e in controller.errors if "has not joined the cluster yet" not in e.message]
            if errors:
                world.violation(f"nothing was done to the cluster, but {controller.name} got {errors}")

    async def _until_empty(self, world: World, cluster: SimulatedCluster, clients: "_Clients") -> None:
        """Nothing is kept for clients that are gone, nor for generations that are."""
        began = world.now
        while True:
            await asyncio.sleep(0.25)
            problems = [
                f"executor {link.number} keeps groups {sorted(groups)}"
                for link in cluster.manager.slots
                if link is not None and (groups := self._groups(cluster, link.pid))
            ]
            problems += [f"{c.name} waits for {what}" for c in clients.gone for _, what in c.waiting.values()]
            standing = len(set(cluster.manager.generations.current.values()))
            if cluster.rendezvous.open_services > standing:
                problems.append(f"{cluster.rendezvous.open_services} services for {standing} generations")
            if len(cluster.manager.generations.generations) > standing:
                problems.append(f"{len(cluster.manager.generations.generations)} generations kept, {standing} stand")
            problems += [
                f"{link.place} has {link.waiting_replies} requests without an answer"
                for link in cluster.manager.slots
                if link is not None and link.waiting_replies
            ]
            if not problems:
                return
            if world.now - began > RECOVERY_BOUND_SECONDS:
                world.violation("left behind: " + "; ".join(problems))

    def _groups(self, cluster: SimulatedCluster, pid: int) -> set[int]:
        executor = cluster.executors.get(pid)
        return set() if executor is None else set(executor.store)


if __name__ == "__main__":
    import sys

    for argument in sys.argv[1:]:
        run_history(argument)
