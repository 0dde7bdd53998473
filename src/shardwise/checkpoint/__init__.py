"""Checkpoints: saved under any layout, loaded under any other, nothing lost.

```python
from shardwise import checkpoint

state = {"model": model, "optimizer": optimizer, "step": 0}
newest = checkpoint.latest("runs/a")
if newest is not None:
    checkpoint.load(state, newest)             # whatever mesh and layout it was saved under
...
checkpoint.save(state, "runs/a", step=100, keep=3)
```

Importing this room also plugs ``DTensor`` into ``torch.distributed.checkpoint`` (``protocol.py``).
"""

from shardwise.checkpoint.background import Saving, async_save
from shardwise.checkpoint.export import save_safetensors
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.matching import LoadReport, Mismatch
import shardwise.checkpoint.protocol  # noqa: F401  DTensor learns torch's protocol
from shardwise.checkpoint.rng import RNG
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.series import latest, steps
from shardwise.checkpoint.state_dict import (
    SetReport,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardwise.checkpoint.storage import PhaseEvent, ReadEvent

__all__ = [
    "RNG",
    "LoadReport",
    "Mismatch",
    "PhaseEvent",
    "ReadEvent",
    "Saving",
    "SetReport",
    "StateDictOptions",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "latest",
    "load",
    "save",
    "save_safetensors",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "steps",
]
