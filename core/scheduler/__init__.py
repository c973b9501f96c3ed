"""Which requests are computed next, and in which order; `policy.py` registers the policies."""

SCHEDULE_POLICIES = ("deadline", "dfs-weight", "fair", "fcfs", "lpm", "priority", "shortest-first")
