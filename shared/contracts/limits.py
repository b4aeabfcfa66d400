"""Every bound with its unit and reason. A wait, queue, buffer, retry or loop takes its bound from here."""

from __future__ import annotations

from typing import Final

# -- statements ------------------------------------------------------------------------------------------------------
TAG_TTL_S: Final = 60
"""A revocation that the broadcast missed is over after this long."""
REQUEST_DEADLINE_S: Final = 600
"""DeepSeek closes a request whose inference has not started in ten minutes (reference, row 47)."""
SETTLE_ALLOWANCE_S: Final = 3_600
"""A grant stays good for settlement this long after the deadline: a billing outage must not lose money."""
CLOCK_SKEW_S: Final = 5
NAMESPACE_KEY_TTL_S: Final = 300
"""How long a worker may keep a namespace key in memory: minutes, so that dropping the row erases a cache soon."""

# -- requests --------------------------------------------------------------------------------------------------------
BODY_BYTES_MAX: Final = 32 * 2**20
USER_ID_BYTES_MAX: Final = 512
ACCOUNT_CONCURRENCY_DEFAULT: Final = 500
"""As DeepSeek's pro model per account (reference, row 48)."""
QUEUED_REQUESTS_MAX: Final = 4_096
"""Requests waiting in one gateway, over all accounts; beyond it 503."""
STREAM_BUFFER_TOKENS_MAX: Final = 4_096
"""Tokens that a slow client may lag behind before it is disconnected."""
KEEP_ALIVE_S: Final = 10.0
"""Interval of keep-alive comments (stream) or blank lines (whole) while nothing else is sent."""

# -- bus -------------------------------------------------------------------------------------------------------------
MESSAGE_BYTES_MAX: Final = 8 * 2**20
"""A million packed token ids twice over."""
WORK_MESSAGES_MAX: Final = 8_192
WORK_BYTES_MAX: Final = 2 * 2**30
WORK_AGE_MAX_S: Final = REQUEST_DEADLINE_S
WORK_DUPLICATE_WINDOW_S: Final = 120
WORK_ACK_WAIT_S: Final = 15.0
"""A dead worker's request is delivered again after this long; three lease renewals fit in."""
LEASE_RENEW_S: Final = 4.0
WORK_DELIVERIES_MAX: Final = 5
"""A request that kills a worker each time stops after this many tries."""
PUBLISH_TIMEOUT_S: Final = 5.0
RPC_TIMEOUT_S: Final = 3.0
DRAIN_TIMEOUT_S: Final = 4.0
"""nats-py's drain waits its whole time-out when one unread message sits in a pull subscription."""
AT_PATIENCE_S: Final = 1.0
"""How long work waits for the worker that holds its prefix before it goes to any."""

# -- leases and heartbeats -------------------------------------------------------------------------------------------
HEARTBEAT_S: Final = 1.0
PEER_LEASE_S: Final = 6.0
"""A gateway or worker that was silent this long is gone: its work is cancelled or given to another."""
FINAL_WAIT_S: Final = 5.0
"""How long a finished sequence waits for the gateway's final count before it settles the acknowledged one."""
RESEND_AFTER_S: Final = 1.0
"""A gap in the token messages is asked for again after this long without progress."""
TOKEN_LOG_MAX: Final = 131_072
"""Tokens that a worker keeps for a gateway that has not acknowledged them (the longest answer, at default length)."""
ACK_EVERY_TOKENS: Final = 16

# -- pool ------------------------------------------------------------------------------------------------------------
BLOCK_TOKENS_DEFAULT: Final = 64
CHAIN_KEYS_MAX: Final = 16_384
"""Keys in one lookup: a million tokens of 64-token blocks."""
RETENTION_AGENT_S: Final = 3 * 86_400
RETENTION_CHAT_S: Final = 7 * 86_400
TOUCH_INTERVAL_S: Final = 240
"""A prefix's expiry is extended at most this often: touching a row costs 0.6 to 3 kB of WAL."""
ORPHAN_GRACE_S: Final = 3_600
"""Objects without a row are left this long; commits of blocks put earlier than half of it are refused."""
HANDOFF_TTL_S: Final = REQUEST_DEADLINE_S + SETTLE_ALLOWANCE_S
LOOKUP_TIMEOUT_S: Final = 1.0
BLOCK_READ_BASE_S: Final = 1.0
BLOCK_READ_EACH_S: Final = 0.02
"""Reading n blocks may take base + n × each; whatever has not arrived is computed."""
BLOCK_WRITE_TIMEOUT_S: Final = 10.0
BLOCK_WRITES_IN_FLIGHT_MAX: Final = 16
BLOCK_READS_IN_FLIGHT_MAX: Final = 32
STORE_BREAKER_FAILURES: Final = 5
STORE_BREAKER_OPEN_S: Final = 5.0

# -- money -----------------------------------------------------------------------------------------------------------
NANO: Final = 1_000_000_000
"""Nano-units in one unit of a currency."""
SETTLE_RETRY_S: Final = 0.5
SETTLE_RETRY_MAX_S: Final = 5.0
