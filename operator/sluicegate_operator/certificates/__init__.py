"""The webhook's certificates: an authority of the operator's own, rotated without a gap.

`authority` issues, `secret` reads and writes the layout, `plan` says when, `keeper` does it in the reconciler's
process. The webhook's process only serves with the files (`sluicegate_operator.webhook.tls`). Where cert-manager
does all that, none of this runs.
"""
