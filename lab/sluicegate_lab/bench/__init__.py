"""The data path measured against its peers: who does what in this package.

- `reactor`: one thread's sockets and schedules, without a timer that is coarser than what is measured.
- `upstream`: the stub engine behind every proxy; `clients`: the load in front of it. Both in one process.
- `processes`: starts a proxy on its core, reads its CPU time and memory, ends it. `peers`: what is started.
- `loads`: one window of one kind of load through one proxy. `rounds`: windows interleaved, ratios, spread.
- `bars`: the promises and whether they hold. `report`: the table, the JSON object, docs/benchmarks.md.
- `decision`: the cost of parsing and deciding, without sockets.

The command is `sluicegate_lab.bench_datapath`. Everything listens on 127.0.0.1 alone.
"""


class BenchError(Exception):
    """The measurement cannot be made, or would not mean what it says; one line for the user."""
