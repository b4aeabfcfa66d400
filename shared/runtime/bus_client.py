"""The NATS client with three faults of nats-py 2.16 mended. Part of the bus; like it, one of the few that know NATS.

What we build on: after `flush` the server has acted on everything sent before (a listener is known, a call back has
been heard); a `flush` that was cancelled harms nobody; `close` ends a client whose server has gone. Delete this file
when the library keeps these promises: `tests/integration/test_runtime_bus.py` tells.
"""

from __future__ import annotations

import asyncio

from nats.aio.client import PING_PROTO, Client


class OrderedClient(Client):
    """As its base, but for the promises above."""

    async def close(self) -> None:
        """The base breaks off in the middle when it cannot write what was still to be sent."""
        if not self.is_connected:
            self._pending = []
            self._pending_data_size = 0
        try:
            await super().close()
        except OSError:
            self._status = Client.DISCONNECTED  # Else the base takes itself for closed.
            await super().close()

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        """The base writes the ping at once, ahead of commands that still wait to be written: its answer would prove
        nothing about them."""
        if not self.is_connected:
            await super()._send_ping(future)
            return
        self._pongs.append(future if future is not None else asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        """The base sets the result of a future that its waiter has cancelled; the error ends the reading of the
        connection, which then is deaf until the next missed pings."""
        if self._pongs and self._pongs[0].done():
            del self._pongs[0]
            self._pongs_received += 1
            self._pings_outstanding = 0
        else:
            await super()._process_pong()
