"""Checks of a recipe before anything is started: all faults at once, each with its cure."""

from astraflow.launch.check.recipe import check_recipe
from astraflow.launch.check.subject import CheckReport, Finding, Severity

__all__ = ["CheckReport", "Finding", "Severity", "check_recipe"]
