"""Text environments: reset, step, close. Each lives in a process of its own, away from the node.

`protocol` is what an environment is, `adapters` are those of other packages, `pool` has the
processes, `worker` runs in them, `workflow` lets a policy play.
"""
