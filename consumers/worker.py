"""Takes events from the partitions, hands them over, and answers them: the only place that acknowledges.

Any number of worker processes may run: each partition's consumer hands out one event at a time, so an
account has one writer on a cluster at any moment, without locks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from spur_events import errors, jetstream, process, retrying, settings
from spur_events.consumers import lease, retries, verdicts
from spur_events.schemas import codec, subjects
from spur_events.schemas.events import AccountChanged, Recheck, RecheckReason

log = logging.getLogger(__name__)

_WAIT_S = 5.0
_DRAIN_S = 10.0
#: Rounds without an event after which the consumer is looked at: a deleted one answers nothing.
_IDLE_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class Work:
    """A decoded event with its lease."""

    event: AccountChanged | Recheck
    slug: str
    sequence: int
    deliveries: int
    lease: lease.Lease


Handler = Callable[[Work], Awaitable[verdicts.Verdict]]


class Worker:
    """All partitions of one cluster in this process."""

    def __init__(
        self, config: settings.Settings, bus: jetstream.Bus, installation: str, handle: Handler
    ) -> None:
        self._config = config
        self._bus = bus
        self._installation = installation
        self._handle = handle
        self._cluster = config.kubernetes.cluster
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled; an event in hand is finished first."""
        for number in range(self._bus.partitions):
            await self._ensure(number)
        self.ready.set()
        log.info("worker takes events", extra={"cluster": self._cluster, "partitions": self._bus.partitions})
        await process.together(*(self._partition(number) for number in range(self._bus.partitions)))

    async def _ensure(self, number: int) -> None:
        async def attempt() -> None:
            owner = await self._bus.check_topology()
            if owner != self._installation:
                raise errors.MisconfiguredError(
                    f"the event stream now belongs to installation {owner}, not {self._installation}: start again"
                )
            await self._bus.ensure_consumer(
                subjects.durable(self._cluster, number),
                subjects.partition_filters(self._cluster, number),
                self._config.apply.ack_wait_s,
            )

        await retrying.forever("ensure consumer", attempt)

    async def _partition(self, number: int) -> None:
        # The lease counts from before the question, so the wait is kept well below the ack wait.
        wait_s = min(_WAIT_S, self._config.apply.ack_wait_s / 4)
        async with self._bus.pull(subjects.durable(self._cluster, number)) as pull:
            idle = 0
            while True:
                asked_at_s = lease.now_s()
                try:
                    message = await pull.next(wait_s)
                except errors.TemporaryError as error:
                    log.warning("no events to be had", extra={"partition": number, "error": str(error)})
                    await asyncio.sleep(retrying.jittered_s(0.5))
                    await self._ensure(number)
                    continue
                if message is not None:
                    idle = 0
                    await self._finish(message, asked_at_s)
                    continue
                idle += 1
                if lease.now_s() - asked_at_s < wait_s / 2:
                    # The server is not ready, or the consumer is gone: do not ask in a hot loop.
                    await asyncio.sleep(retrying.jittered_s(0.2))
                    idle = _IDLE_ROUNDS
                if idle >= _IDLE_ROUNDS:
                    idle = 0
                    await self._ensure(number)

    async def _finish(self, message: jetstream.Message, asked_at_s: float) -> None:
        """Process an event to its end even when this process is asked to stop meanwhile."""
        task = asyncio.create_task(self._process(message, asked_at_s))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await task
            raise

    async def _process(self, message: jetstream.Message, asked_at_s: float) -> None:
        held = lease.Lease(
            message,
            asked_at_s=asked_at_s,
            ack_wait_s=self._config.apply.ack_wait_s,
            request_timeout_s=self._config.kubernetes.timeout_s,
        )
        keeper = asyncio.create_task(held.keep())
        try:
            verdict = await self._judge(message, held)
            await self._answer(message, verdict)
        except lease.LostError:
            held.end()
            log.warning("lease lost: another worker has the event", extra={"subject": message.subject})
            await self._look_again(message)
        except errors.TemporaryError as error:
            # Nothing could be answered: the server hands the event out again after its ack wait.
            log.warning("event not answered", extra={"subject": message.subject, "error": str(error)})
        finally:
            held.end()
            keeper.cancel()

    async def _look_again(self, message: jetstream.Message) -> None:
        """Ask for another look at an account that this worker wrote to for too long.

        A process that is frozen right after the lease was checked sends that write when it wakes, whatever
        another worker has written meanwhile, and only the namespace records a revision. Nobody else knows.
        """
        slug = subjects.slug_of(message.subject)

        async def ask() -> None:
            await retries.recheck(
                self._bus,
                cluster=self._cluster,
                installation=self._installation,
                slug=slug,
                reason=RecheckReason.RESYNC,
                message_id=f"lost.{self._cluster}.{slug}.{message.sequence}.{message.deliveries}",
            )

        await retrying.forever("recheck after a lost lease", ask)

    async def _judge(self, message: jetstream.Message, held: lease.Lease) -> verdicts.Verdict:
        kind = message.headers.get(codec.TYPE_HEADER, "")
        slug = subjects.slug_of(message.subject)
        event: AccountChanged | Recheck
        try:
            if kind == Recheck.__name__:
                event = codec.decode(Recheck, message.data, message.headers)
            else:
                event = codec.decode(AccountChanged, message.data, message.headers)
        except codec.CodecError as error:
            return verdicts.Park(reason="unreadable", detail=str(error))
        if event.installation != self._installation:
            return verdicts.Park(
                reason="installation",
                detail=f"event of installation {event.installation}, this one is {self._installation}",
            )
        if subjects.slug_in(event) != slug:
            return verdicts.Park(
                reason="subject", detail=f"event about {subjects.slug_in(event)} on subject {message.subject}"
            )
        work = Work(
            event=event, slug=slug, sequence=message.sequence, deliveries=message.deliveries, lease=held
        )
        try:
            return await self._handle(work)
        except (lease.LostError, errors.TemporaryError):
            raise
        except Exception as error:  # a fault of ours must not stop the partition, nor the accounts behind it
            log.exception("event could not be handled", extra={"subject": message.subject})
            return verdicts.Park(reason="fault", detail=f"{type(error).__name__}: {error}")

    async def _answer(self, message: jetstream.Message, verdict: verdicts.Verdict) -> None:
        match verdict:
            case verdicts.Done():
                await message.done()
            case verdicts.Again(after_s=after_s):
                await message.again(after_s)
            case verdicts.Park(reason=reason, detail=detail):
                # The copy is stored before the original ends; if that fails, the original stays.
                await self._bus.park(message, subjects.parked(self._cluster, reason), detail)
                log.error(
                    "event parked", extra={"subject": message.subject, "reason": reason, "detail": detail}
                )
                await message.done()
