"""Random numbers that do not depend on mesh, layout or world size: what to draw, and two streams.

```text
draw.py     draw, draw_bernoulli      a rank's box of a random global tensor
            torch_stream.py           stream "torch":  bit-equal to plain torch on one CPU
            philox.py                 stream "philox": counter-based, O(local)
dropout.py  dropout_mask, ...         the masks that torch's dropouts multiply with
scope.py    rng, manual_seed, ...     which stream is in force; the generator behind both
kinds.py    Draw                      torch's random methods, as data
box.py      Box                       a rank's part of a global tensor
```

Both streams start from torch's default CPU generator. The ranks' generators must be in step: each
rank makes the same draws in the same order from the same seed. This room cannot see other ranks,
so an upper floor compares their `generator_fingerprint`.
"""

from shardwise.random.box import Box as Box
from shardwise.random.draw import draw as draw, draw_bernoulli as draw_bernoulli
from shardwise.random.dropout import (
    alpha_dropout_terms as alpha_dropout_terms,
    dropout_mask as dropout_mask,
    feature_box as feature_box,
    native_dropout_mask as native_dropout_mask,
)
from shardwise.random.kinds import Draw as Draw
from shardwise.random.philox import draw_philox as draw_philox, philox4x32 as philox4x32
from shardwise.random.scope import (
    Like as Like,
    generator_fingerprint as generator_fingerprint,
    manual_seed as manual_seed,
    next_key as next_key,
    rng as rng,
    stream_in_force as stream_in_force,
)
from shardwise.random.torch_stream import draw_torch as draw_torch
