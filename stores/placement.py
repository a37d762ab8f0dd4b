"""placement: where in a Ray cluster the actors live of which it has one.

On the head node, as Serve's controller does: the loss of another node then never takes one of them along, and the loss
of the head ends the cluster anyway. The head's dashboard, which the list of apps deploys through, is often bound to
that machine only.
"""

from __future__ import annotations

ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray resources that only the head node has."""
