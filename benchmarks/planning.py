"""What planning a route costs: all pairs of layouts over {R, S(0), S(1), P} on meshes of one process.

Nothing is kept between two searches, so each one plans anew. CPU time, and the best of some repetitions, for
machines that do other things too. Then what a route costs that was planned before.

    python benchmarks/planning.py                       # about a minute, markdown
    python benchmarks/planning.py --repeat 1 --mesh 2,2
"""

import argparse
import gc
import itertools
import statistics
import time

import torch

from shardwise import Partial, Replicate, Shard
from shardwise.layout.layout import Layout
from shardwise.route.cost import cost_of
from shardwise.route.search import Search, route
from shardwise.testing.strategies import mesh_of

KINDS = [Replicate(), Shard(0), Shard(1), Partial()]
MESHES = [(4,), (2, 2), (2, 4), (2, 2, 2), (64,), (1024,), (8, 8), (32, 32), (8, 8, 16)]
SIZES = {"even": (1024, 2048), "uneven": (1023, 2047), "small": (7, 5)}
FEW = 300  # pairs on the large meshes


def best(call, repeat):
    took = []
    for _ in range(repeat):
        start = time.thread_time()
        call()
        took.append(time.thread_time() - start)
    return min(took)


def row(mesh_shape, size, what, repeat):
    mesh = mesh_of(mesh_shape)
    kinds = itertools.product(KINDS, repeat=len(mesh_shape))
    layouts = [Layout.of(mesh, k, size, dtype=torch.float32) for k in kinds]
    pairs = list(itertools.permutations(layouts, 2))
    if len(mesh.ranks) > 8:
        pairs = pairs[:: -(-len(pairs) // FEW)]
    cost = cost_of(mesh, None, what)
    new, again, edges = [], [], []
    for a, b in pairs:
        found = Search(a, b, cost)
        found.run()
        edges.append(found.offered)
        new.append(best(lambda a=a, b=b: _plan(a, b, cost), repeat))
        route(a, b, None, what)
        again.append(best(lambda a=a, b=b: route(a, b, None, what), repeat))
    us = [statistics.median(again) * 1e6, max(again) * 1e6]
    return len(pairs), statistics.median(new) * 1e3, max(new) * 1e3, max(edges), *us


def _plan(a, b, cost):
    found = Search(a, b, cost)
    found.run()
    return found.moves()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--mesh", nargs="*", help="as 2,2; all of them if not given")
    args = parser.parse_args()
    meshes = [tuple(map(int, m.split(","))) for m in args.mesh or ()] or MESHES
    print(
        "| mesh | sizes | by | pairs | median ms | worst ms | most edges | again us | worst us |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    gc.disable()
    for mesh_shape, (name, size), what in itertools.product(
        meshes, SIZES.items(), ("time", "bytes")
    ):
        n, median, worst, edges, again, slow = row(mesh_shape, size, what, args.repeat)
        print(
            f"| {mesh_shape} | {name} | {what} | {n} | {median:.2f} | {worst:.2f} | {edges} "
            f"| {again:.1f} | {slow:.1f} |",
            flush=True,
        )
        gc.collect()


if __name__ == "__main__":
    main()
