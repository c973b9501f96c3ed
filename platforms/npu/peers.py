"""torch's own operators on this device, for `isthmus bench kernels`."""
from __future__ import annotations

import torch

from ..torch_peers import Peers

peer = Peers(str(torch.accelerator.current_accelerator()), torch.accelerator.synchronize).peer
