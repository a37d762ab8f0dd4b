"""plain_text: a paragraph by which model folders are tried and recognised."""

from __future__ import annotations

PARAGRAPH = (
    "The sun had just gone down behind the hills when the two children came home from school. Their mother was in the kitchen, "
    "and the smell of fresh bread filled the whole house. They put their bags on the floor, washed their hands, and sat down at "
    "the table. While they were eating, they told her about the new teacher, who had come from a small town near the sea."
)
"""Plain English, written for Troupe."""
