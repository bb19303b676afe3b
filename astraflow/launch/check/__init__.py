"""Checks of a recipe before anything is started: all faults at once, each with its cure."""

from astraflow.launch.check.recipe import check_recipe
from astraflow.launch.check.report import Finding, Report, Severity

__all__ = ["Finding", "Report", "Severity", "check_recipe"]
