"""The simulator: an engine, its clients and whatever stands between them, in virtual time.

What a user runs before touching production, and what judges each rule of the gate. From the ground up:

    engine     the engine model: continuous batching, chunked prefill, KV blocks, prefix cache, slots
    work       what a request's work is worth, in seconds of that engine
    traces     recorded traffic: three traces in the package, or a CSV of the user's own
    arrivals   generated traffic: Poisson, Gamma, ON/OFF
    workload   demands made from either: classes, clients, times
    clients    patience, retries, closed loops
    world      the event loop that brings them together
    gate       the gate in it: the very Controller of `sluicegate_core`
    rivals     what others put there: caps, buckets, adaptive limits, priority
    measures   what came out
    bound      what no policy could exceed
    scenarios  the settings that are compared; `report` shows them

Invariants: one seed gives one result; nothing here reads a clock; the gate in the simulator is the gate in the pod,
driven by the same calls with the same information at the same (virtual) times.
"""
