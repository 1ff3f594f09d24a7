"""The webhook: a stateless process that puts gates into pods as they are created.

review.py       the question and the answer, as the API server speaks
decide.py       what is answered, pure
policies.py     what is known of the policies; watch.py keeps it, by kube.py
tls.py          the certificate, taken anew when its files change
server.py       the two ports; metrics.py
settings.py     flags; run.py the process
"""
