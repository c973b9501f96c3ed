"""torch's own operators, for `isthmus bench kernels`."""
from __future__ import annotations

from ..torch_peers import Peers

peer = Peers("cpu").peer
