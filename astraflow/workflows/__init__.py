"""Workflows: code that turns a prompt into a rollout, and what it needs around it.

A workflow is a class with an `async run(episode) -> Score`; `protocol` has the words,
`registry` finds it by name, `runner` turns one run of it into a rollout.
"""
