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
BLOCK_READ_TIMEOUT_S: Final = 5.0
"""One read of a store; a reader of many blocks gives up earlier, by its own clock."""
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

# -- command line ----------------------------------------------------------------------------------------------------
RESTART_FIRST_S: Final = 0.5
RESTART_MAX_S: Final = 30.0
RESTART_RESET_S: Final = 60.0
"""A service that was ready this long is healthy again: its next crash is a first one."""
START_ATTEMPTS_MAX: Final = 3
"""A service that crashes this often before it was ever ready ends `deepserve up` with its reason."""
READY_TIMEOUT_S: Final = 180.0
"""From spawning a service to its readiness; generous for a slow disk, since a crash is seen at once anyway."""
READY_POLL_S: Final = 0.05
PROBE_TIMEOUT_S: Final = 2.0
CONVERT_TIMEOUT_S: Final = 900.0
STOP_TIMEOUT_S: Final = 30.0
"""From SIGTERM to SIGKILL for each service; longer than its own drain."""
SERVER_STOP_TIMEOUT_S: Final = 15.0
SERVER_READY_S: Final = 90.0
"""From starting an embedded server, or making its data, to its readiness; recovery after a crash included."""
SERVER_WATCH_S: Final = 0.5
"""How often the embedded NATS and Postgres are looked at; both are restarted on their port."""
DOWN_TIMEOUT_S: Final = 180.0
"""All services one after another, each with its whole stop time-out."""
ADMIN_TIMEOUT_S: Final = 10.0
ADMIN_ATTEMPTS_MAX: Final = 3
LOG_BYTES_MAX: Final = 64 * 2**20
"""A log file that grew past this is moved to `.1`: one old generation is kept."""
LOG_WATCH_S: Final = 30.0
LOG_TAIL_LINES: Final = 20

# -- workers ---------------------------------------------------------------------------------------------------------
STEPS_AHEAD_MAX: Final = 2
"""Steps that the engine may run ahead of the event loop: a cancel takes hold within this many."""
EXPORTS_PER_STEP_MAX: Final = 4
"""Blocks copied out of the engine between two steps: a copy costs about a millisecond, and answers wait for it."""
BLOCK_WRITES_WAITING_MAX: Final = 16_384
"""Full blocks of all running requests whose write has not begun: references to pinned pages, not bytes."""
HANDOFF_WAIT_S: Final = 15.0
"""How long a finished prefill waits for its blocks to be stored; what is not stored then is computed by decode."""
FINISH_FLUSH_S: Final = 0.25
"""How long the word that an answer ended may wait for its last block's row: the next turn often follows at once."""
CLOSED_LOG_S: Final = 15.0
"""How long a prefill keeps its sent tokens after the handoff, for a gateway that missed them."""
CLOSED_LOGS_MAX: Final = 4_096
CLAIM_RETRY_S: Final = 0.5
PAGES_WAIT_S: Final = 120.0
"""How long claimed work waits for pages before it ends with insufficient_system_resource."""
ADOPTING_MAX: Final = 4
"""Requests whose blocks one worker reads at a time: payloads on their way to pages are memory beside the pages."""
ANSWER_TOKENS_EXPECTED: Final = 1_024
"""Answer tokens that decode promises pages for at first: limits on answers are large, most answers are short."""
PREEMPTIONS_MAX: Final = 3
"""How often one answer may leave the engine for want of pages and come back before it ends for want of them."""
WORKER_GRACE_S: Final = 20.0
"""How long a draining worker finishes what runs; the rest is given back. Shorter than STOP_TIMEOUT_S."""
STOP_AGAIN_S: Final = 3.0
"""A task that did not end is cancelled again after this long: libraries swallow a cancel now and then. Longer than a
step of the engine, whose thread ends between two."""
PUBLISH_ATTEMPTS_MAX: Final = 5
PUBLISH_RETRY_S: Final = 0.2
NAMESPACE_KEYS_MAX: Final = 4_096
"""Namespace keys that a worker remembers at once."""

# -- cache_index -----------------------------------------------------------------------------------------------------
INDEX_STATEMENT_TIMEOUT_S: Final = 5.0
LOOKUP_STRETCH_KEYS: Final = 64
"""Keys in the first query of a lookup; each next stretch is twice as long, so that a miss costs one small query."""
COMMIT_BLOCKS_MAX: Final = 1_024
SWEEP_INTERVAL_S: Final = 30.0
SWEEP_BATCH_ROWS: Final = 500
SWEEP_BATCHES_MAX: Final = 20
"""Batches of one sweep; the rest waits for the next."""
HANDOFF_SWEEP_INTERVAL_S: Final = 600.0

