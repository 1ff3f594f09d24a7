"""The core of Sluicegate: the decision, as a synchronous state machine.

Pure: it reads no clock, awaits nothing, draws no randomness of its own and imports nothing but the
standard library's pure parts. Events come in with `now` (seconds, monotonic); effects go out. The gate,
the simulator and the property tests run this same code.

`controller` is the way in; `vocabulary` has the words; `policy` the settings.
"""
