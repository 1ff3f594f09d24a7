"""The operator: reconciler and webhook of AdmissionPolicies on Kubernetes.

`python -m sluicegate_operator reconciler` and `python -m sluicegate_operator webhook` are its two processes. It
shares the policy's model with the gate (`sluicegate_core`) and knows nothing else of it.
"""
