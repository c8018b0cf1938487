"""What a run will need, before it runs: memory, operations and bytes by rank, and whether the cluster would refuse it.

Read next: docs/planning.md.
"""
