"""Checks that any implementation of the contract can be run against, in any language."""
