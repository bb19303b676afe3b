"""Prompt selectors: which prompt is worth its rollouts now."""
