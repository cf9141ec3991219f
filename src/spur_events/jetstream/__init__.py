"""The only package that imports nats: the bus as the rest of the project sees it.

Streams and buckets are declared in deploy/nats/topology.json and made or reconciled by `Bus.ensure_topology`.
"""

from spur_events.jetstream.bus import (
    Bus,
    Damaged,
    Entry,
    Mark,
    Message,
    MissingError,
    Pull,
    StaleError,
    connect,
)

__all__ = ["Bus", "Damaged", "Entry", "Mark", "Message", "MissingError", "Pull", "StaleError", "connect"]