# -- billing ---------------------------------------------------------------------------------------------------------
AMOUNT_NANO_MAX: Final = 10**18
"""A billion units: no single amount and no balance of a customer is larger. BIGINT holds nine times as much."""
PRICE_LINES_MAX: Final = 1_000
PRICE_MAX: Final = 1_000_000
"""Currency units per million tokens; times a million tokens it stays far below AMOUNT_NANO_MAX."""
TOKENS_MAX: Final = 2**31 - 1
"""Prompt or answer tokens that one request can name: an INTEGER column."""
HOLD_DEADLINE_MAX_S: Final = 86_400
"""The furthest deadline that a hold may have, whatever the gateway is set to: money is reserved until then."""
HOLD_SWEEP_INTERVAL_S: Final = 30.0
HOLD_SWEEP_BATCH: Final = 200
"""Holds expired in one sweep, each in its own transaction; the rest waits for the next."""
NAME_CHARS_MAX: Final = 128
"""Of a request or model in the books."""
ACCOUNT_NAME_CHARS_MAX: Final = 200
API_KEYS_PER_ACCOUNT_MAX: Final = 1_000
IDEMPOTENCY_KEY_CHARS_MAX: Final = 200
ADMIN_PAGE_ROWS_MAX: Final = 1_000
"""Rows in one answer of the administrator's API."""
ADMIN_BODY_BYTES_MAX: Final = 64 * 1024

# -- runtime ---------------------------------------------------------------------------------------------------------
SERVICE_DRAIN_S: Final = 25.0
"""From the signal to stop until what still runs is cancelled; below STOP_TIMEOUT_S, above WORKER_GRACE_S."""
CLOSE_TIMEOUT_S: Final = 6.0
"""For one adapter to close when the process ends; longer than DRAIN_TIMEOUT_S, which the bus needs."""
STATEMENT_BYTES_MAX: Final = 16_384
"""A tag or grant as text; what is longer is refused before any arithmetic."""
STATEMENTS_VERIFIED_MAX: Final = 8_192
"""Statements whose signature a process remembers to be good: checking one costs 50 to 100 µs."""
REVOCATIONS_MAX: Final = 65_536
REVOCATION_LIFE_S: Final = 2 * 86_400
"""A revocation is remembered this long: longer than any grant lives (a day's deadline and the allowance)."""
PULL_WAIT_S: Final = 2.0
"""Life of one pull request: how long a worker is deaf after JetStream was restarted under it."""
PULL_TURN_S: Final = 0.1
"""How long a worker with less room than subjects waits for one of them before it asks the next."""
PULL_IDLE_S: Final = 0.02
"""How often a worker without room is asked whether it has some again."""
PULL_RETRY_S: Final = 0.25
PULL_RETRY_MAX_S: Final = 5.0
AT_CONSUMER_IDLE_S: Final = 60.0
"""The consumer of a worker's own subject goes this long after its last pull."""
HANDLERS_IN_FLIGHT_MAX: Final = 256
"""Requests that one subscription of a queue group handles at once; the rest waits in the client's buffer."""
SUBSCRIPTION_MESSAGES_MAX: Final = 65_536
SUBSCRIPTION_BYTES_MAX: Final = 256 * 2**20
"""Messages that a subscription may lag behind; beyond it the client drops and logs (gaps are repaired)."""
CONNECT_TIMEOUT_S: Final = 60.0
"""How long a service waits at start for NATS or Postgres before it gives up with the reason."""
RECONNECT_WAIT_S: Final = 1
PING_INTERVAL_S: Final = 5
"""Two of them unanswered: the connection to NATS is dead, though nobody closed it."""
SEND_BUFFER_BYTES_MAX: Final = 32 * 2**20
"""What may be sent while NATS is away; beyond it sending is refused."""
ACK_TIMEOUT_S: Final = 2.0
STREAM_SETUP_TIMEOUT_S: Final = 10.0
ADVISORY_DELIVERIES_MAX: Final = 100
"""Tries to move a dead message away before it is left where it is."""
DEAD_LETTER_BATCH: Final = 16
HEALTH_REQUEST_TIMEOUT_S: Final = 5.0
HEALTH_REQUEST_BYTES_MAX: Final = 8_192
HEALTH_CONNECTIONS_MAX: Final = 64
LOOP_LOOK_S: Final = 0.001
"""Callbacks of the event loop shorter than this are not looked at; the watch is exact to this."""
LOOP_HELD_S: Final = 0.020
"""Processor time of one callback from which on the log tells of it."""
LOOP_SAY_EVERY_S: Final = 10.0
LOOP_STACK_MAX: Final = 32
"""Coroutines that wait for each other, looked into for a log line."""
PEERS_MAX: Final = 16_384
"""Gateways or workers that one process keeps track of."""
DATABASE_POOL_CONNECTIONS: Final = 8
DATABASE_POOL_EXTRA_CONNECTIONS: Final = 8
DATABASE_POOL_WAIT_S: Final = 3.0
ACTS_TOGETHER_MAX: Final = 16
"""Money acts of one account in one transaction: what fails with one is bounded, and so is the time to its commit."""
ACT_WAIT_S: Final = 3.0
"""For the turn of an account's acts; as long as a caller waits for the answer."""
DATABASE_STATEMENT_S: Final = 10.0
"""A statement, or a wait for a lock, longer than this is ended by Postgres."""
DATABASE_WAIT_S: Final = 0.25
"""Between two looks whether a database that is away has come."""
DATABASE_SCHEMA_S: Final = 60.0
"""Several processes make the same schema one after another."""
DATABASE_ATTEMPTS_MAX: Final = 5
"""Tries of a transaction that Postgres ended for a deadlock or a serialisation conflict."""
DATABASE_RETRY_S: Final = 0.01
STORE_THREADS: Final = 8
"""Threads of a directory store: reads and writes of files block."""
STORE_QUEUE_MAX: Final = 256
"""Operations that wait for a thread of the store or run in one; beyond it the store is overloaded."""
STORE_FREE_BYTES_MIN: Final = 512 * 2**20
"""Writes are refused below this much free space: a full disk would take Postgres and JetStream down as well."""
STORE_TEMPORARY_AGE_S: Final = 3_600.0
"""A temporary file of a write that never finished is removed at this age."""
OBJECT_BYTES_MAX: Final = 64 * 2**20

