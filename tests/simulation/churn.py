"""Peers that come and go by chance, at a rate that does not depend on how long they have been here."""

from __future__ import annotations

import asyncio

from tests.simulation.peers import Crowd, Peer


class Churn:
    """`per_hour`: the share of the swarm that leaves in an hour; as many come. `silent`: the share of those that leave
    who say nothing."""

    def __init__(self, crowd: Crowd, *, per_hour: float, silent: float = 1.0, spared: frozenset[Peer] = frozenset()):
        self._crowd = crowd
        self._per_s = per_hour / 3600
        self._silent = silent
        self._spared = spared
        self._coming: set[asyncio.Task[None]] = set()
        self.n_gone = 0
        self.n_come = 0

    async def run(self) -> None:
        """Until cancelled."""
        rng = self._crowd.network.rng
        try:
            while True:
                await asyncio.sleep(rng.expovariate(self._per_s * len(self._crowd.living)))
                self._one_leaves()
                task = self._crowd.loop.create_task(self._one_comes())
                self._coming.add(task)
                task.add_done_callback(self._coming.discard)
        finally:
            for task in sorted(self._coming, key=hash):
                task.cancel()

    def _one_leaves(self) -> None:
        rng = self._crowd.network.rng
        peer = rng.choice(self._crowd.living)
        if peer in self._spared:
            return
        self.n_gone += 1
        if rng.random() < self._silent:
            self._crowd.vanish([peer])
        else:
            self._crowd.living.remove(peer)
            task = self._crowd.loop.create_task(peer.leave())
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)

    async def _one_comes(self) -> None:
        await self._crowd.come()
        self.n_come += 1
