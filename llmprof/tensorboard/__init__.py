"""The LLMPROF tab: what TensorBoard loads, what it serves, and how runs and forecasts reach it."""

PLUGIN_NAME = "llmprof"
"""Marks our data in event files, and names our routes."""
