"""expertd: a server for the expert layers of Mixture-of-Experts models.

`kernels` and `service` are links to the folders at the root. Both use the modules here, which do not
import torch, so that settings and checkpoints can be checked before torch is loaded.
"""

from importlib.metadata import version

__version__ = version("expertd")
