"""Exchanges between the ranks of a group: sums, and what stands beside them in a model's layer.

Make a :class:`Communicator` of a torch.distributed process group, once, on every rank. Its methods
are called by all its ranks in the same order, as those of torch.distributed are.
"""

from .communicator import Communicator

__all__ = ["Communicator"]
