"""Streams, buckets and durable consumers: declared in deploy/nats/topology.json, made or reconciled here.

What can be changed in place is; what cannot is refused by name, never silently kept. `bus` calls it.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import nats.js.errors
from nats.js import JetStreamContext, api

from spur_events import errors
from spur_events.schemas import subjects


def declared() -> dict[str, Any]:
    """Return the declared streams and the settings that all our consumers share."""
    text = resources.files("spur_events").joinpath("deploy/nats/topology.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


async def ensure_stream(js: JetStreamContext, wanted: dict[str, Any]) -> None:
    """Create a stream, or bring its settings up to date.

    Raises:
        MisconfiguredError: naming the setting that cannot be changed in place.
    """
    name = wanted["name"]
    try:
        live = (await js.stream_info(name)).config
    except nats.js.errors.NotFoundError:
        await js.add_stream(api.StreamConfig(**wanted))
        return
    if name == subjects.EVENTS_STREAM:
        check_metadata(
            live.metadata or {},
            wanted["metadata"][subjects.PARTITIONS_METADATA],
            wanted["metadata"][subjects.INSTALLATION_METADATA],
        )
        wanted["metadata"] = {**(live.metadata or {}), **wanted["metadata"]}
    differing = _differing(wanted, live)
    if not differing:
        return
    refusal = "the server kept the old value"
    # One setting at a time, so that a refusal names just what cannot be changed.
    for key in differing:
        try:
            live = (await js.update_stream(live.evolve(**{key: wanted[key]}))).config
        except nats.js.errors.APIError as error:
            refusal = str(error.description)
    if still := _differing(wanted, live):
        raise errors.MisconfiguredError(
            f"stream {name}: "
            + ", ".join(f"{k} is {v!r} and should be {wanted[k]!r}" for k, v in still.items())
            + f"; it cannot be changed in place ({refusal});"
            " remove the stream, or set it back, and start again (docs/operations.md)"
        )


def check_metadata(live: Mapping[str, str], wanted: str, installation: str | None) -> str:
    """Return the installation that the event stream belongs to, by its metadata.

    Raises:
        MisconfiguredError: if it was made with another number of partitions than `wanted`, or for another
            installation than the given one.
    """
    partitions = live.get(subjects.PARTITIONS_METADATA, "")
    if partitions != wanted:
        raise errors.MisconfiguredError(
            f"stream {subjects.EVENTS_STREAM} was made with {partitions or 'an unknown number of'} partitions,"
            f" not {wanted}; set SPUR_EVENTS_NATS_PARTITIONS to what it was made with"
        )
    owner = live.get(subjects.INSTALLATION_METADATA, "")
    if installation is not None and owner != installation:
        raise errors.MisconfiguredError(
            f"stream {subjects.EVENTS_STREAM} belongs to installation {owner or 'unknown'}, the database is"
            f" installation {installation}; point SPUR_EVENTS_DATABASE_URL and _NATS_URL at the same one"
        )
    return owner


async def ensure_consumer(js: JetStreamContext, name: str, filters: list[str], ack_wait_s: float) -> None:
    """Create a durable pull consumer of the event stream, or bring its settings up to date.

    Raises:
        MisconfiguredError: naming the setting that cannot be changed in place.
    """
    wanted = {
        **declared()["consumer"],
        "name": name,
        "durable_name": name,
        "filter_subjects": filters,
        "ack_wait": ack_wait_s,
    }
    refusal = "the server kept the old value"
    try:
        live = (await js.add_consumer(subjects.EVENTS_STREAM, api.ConsumerConfig(**wanted))).config
    except (nats.js.errors.BadRequestError, nats.js.errors.ServerError) as error:
        refusal = str(error.description)
        live = (await js.consumer_info(subjects.EVENTS_STREAM, name)).config
    if live is not None and (still := _differing(wanted, live)):
        raise errors.MisconfiguredError(
            f"consumer {name} of stream {subjects.EVENTS_STREAM}: "
            + ", ".join(f"{k} is {v!r} and should be {wanted[k]!r}" for k, v in still.items())
            + f"; it cannot be changed in place ({refusal}); delete the consumer and start again:"
            " nothing is lost, every account is looked at afresh (docs/operations.md)"
        )


def _differing(wanted: Mapping[str, Any], live: object) -> dict[str, Any]:
    """Return the live values that are not as declared; a default that the server leaves out counts as equal."""
    differing: dict[str, Any] = {}
    for key, value in wanted.items():
        if key == "name":
            continue
        current = getattr(live, key, None)
        current = getattr(current, "value", current)  # an enumeration, or a plain value
        if current is None and value in (False, -1, "", None):
            continue
        if key == "metadata":
            if not value.items() <= (current or {}).items():
                differing[key] = current
        elif current != value:
            differing[key] = current
    return differing
