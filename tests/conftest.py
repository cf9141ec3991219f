"""Fixtures: what they do is in support/servers.py. Unit tests use none of those that start a server."""

import gc
from collections.abc import AsyncIterator, Iterator

import pytest
from support import resyncs, servers
from support import site as sites

from spur_events.local.munge import Munge
from spur_events.local.nats import Nats
from spur_events.local.postgres import Postgres


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # an xdist worker inherits the run of pytest's main process
        servers.open_run()


def pytest_collection_finish() -> None:
    # What is there by now stays until the end; without it, a collection after a test (servers.own_nats) costs nothing.
    gc.freeze()


def pytest_unconfigure() -> None:
    servers.close_run()


@pytest.fixture
def unique() -> str:
    """Short random lower-case label, to keep the names of tests on a shared server apart."""
    return servers.unique()


@pytest.fixture
def database_url() -> Iterator[str]:
    """URL of a fresh database with our migrations, on the shared PostgreSQL."""
    with servers.database(migrated=True) as url:
        yield url


@pytest.fixture
def empty_database_url() -> Iterator[str]:
    """URL of a fresh empty database, on the shared PostgreSQL."""
    with servers.database(migrated=False) as url:
        yield url


@pytest.fixture
def postgres_server() -> Iterator[Postgres]:
    """Yield a PostgreSQL of this test's own, which it may kill and start again."""
    with servers.own_postgres() as server:
        yield server


@pytest.fixture
def nats_server() -> Iterator[Nats]:
    """Yield a nats-server of this test's own, which it may kill and start again."""
    with servers.own_nats() as server:
        yield server


@pytest.fixture
def munge_server() -> Iterator[Munge]:
    """Yield a munged of this test's own."""
    with servers.own_munge() as server:
        yield server


@pytest.fixture(scope="session")
def control_plane() -> servers.Cluster:
    """Shared Kubernetes control plane; `.kubeconfig` is the administrator's file."""
    return servers.shared_control_plane()


@pytest.fixture
async def site(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> AsyncIterator[sites.Site]:
    """Yield a running pipeline with one cluster, all of it this test's own."""
    given = sites.config(database_url, nats_server, control_plane, unique)
    async with resyncs.running(given, unique) as found:
        yield found
