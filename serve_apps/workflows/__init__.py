"""Workflows that ship with Troupe, one file each. Yours may live anywhere on PYTHONPATH, and needs one import:

from serve_apps import Agent, Outcome, Tags, Tool, Workflow, together
"""
