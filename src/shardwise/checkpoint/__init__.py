"""Checkpoints: saved under any layout, loaded under any other.

Importing this room also plugs ``DTensor`` into ``torch.distributed.checkpoint`` (``protocol.py``).
"""

import shardwise.checkpoint.protocol  # noqa: F401  DTensor learns torch's protocol