# -- gateway ---------------------------------------------------------------------------------------------------------
TAGS_CACHED_MAX: Final = 65_536
TAG_RENEW_S: Final = 5.0
"""A tag is renewed this long before it expires, so that it is still good when billing reads it."""
RETRY_AFTER_S: Final = 2
"""What Retry-After says where nothing better is known."""
ENCODE_INLINE_CHARS: Final = 2_048
"""Longer request bodies are converted, rendered and encoded in a thread, beside the event loop."""
LONG_BODY_BYTES: Final = 256 * 1024
"""Longer request bodies are refused early when they cannot fit, and wait for a thread of their own kind."""
LONG_BODIES_AT_ONCE: Final = 2
"""Threads for long bodies: what waits for one is bounded by CALLS_MAX and by each account's concurrency."""
BODY_PARTS_MAX: Final = 16_384
"""Content parts, tools and tool calls of one long body: converting each costs 10 µs with the interpreter lock held."""
ENCODE_SLICE_CHARS: Final = 64 * 1024
"""A prompt that is likely too long is counted in slices of this length, so that counting can stop."""
TOKEN_CHARS_USUAL: Final = 6
"""A prompt with more characters than this per token of the context is counted before it is encoded whole."""
CUT_SLACK_TOKENS: Final = 64
"""Tokens by which a slice may count more than the same text does inside its prompt."""
CLAIM_PATIENCE_S: Final = WORK_ACK_WAIT_S + 5.0
"""Published work that no worker claims this long, while one had room, is lost and published again."""
ATTEMPTS_MAX: Final = 4
"""Publishes of one request, the one to a preferred worker included; then 503."""
ENDED_KEPT_S: Final = WORK_ACK_WAIT_S * (WORK_DELIVERIES_MAX + 1)
"""How long an ended request still answers claims: a worker that died before it settled is replaced within this."""
ENDED_KEPT_MAX: Final = 16_384
AFFINITY_ENTRIES_MAX: Final = 65_536
"""Prompt ends whose prefill worker a gateway remembers."""
RELEASE_ATTEMPTS_MAX: Final = 8
"""Tries to give a hold back; then billing's own reconciliation ends it."""
RELEASE_RETRY_S: Final = 0.5
CLIENT_WRITE_TIMEOUT_S: Final = 60.0
"""One write that a client does not take this long ends the request as a disconnect does."""
CALLS_MAX: Final = 16_384
"""HTTP calls under way in one gateway, streams included; beyond it 503."""
BODY_TIMEOUT_S: Final = 60.0
"""From a request's headers to the last byte of its body."""
LISTEN_BACKLOG: Final = 2_048
"""Connections that wait to be accepted."""
HTTP_IDLE_S: Final = 75.0
"""An idle connection is kept this long: longer than load balancers keep theirs, so that they close first."""
