"""The reconciler: one level-based `reconcile(policy)`: observe, plan, apply.

views.py         objects of the cluster, cut down to what is asked of them
cluster.py       all of them, kept by events and by listing: what `observe` reads
document.py      what a policy's ConfigMap holds
observed.py      all that a plan follows from
gating.py        which pods are gated, which are not, why, and the command that repairs it
plan.py          from what is observed to what is to be written: pure
rollout.py       restarting workloads whose pods have no gate: pure
apply.py         the writes
owners.py        whose pods they are
scaling.py       demand posted for each policy, and its ScaledObject
installation.py  what all policies share: certificates and the webhook configuration
queue.py         which policy is due, one turn at a time
reconciler.py    the turns
health.py        whether reconciliation progresses
process.py       the process
"""
