"""Finds out, for as long as a part runs, whether it has its rights in the cluster; for apply, whether the guard holds.

`services` runs a `Reporter` beside each part that talks to a cluster. What it finds is in the log, in the status
bucket (`spur-events status`) and in the part's readiness. What is needed says `kube.rights`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from spur_events import errors, jetstream, retrying, settings
from spur_events.consumers import guard
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.kube import rights
from spur_events.schemas import subjects
from spur_events.schemas.access import GuardRequest, GuardState, PartReport

log = logging.getLogger(__name__)

#: Seconds between two looks, while all is well.
_LOOK_S = 60.0
#: Seconds until the next look while something is wrong: it may have been a server that was busy or just started.
#: Doubled each time, up to `_LOOK_S`.
_SOON_S = 2.0
#: Whoever keeps the guard answers requests to look at it in this queue group: one of several processes does.
_QUEUE = "apply"


class Reporter:
    """What one part found out about its rights; with a `keeper` also about the guard, which it keeps."""

    def __init__(
        self,
        config: settings.Settings,
        bus: jetstream.Bus,
        client: kube.Client,
        part: str,
        installation: str,
        keeper: guard.Keeper | None = None,
    ) -> None:
        self._config = config
        self._bus = bus
        self._client = client
        self._keeper = keeper
        self._busy = asyncio.Lock()
        self._rights_at_s = -_LOOK_S
        self._report = PartReport(
            installation=installation,
            cluster=config.kubernetes.cluster,
            part=part,
            at=datetime.now(UTC),
        )
        #: Set when it has looked for the first time, whatever it found.
        self.looked = asyncio.Event()

    async def run(self) -> None:
        """Look now and then until cancelled; answer requests to look at the guard."""
        async with contextlib.AsyncExitStack() as stack:
            await retrying.forever(
                "answer requests about the guard", lambda: stack.enter_async_context(self._answering())
            )
            in_trouble = 0
            while True:
                in_trouble = 0 if await self._look() else in_trouble + 1
                self.looked.set()
                await asyncio.sleep(
                    retrying.backoff_s(in_trouble, _SOON_S, _LOOK_S) if in_trouble else _LOOK_S
                )

    def reasons(self) -> list[str]:
        """Return why the part cannot do its work in this cluster, as far as is known; for its readiness."""
        report = self._report
        found = [f"right missing: {right}" for right in report.missing_rights]
        guarded = report.guard is GuardState.IN_FORCE or not self._config.access.require_guard
        if self._keeper is not None and self.looked.is_set() and not guarded:
            found.append(f"member guard {report.guard}: {report.message}")
        return found

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        if self._keeper is None:
            yield
            return
        subject = subjects.guard(self._report.cluster)
        async with self._bus.answering(subject, GuardRequest, self._answer, queue=_QUEUE):
            yield

    async def _answer(self, request: GuardRequest) -> PartReport:
        if request.installation != self._report.installation:
            raise errors.TemporaryError(
                f"asked by installation {request.installation}, this process serves {self._report.installation}"
            )
        await self._look()
        return self._report

    async def _look(self) -> bool:
        """Look once and report; returns whether all is well, and was proven to be."""
        async with self._busy:
            before = self._report
            missing, unknown = await self._rights()
            guarded, told = GuardState.UNKNOWN, ""
            if self._keeper is not None:
                guarded, told = await self._keeper.keep()
            self._report = before.model_copy(
                update={
                    "missing_rights": missing,
                    "guard": guarded,
                    "message": "; ".join(text for text in (unknown, told) if text),
                    "at": datetime.now(UTC),
                }
            )
            self._log(before)
            await self._put()
            proven = self._keeper is None or (guarded is GuardState.IN_FORCE and not told)
            return not missing and not unknown and proven

    async def _rights(self) -> tuple[tuple[str, ...], str]:
        known = self._report.missing_rights
        # Not at each question about the guard, nor at each look while it is the guard that is wrong.
        if not known and time.monotonic() - self._rights_at_s < _LOOK_S / 2:
            return known, ""
        try:
            found = await rights.missing(self._client, self._report.part, self._report.installation)
        except (*kube_errors.ANSWERS, kube_errors.UnreachableError) as error:
            return known, f"rights cannot be looked at: {error}"
        self._rights_at_s = time.monotonic()
        return found, ""

    def _log(self, before: PartReport) -> None:
        now = self._report
        for right in now.missing_rights:
            if right not in before.missing_rights:
                log.warning("right missing", extra={"part": now.part, "right": right, "cluster": now.cluster})
        if before.missing_rights and not now.missing_rights:
            log.info("all rights are there", extra={"part": now.part, "cluster": now.cluster})
        if (now.guard, now.message) == (before.guard, before.message):
            return
        level = logging.INFO if now.guard is GuardState.IN_FORCE else logging.WARNING
        if self._keeper is not None:
            extra = {"state": str(now.guard), "cluster": now.cluster, "error": now.message}
            log.log(level, "member guard", extra=extra)
        elif now.message:
            log.warning("rights not checked", extra={"part": now.part, "error": now.message})

    async def _put(self) -> None:
        key = subjects.part_key(self._report.cluster, self._report.part)
        try:
            await self._bus.put(subjects.STATUS_BUCKET, key, self._report)
        except errors.TemporaryError as error:
            log.warning("report not written", extra={"part": self._report.part, "error": str(error)})
