"""Injection: from a Pod and the policy that selects it to the Pod with a gate in front of its engine.

`inject(pod, policy, context)` is pure: JSON and policy in, JSON, warnings and reasons out. `json_patch` tells the
difference as the webhook has to. docs/injection.md says in words what is done and what is left alone.

lexer.py, shell.py     a shell script: its words, its commands
start.py               how a container starts; images.py: what its image adds
engines.py             engines' programs, flags, variables and defaults
listening.py           where an engine listens, and what moves it; edits.py: doing it
choice.py              which container is the engine
takeover.py            Auto, NamedPort or Explicit: the plan
probes.py, sidecar.py  what follows from it: probes and hooks, the gate's container, the end of the pod
inject.py              all of it in order; patch.py: the difference; context.py: what goes in and comes out
"""

from sluicegate_operator.injection.context import InjectionContext, InjectionResult
from sluicegate_operator.injection.inject import inject
from sluicegate_operator.injection.patch import json_patch

__all__ = ["InjectionContext", "InjectionResult", "inject", "json_patch"]
