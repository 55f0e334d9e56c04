"""Sharded parameters on a stage's streams: gathered before use (the next unit ahead), gradients scattered after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmprof.extrapolate.cost import Cost, Prices
from llmprof.extrapolate.groups import COMMON, EXPERTS, StateGroups
from llmprof.extrapolate.ledger import Ledger
from llmprof.extrapolate.machine import Machine, Segment
from llmprof.extrapolate.partition import Plan
from llmprof.extrapolate.simulate import MAIN, Array, Streams
from llmprof.extrapolate.work import Parameter
from llmprof.schema.operators import ITEM_BYTES

AGREEMENT = 1e-9
"""Relative difference of two increments that are taken as equal."""
LAST = 2
"""Blocks at the end of a row that are run in any case: nothing is gathered ahead there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Parameters that are gathered and scattered together: one block, or all that is in no block (the root).

    Attributes:
        gather: copy-in, cast and all-gather.
        unpack: copies from the gathered buffer into the parameters.
        pack: copies of the gradients into the buffer to be reduced.
        reduce: reduce-scatter, and the all-reduce over replicas where there are some.
    """

    gather: Segment
    unpack: Segment
    pack: Segment
    reduce: Segment


def fsdp_unit(parameters: Sequence[Parameter], plan: Plan, machine: Machine) -> Unit:
    """The traffic of one unit. Weights travel in the compute dtype, gradients in the parameters' own dtype."""
    costs = _unit_costs(parameters, plan, machine.prices)
    return Unit(**{name: machine.segment({"dp": cost}) for name, cost in costs.items()})


def _unit_costs(parameters: Sequence[Parameter], plan: Plan, prices: Prices) -> dict[str, Cost]:
    """Experts are gathered and scattered by themselves: fewer ranks hold the same."""
    experts = [p for p in parameters if p.expert]
    costs = _kind_costs([p for p in parameters if not p.expert], COMMON, plan, prices)
    if experts:
        for name, cost in _kind_costs(experts, EXPERTS, plan, prices).items():
            costs[name].include(cost)
    return costs


def _kind_costs(
    parameters: Sequence[Parameter], groups: StateGroups, plan: Plan, prices: Prices
) -> dict[str, Cost]:
    numel = sum(p.numel for p in parameters)
    shard = prices.group[groups.shard][0]
    stored = parameters[0].dtype if parameters else "float32"
    working = plan.precision.working or stored
    local = -(-numel // shard)
    padded = local * shard
    gather = prices.copy("fsdp::all_gather_copy_in", local, source=stored, target=working)
    reduce = prices.collective("reduce_scatter", padded * ITEM_BYTES.get(stored, 4), groups.shard)
    return {
        "gather": gather.plus(
            prices.collective("all_gather", padded * ITEM_BYTES.get(working, 4), groups.shard)
        ),
        "unpack": prices.copy("fsdp::split_with_sizes_copy", padded, source=working, target=working),
        "pack": prices.copy("fsdp::chunk_cat", padded, source=working, target=stored),
        "reduce": reduce.plus(
            prices.collective("all_reduce", local * ITEM_BYTES.get(stored, 4), groups.replicate)
        ),
    }


@dataclass(slots=True)
class Gatherer:
    """Gathers the units of one pass in the order in which they are used, one ahead of the computation.

    Where gathering blocks the main stream (gloo) nothing is fetched ahead.
    """

    machine: Machine
    streams: Streams
    units: Sequence[Unit]
    _ready: dict[int, Array] = field(default_factory=dict)
    _used: int = 0

    def prefetch(self) -> None:
        """Start gathering the next unit, unless that would block."""
        if not self.machine.serial_fsdp:
            self._issue(self._used)

    def use(self) -> None:
        """Hold the main stream until the next unit is there, copy it out, and fetch the one after it."""
        self._issue(self._used)
        self.streams.wait(self._ready[self._used], "dp")
        self.machine.run(self.streams, self.units[self._used].unpack)
        self._used += 1
        self.prefetch()

    def skip(self, count: int, by_s: Array) -> None:
        """Take `count` units as used, each of which moved the clocks by `by_s`."""
        self._ready = {index + count: ready + count * by_s for index, ready in self._ready.items()}
        self._used += count

    def _issue(self, index: int) -> None:
        if index in self._ready or index >= len(self.units):
            return
        gather = self.units[index].gather
        if self.machine.serial_fsdp:
            self._ready[index] = self.machine.run(self.streams, gather, "all_gather", "communication")
        else:
            after = (self.streams.now(),) if index else ()
            self._ready[index] = self.machine.beside(self.streams, gather, after, "all_gather")


def scatter(unit: Unit, machine: Machine, streams: Streams) -> None:
    """Pack a unit's gradients and reduce them over the shards."""
    machine.run(streams, unit.pack)
    if machine.serial_fsdp:
        machine.run(streams, unit.reduce, "reduce_scatter", "communication")
    else:
        machine.beside(streams, unit.reduce, (streams.now(),), "reduce_scatter")


def run_equal(streams: Streams, gatherer: Gatherer, count: int, one: Callable[[], None]) -> None:
    """Run `count` equal blocks: one by one until each adds the same to every clock, then the rest at once.

    Which stream waits for which no longer changes when the main stream gains on the others or keeps up with them;
    the stream of reductions may fall behind where nothing is gathered through it. Spans are kept of blocks that are run.
    """
    before: dict[str, Array] = {}
    done = 0
    while done < count:
        clocks, mark, busy = dict(streams.clocks), streams.ledger.mark(), streams.busy_s
        one()
        done += 1
        added = {name: clock - clocks.get(name, streams.zero) for name, clock in streams.clocks.items()}
        more = count - done - LAST
        if more > 0 and not streams.record and _is_steady(before, added, streams, bool(gatherer.units)):
            for name, by in added.items():
                streams.delay(name, more * by)
            gatherer.skip(more, added[MAIN])
            streams.busy_s += more * (streams.busy_s - busy)
            block = streams.ledger.since(mark)
            for part, seconds in block.own.items():
                streams.ledger.give(part, more * seconds)
            streams.ledger.add(Ledger(owned=block.owned, beside=block.beside), more)
            done += more
        before = added


def _is_steady(before: dict[str, Array], added: dict[str, Array], streams: Streams, gathers: bool) -> bool:
    if before.keys() != added.keys():
        return False
    main = added[MAIN]
    tolerance = AGREEMENT * streams.now()
    if any(bool((np.abs(by - before[name]) > tolerance).any()) for name, by in added.items()):
        return False
    host, side = added.get("host", main), added.get("dp", main)
    ahead = np.abs(side - main) if gathers else main - side
    return not bool((host - main > tolerance).any() or (ahead > tolerance).any())
