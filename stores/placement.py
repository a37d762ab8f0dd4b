"""placement: says where in a Ray cluster the actors run of which the cluster has one each.

They run on the head node, like Serve's controller: then the loss of another node never ends one of them, and the loss of
the head ends the cluster anyway. Apps are deployed through the head's dashboard, which often listens on that machine only.
"""

from __future__ import annotations

ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray resources that only the head node has."""
