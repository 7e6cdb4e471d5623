"""Serves the API over HTTP inside the peer's own event loop.

The rule this file keeps: the peer owns the process. uvicorn gets a socket that is bound already and no say over
signals, logging or the loop; `stop` returns only when no connection, task or socket of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Collection, Iterator, Mapping

import uvicorn

from meshswarm.api.answer import Running
from meshswarm.api.app import Query, View, create_app
from meshswarm.api.errand import Errand
from meshswarm.config import Address
from meshswarm.errors import ConfigError
from meshswarm.head.request import Generator

_BACKLOG = 128
_MAX_HEADER_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75  # longer than the idle time of usual clients' pools, so that they close first
_CLOSE_PATIENCE_S = 2.0
_ABORT_PATIENCE_S = 1.0


class ApiServer:
    """`bind`, then `start`, then `stop`. Between `bind` and `start` clients wait instead of being refused."""

    def __init__(self, listener: socket.socket, address: Address, api_key: str | None) -> None:
        self.address = address
        self._listener = listener
        self._api_key = api_key
        self._running = Running()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    def bind(cls, address: Address, *, api_key: str | None) -> ApiServer:
        """Takes the port; port 0 takes a free one, and `address` of the result says which.

        Raises ConfigError when the port is taken or the address is not this machine's, and when others could reach an
        endpoint that asks for no key.
        """
        if api_key is None and not address.is_loopback:
            raise ConfigError(
                f"the API would listen on {address}, where other machines can reach it, without an API key; "
                "give it a key, or a loopback address such as 127.0.0.1"
            )
        listener = _listen(address)
        return cls(listener, Address(address.host, listener.getsockname()[1]), api_key)

    @property
    def url(self) -> str:
        """The endpoint's root, as a program on this machine reaches it."""
        if self.address.is_unspecified:
            return f"http://{Address('::1' if ':' in self.address.host else '127.0.0.1', self.address.port)}"
        return f"http://{self.address}"

    @property
    def base_url(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"

    @property
    def n_running(self) -> int:
        """Answers that are being written."""
        return self._running.n_answers

    async def start(
        self,
        generator: Generator,
        *,
        allowed_hosts: Collection[str] = (),
        views: Mapping[str, View] | None = None,
        queries: Mapping[str, Query] | None = None,
        errands: Mapping[str, Errand] | None = None,
    ) -> None:
        """Answers requests from here on; `allowed_hosts` and the further paths as `create_app` says. The names by
        which other machines know this one are allowed when they can reach it."""
        hosts = {*allowed_hosts, *_own_names(self.address)}
        app = create_app(
            generator,
            api_key=self._api_key,
            allowed_hosts=hosts,
            views=views,
            queries=queries,
            errands=errands,
            running=self._running,
        )
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        )
        self._server = _Server(config)
        serving = self._serving = asyncio.create_task(self._server.serve([self._listener]), name="api")
        ready = asyncio.create_task(self._server.ready.wait())
        try:
            await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if serving.done():
            await serving

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Takes no more connections, lets running answers end for `drain_s`, ends the others with an error that says
        why, and closes everything. Safe to call twice, and before `start`."""
        server, serving = self._server, self._serving
        self._server = self._serving = None
        if server is None or serving is None:
            self._listener.close()
            return
        try:
            server.leave()
            await self._running.drain(drain_s)
            await asyncio.wait({serving}, timeout=_CLOSE_PATIENCE_S)
        finally:
            await _end(server, serving)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and woken by an event instead of ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """`on_tick` keeps the Date header right; it wants to be called with a multiple of 10 once a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leaving.wait()


async def _end(server: _Server, serving: asyncio.Task[None]) -> None:
    """Ends what is left when the patience is over: clients that do not read, and requests that do not end. Losing its
    connection lets a request end in good order; only one that still does not is cancelled."""
    tasks = set(server.server_state.tasks)
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    server.force_exit = True
    if tasks:
        _, stuck = await asyncio.wait(tasks, timeout=_ABORT_PATIENCE_S)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
    await serving


def _own_names(address: Address) -> set[str]:
    """The names by which other machines know this one; on loopback there are none."""
    if address.is_loopback:
        return set()
    name = socket.gethostname().lower()
    return {name, f"{name.partition('.')[0]}.local", *([] if address.is_unspecified else [address.host])}


def _listen(address: Address) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"the API's address {address} cannot be resolved: {error.strerror or error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two programs share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)  # at once: only listening takes the port for good
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _cannot_listen(address, error) from error
    return listener


def _cannot_listen(address: Address, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {address.port} of {address.host}, where the API would listen, is taken by another program; "
            "stop that one, or choose another port (0 takes a free one)"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"the API cannot listen on {address}: {address.host} is not an address of this machine")
    return ConfigError(f"the API cannot listen on {address}: {error.strerror or error}")
