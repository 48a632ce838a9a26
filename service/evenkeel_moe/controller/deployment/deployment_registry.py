"""Holds the deployments of this replica: where the streams of ranks arrive."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.deployment.deployment import (
    LEASE_WAIT_S,
    Deployment,
    DeploymentOptions,
)
from evenkeel_moe.controller.ingest.group_memory import GroupMemory, memory_together
from evenkeel_moe.controller.ranks.rank_sessions import RankSession, refusal
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.errors import PeerViolation, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.wire.link import FlowControl

_log = structlog.get_logger(__name__)
_NEW_S = 60.0
"""A deployment whose ranks were never all here is evicted after this: any client can make up a
name."""
_EVICTABLE_S = 10.0
"""A deployment must be without ranks for this long before it makes room for another. Otherwise
made-up names would take leases as fast as a client can send them."""
_LONGEST_PAUSE_S = 300.0
_SOUND_AFTER_S = 600.0
"""Seconds without a failure after which the next one counts as the first."""
_MOST_NAMES = 1024


@dataclass(frozen=True, slots=True)
class Failure:
    """The newest failure of a deployment."""

    detail: str
    """The error, for logs and answers."""
    pause_s: float
    """Seconds for which the deployment does not start again."""
    at: float
    """Monotonic seconds."""

    def left_s(self, now: float) -> float:
        """Return the seconds until the deployment may start again; at least 0."""
        return max(0.0, self.at + self.pause_s - now)


class DeploymentFailures:
    """The failures of this replica's deployments. The pause doubles with each failure in a row.

    Args:
        first_pause_s: pause after the first failure.
    """

    def __init__(self, first_pause_s: float = 5.0) -> None:
        self._first_pause_s = first_pause_s
        self._newest: dict[DeploymentId, Failure] = {}
        self._dropped: set[DeploymentId] = set()
        """The names for which there was no place, until `expire` returns them."""

    def note(self, name: DeploymentId, error: BaseException, now: float) -> Failure:
        """Remember a failure and return it with its pause."""
        before = self._newest.pop(name, None)
        pause_s = self._first_pause_s
        if before is not None and now - before.at < before.pause_s + _SOUND_AFTER_S:
            pause_s = min(2 * before.pause_s, _LONGEST_PAUSE_S)
        failure = Failure(f"{type(error).__name__}: {error}"[:300], pause_s, now)
        self._newest[name] = failure
        while len(self._newest) > _MOST_NAMES:
            oldest = next(iter(self._newest))
            del self._newest[oldest]
            self._dropped.add(oldest)
        return failure

    def waiting(self, name: DeploymentId, now: float) -> Failure | None:
        """Return the failure for which a deployment must still wait; None if it may start."""
        failure = self._newest.get(name)
        return failure if failure is not None and failure.left_s(now) > 0 else None

    def expire(self, now: float, after_s: float) -> list[DeploymentId]:
        """Drop the failures of that age that lengthen no pause any more.

        Returns:
            Their names, and those of the oldest failures that made room for newer ones.
        """
        old = [*(self._dropped - self._newest.keys())]
        self._dropped.clear()
        old += [
            name
            for name, one in self._newest.items()
            if now - one.at >= max(after_s, one.pause_s + _SOUND_AFTER_S)
        ]
        for name in old:
            self._newest.pop(name, None)
        return old


@dataclass(eq=False, repr=False)
class DeploymentRegistry:
    """The deployments on this replica; `adapters.grpc.server.RankHub` for their ranks."""

    options: DeploymentOptions
    shared: SharedServices
    _: KW_ONLY
    max_deployments: int
    max_new_deployments: int
    memory_bytes: int
    max_streams: int
    deployments: dict[DeploymentId, Deployment] = field(default_factory=dict, init=False)
    failures: DeploymentFailures = field(default_factory=DeploymentFailures, init=False)

    def __post_init__(self) -> None:
        self._flow = self.options.flow

    def add(self, name: DeploymentId, *, lasting: bool = True) -> Deployment:
        """Return the deployment of a name; create and start it if it is not here yet.

        Args:
            name: of the deployment.
            lasting: the store has records of it, as far as is known.
        """
        known = self.deployments.get(name)
        if known is None:
            shared = replace(
                self.shared,
                spawn=partial(self._spawn_contained, name),
                may_restore=partial(self._may_restore, name),
                admit=partial(self._admit, is_new=False),
            )
            known = self.deployments[name] = Deployment(name, self.options, shared, lasting=lasting)
            if self._flow != self.options.flow:
                known.ranks.pace(self._flow)
            known.start()
            self.shared.metrics.deployment_added(name)
        return known

    # --- failures ---------------------------------------------------------------------------------

    def _spawn_contained(
        self, name: DeploymentId, work: Coroutine[Any, Any, None], task: str
    ) -> asyncio.Task[None]:
        """Run a task of a deployment; if it fails, only that deployment ends."""

        async def contain() -> None:
            deployment = self.deployments.get(name)
            try:
                await work
            except Exception as error:  # Whatever a peer or the store caused, the others go on.
                self.failed(name, deployment, error)

        running = self.shared.spawn(contain(), task)
        # A task that is cancelled before its first step would leave the coroutine unawaited.
        running.add_done_callback(lambda _: work.close())
        return running

    def failed(self, name: DeploymentId, deployment: Deployment | None, error: Exception) -> None:
        """End a deployment whose part failed. It starts again with its ranks, after a pause.

        Args:
            name: of the deployment.
            deployment: the one that failed; one that has taken its place since goes on.
            error: logged with its traceback.
        """
        if deployment is None or self.deployments.get(name) is not deployment:
            _log.error("ended_deployment_failed", deployment=name, exc_info=error)
            return
        del self.deployments[name]
        failure = self.failures.note(name, error, self.shared.clock.monotonic())
        _log.error(
            "deployment_failed",
            deployment=name,
            detail=failure.detail,
            pause_s=failure.pause_s,
            exc_info=error,
        )
        self.shared.metrics.deployment_failed(name)
        self.shared.spawn(self._end_failed(deployment), f"end-failed-{name}")

    async def _end_failed(self, deployment: Deployment) -> None:
        """Close the streams of a failed deployment, end its tasks and give its lease up."""
        name = deployment.deployment
        try:
            deployment.ranks.close_all()
            await deployment.stop()
        except Exception as error:
            _log.error("failed_deployment_not_ended", deployment=name, exc_info=error)

    async def take_up(self, names: Sequence[DeploymentId]) -> None:
        """Seek the leases of the deployments that this replica led before it restarted.

        Raises:
            Unavailable: the store is out of reach.
        """
        for name in names:
            leader = await self.shared.store.fetch_document(name, "leader") or {}
            if (
                leader.get("replica_id") == self.options.leader.replica_id
                and len(self.deployments) < self.max_deployments
            ):
                self.add(name).keeper.want()

    def pace(self, flow: FlowControl) -> None:
        """Set the pace of reports for all deployments, and for those that are added later."""
        self._flow = flow
        for deployment in self.deployments.values():
            deployment.ranks.pace(flow)

    # --- letting go -------------------------------------------------------------------------------

    async def evict_idle(self, after_s: float) -> None:
        """Evict the deployments that have been without ranks for that long.

        Those that failed and did not start again lose their series.
        """
        for name in list(self.deployments):
            # Looked up one by one: meanwhile its ranks may be back, or an operator let it go.
            deployment = self.deployments.get(name)
            if deployment is not None and _is_expired(deployment, after_s):
                await self.let_go(deployment)
        for name in self.failures.expire(self.shared.clock.monotonic(), after_s):
            if name not in self.deployments:
                self.shared.metrics.forget(name)

    async def let_go(self, deployment: Deployment) -> None:
        """Remove a deployment, unless that was done before: its lease, memory and series."""
        name = deployment.deployment
        if self.deployments.get(name) is deployment:
            del self.deployments[name]
            await self._end(deployment)

    async def _end(self, deployment: Deployment) -> None:
        name = deployment.deployment
        _log.info("deployment_forgotten", deployment=name)
        await self.seek_lease(deployment)
        await deployment.stop(forget=True)
        if name not in self.deployments:
            self.shared.metrics.forget(name)

    async def seek_lease(self, deployment: Deployment) -> None:
        """Take the lease if nobody leads: only the leader of a deployment can let it go."""
        if not deployment.keeper.leading and not self.shared.health.resting:
            await deployment.keeper.decided(LEASE_WAIT_S)

    def _may_restore(self, name: DeploymentId, need: GroupMemory) -> bool:
        """Return True if the stored windows of a deployment fit beside the other deployments.

        No other makes room for them: a deployment can do without them, and may have no ranks.
        """
        others = _memory_of(one for other, one in self.deployments.items() if other != name)
        if memory_together([need, *others]) <= self.memory_bytes:
            return True
        _log.error(
            "windows_not_restored",
            deployment=name,
            detail=f"its stored windows may take {need}, other deployments"
            f" {memory_together(others)}; ingest.memory_bytes is {self.memory_bytes}",
        )
        return False

    def _evict(self, deployment: Deployment) -> None:
        del self.deployments[deployment.deployment]
        self.shared.spawn(self._end(deployment), f"let-go-{deployment.deployment}")

    def _admit(self, hello: Hello, stream: RankStream, *, is_new: bool) -> bool:
        """Return True if the deployment of a rank may be here, and evict those that make room.

        Nobody is evicted before it is known that the rank is not refused. A deployment takes memory
        once its ranks were all here, or its windows were restored. Ranks of an incomplete group are
        asked for again by the Hello that completes it.
        """
        name = hello.identity.deployment
        here = self.deployments.get(name)
        if here is not None and here.turns_away(hello, stream):
            return True  # It answers the rank itself, and takes nothing more.
        others = [one for one in self.deployments.values() if one is not here]
        stay = others.copy()
        refusal = self._refusal_beside(stay, hello, comes=here is None, is_new=is_new)
        if refusal is not None:
            self._refuse_deployment(name, stream, *refusal)
            return False
        for one in others:
            if one not in stay:
                self._evict(one)
        return True

    def _refusal_beside(
        self, stay: list[Deployment], hello: Hello, *, comes: bool, is_new: bool
    ) -> tuple[str, str] | None:
        """Return the limit that keeps a deployment out, and a sentence with the numbers.

        Mutates: `stay`, the others, from which it takes those that make room.

        Args:
            stay: the other deployments.
            hello: of a rank of the deployment.
            comes: it is not here yet.
            is_new: its ranks were never all here.
        """
        new = [one for one in stay if one.is_new] if comes and is_new else []
        if len(new) >= self.max_new_deployments and not _make_room(stay, new):
            detail = f"{len(new)} deployments whose ranks were never all here, no more are taken"
            return "max_new_deployments", detail
        if comes and len(stay) >= self.max_deployments and not _make_room(stay, stay):
            return "max_deployments", f"{len(stay)} deployments are here, no more are taken"
        need = self.options.memory_of(hello.shape)
        while memory_together([need, *_memory_of(stay)]) > self.memory_bytes:
            if memory_together([need]) > self.memory_bytes or not _make_room(
                stay, [one for one in stay if one.memory]
            ):
                layers, slots, ranks, experts = hello.shape.sizes
                return "memory_bytes", (
                    f"{layers} layers x {slots} slots and {experts} experts on {ranks} ranks may"
                    f" take {need}, other deployments {memory_together(_memory_of(stay))}; one plan"
                    f" runs at a time; ingest.memory_bytes is {self.memory_bytes}"
                )
        return None

    def _refuse_deployment(
        self, name: DeploymentId, stream: RankStream, limit: str, detail: str
    ) -> None:
        _log.error("deployment_refused", deployment=name, limit=limit, detail=detail)
        self.shared.metrics.deployment_refused(limit)
        self._refuse(stream, Reason.LIMIT_EXCEEDED, detail)

    def _has_streams(self, hello: Hello, stream: RankStream) -> bool:
        """Return True if all ranks of a group can have a stream; else refuse the rank.

        Ranks of a group that can never be whole would only fill the memory.
        """
        ranks = hello.shape.num_ranks
        if ranks <= self.max_streams:
            return True
        detail = f"the group has {ranks} ranks, grpc.max_streams is {self.max_streams}"
        self._refuse_deployment(hello.identity.deployment, stream, "max_streams", detail)
        return False

    async def _has_records(self, name: DeploymentId) -> bool | None:
        """Return True if the ranks of a deployment were ever all here; None if nobody knows."""
        try:
            return await self.shared.health.ask(lambda: self.shared.store.has_records(name))
        except Unavailable:
            return None

    # --- ranks ------------------------------------------------------------------------------------

    async def attach(self, hello: Hello, stream: RankStream) -> RankSession | None:
        """Register the stream of a rank; return None if it was turned away."""
        name = hello.identity.deployment
        if not self._has_streams(hello, stream):
            return None
        known: bool | None = True
        if name not in self.deployments:
            known = await self._has_records(name)
        # After the store was asked: the deployment may have failed meanwhile.
        now = self.shared.clock.monotonic()
        failure = self.failures.waiting(name, now)
        if failure is not None:
            detail = f"{failure.detail}; {name} starts again in {failure.left_s(now):.0f} s"
            self._refuse(stream, Reason.DEPLOYMENT_FAILED, detail)
            return None
        # While the store is away, a deployment that is not new must not be refused as one.
        if not self._admit(hello, stream, is_new=known is False):
            return None
        return await self.add(name, lasting=known is True).registration.attach(hello, stream)

    def refuse(self, violation: PeerViolation, stream: RankStream) -> None:
        """Close a stream whose first message is not a valid Hello."""
        _log.warning(
            "hello_refused", peer=stream.peer, reason=violation.reason, detail=str(violation)
        )
        self._refuse(stream, violation.reason, str(violation))

    def _refuse(self, stream: RankStream, reason: Reason, detail: str) -> None:
        stream.close(refusal(self.options.timing, self.options.flow, reason, detail))

    def close_streams(self) -> None:
        """Close every stream: the ranks look for another replica, or wait for this one."""
        for deployment in self.deployments.values():
            deployment.ranks.close_all()


def _is_expired(deployment: Deployment, after_s: float) -> bool:
    """Return True if a deployment has been without ranks for long enough to be evicted."""
    return deployment.ranks.idle_s() > (min(after_s, _NEW_S) if deployment.is_new else after_s)


def _choose_evicted(deployments: Iterable[Deployment]) -> Deployment | None:
    """Return the deployment that makes room; None while all have, or just had, ranks.

    Deployments that never had all of their ranks go first: what a single rank says may be anything.
    """
    idle = [one for one in deployments if one.ranks.idle_s() >= _EVICTABLE_S]
    return min(
        idle,
        key=lambda one: (one.loads.ingest.generation is not None, -one.ranks.idle_s()),
        default=None,
    )


def _make_room(stay: list[Deployment], among: Collection[Deployment]) -> bool:
    """Take the deployment that makes room out of `stay`; return False if none of `among` can."""
    evicted = _choose_evicted(among)
    if evicted is not None:
        stay.remove(evicted)
    return evicted is not None


def _memory_of(deployments: Iterable[Deployment]) -> list[GroupMemory]:
    return [one.memory for one in deployments if one.memory is not None]
