"""The API server: calls, and what changes there.

client.py      get, list, apply, patch, create, replace, delete; plain JSON in and out
resources.py   the kinds that are spoken of, and their paths
watch.py       kopf: what changes, as events

The connection (address, authority, a token that is read again when it was replaced, kubeconfig) is lightkube's. Its
typed objects are not used: everything written here comes from pure builders as plain data, and is compared as such.
kopf watches and nothing else: it has no handler for which it would put finalizers or annotations on objects.
"""
