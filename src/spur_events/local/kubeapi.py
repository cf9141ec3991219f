"""A few requests to a kube-apiserver of ours, without a Kubernetes client: is it ready, does it work.

Used by controlplane.py and the tests of this package. The services have consumers.kube for theirs.
"""

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Api:
    """JSON requests with a bearer token; one connection each, for they are few."""

    def __init__(self, port: int, ca: Path, token: str) -> None:
        self._port = port
        self._ca = ca
        self._token = token

    def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float = 10
    ) -> tuple[int, Any]:
        """Send one request; return the status and the decoded answer (text where it is not JSON).

        Raises:
            OSError: if the server cannot be reached.
        """
        with self._connection(timeout_s) as connection:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {**headers, "Content-Type": "application/json", "Accept": "application/json"},
            )
            try:
                answer = connection.getresponse()
                text = answer.read()
            except http.client.HTTPException as error:
                raise ConnectionError(f"no proper answer: {error}") from error
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode(errors="replace")

    @contextlib.contextmanager
    def _connection(self, timeout_s: float) -> Iterator[http.client.HTTPSConnection]:
        connection = http.client.HTTPSConnection(
            "127.0.0.1",
            self._port,
            timeout=timeout_s,
            context=ssl.create_default_context(cafile=str(self._ca)),
        )
        try:
            yield connection
        finally:
            connection.close()
