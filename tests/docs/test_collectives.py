"""What a Megatron block sends, counted: two all-reduces forward, two backward, and bucketed gradients."""

from collections import Counter

import pytest
import torch.nn.functional as F

import shardwise
from shardwise import Shard

BATCH, CONTEXT, WIDTH = 8, 16, 32


def sent(demo, layers, shape=(2, 2)):
    """(collective, axes) -> [calls, bytes] of rank 0, forward and backward."""

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = demo.distribute(demo.GPT(CONTEXT, WIDTH, 4, layers, dropout=0.0), mesh)
        tokens = demo.stdlib_text()[: BATCH * CONTEXT].long().view(BATCH, CONTEXT)
        tokens = shardwise.distribute_tensor(tokens, mesh, [Shard(0)])
        with shardwise.CommLog() as forward:
            loss = F.cross_entropy(model(tokens).view(-1, demo.VOCAB), tokens.view(-1))
        with shardwise.CommLog() as backward:
            loss.backward()
        return counted(forward), counted(backward)

    everyone = shardwise.simulate(rank, shape[0] * shape[1])
    assert all(counts == everyone[0] for counts in everyone), "ranks send different things"
    return everyone[0]


def counted(log):
    calls, size = Counter(), Counter()
    for event in log.events:
        calls[event.kind, event.tag] += 1
        size[event.kind, event.tag] += event.bytes
    return calls, size


def one_block(demo, which, shape=(2, 2)):
    """What a third block adds to two: calls and bytes, forward (0) or backward (1)."""
    two, three = sent(demo, 2, shape)[which], sent(demo, 3, shape)[which]
    return [{k: b[k] - a[k] for k in a | b if b[k] != a[k]} for a, b in zip(two, three)]


# Bytes in float32 on a rank with half of the batch; what an all-reduce over two ranks receives.
ACTIVATION = BATCH // 2 * CONTEXT * WIDTH * 4


def test_a_block_sends_two_all_reduces_forward(demo):
    calls, size = one_block(demo, 0)
    assert calls == {("all_reduce", "tp"): 2}
    assert size == {("all_reduce", "tp"): 2 * ACTIVATION}


def test_a_block_sends_two_all_reduces_backward(demo):
    calls, size = one_block(demo, 1)
    assert calls == {("all_reduce", "tp"): 2}
    assert size["all_reduce", "tp"] == 2 * ACTIVATION


def test_gradients_are_reduced_in_buckets(demo):
    calls, _ = sent(demo, 2)[1]
    assert calls["all_reduce", "dp"] == 1, "the matrices that are cut over tp, in one bucket"
    assert calls["all_reduce", "dp*tp"] == 1, "what is replicated, in one bucket"
    _, more = one_block(demo, 1)
    # q k v o up down with the biases of q k v up; two layer norms with the biases of o and down
    matrices = (12 * WIDTH * WIDTH + 7 * WIDTH) // 2 * 4
    vectors = 6 * WIDTH * 4
    assert more["all_reduce", "dp"] == matrices
    assert more["all_reduce", "dp*tp"] == 2 * 3 * vectors // 4


def test_nothing_but_all_reduces(demo):
    for calls, _ in sent(demo, 2):
        assert {kind for kind, _ in calls} == {"all_reduce"}


@pytest.mark.parametrize(("shape", "axis"), [((4, 1), "dp"), ((1, 4), "tp")])
def test_one_axis_alone(demo, shape, axis):
    """Data parallel sends gradients only; tensor parallel the four all-reduces of a block."""
    forward, _ = one_block(demo, 0, shape)
    backward, _ = one_block(demo, 1, shape)
    expected = {("all_reduce", "tp"): 2} if axis == "tp" else {}
    assert forward == expected
    assert backward == expected
