"""What people see of it: the dashboard and the alerts that the chart ships, generated from lists in Python.

    panels     which questions the dashboard answers, and with which queries
    dashboard  the same as Grafana's JSON, by Grafana's foundation SDK
    rules      which alerts there are, as groups of Prometheus rules

`python -m sluicegate_operator.observability` writes both into charts/sluicegate; a test holds the files to it. The
running operator imports nothing from here: the SDK is a tool of development.

Queries rest on two labels that the chart's monitors put on what they scrape: `namespace` and `policy` (for gates, from
the pod's annotation; the operator's own metrics have them already, and are scraped with `honorLabels`).
"""
