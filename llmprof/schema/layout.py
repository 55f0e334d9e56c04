"""Layout: one short string a person can type, such as `dp=8,zero=3,tp=8,pp=4,mb=1,accum=16,schedule=1f1b`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmprof.errors import LayoutError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe")
VIRTUAL = ("interleaved", "zero-bubble", "dualpipe")
"""Schedules that can have several virtual stages on a device."""
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "parameters", "activations")
CP_KINDS = ("ring", "ulysses")
PRECISIONS = ("float32", "tfloat32", "bfloat16", "float16", "float8")
_PRECISION_ALIASES = {
    "fp32": "float32",
    "tf32": "tfloat32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8",
}
AXES = ("tp", "cp", "ep", "dp", "pp")
_FLAG = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a training step is laid over devices.

    gpus = dp x tp x pp x cp. global_batch = dp x mb x accum sequences.

    Attributes:
        dp: total data-parallel degree.
        zero: 0 replicated, 1 optimizer state, 2 + gradients, 3 + parameters sharded.
        shard: the group over which state is sharded; divides dp. 0 means dp when zero > 0, else 1.
        tp: tensor-parallel degree.
        sp: sequence parallelism inside the tensor-parallel group.
        cp: context-parallel degree, `cp_kind` "ring" or "ulysses".
        pp: pipeline stages (devices), `vpp` virtual stages on each.
        ep: expert-parallel degree, divides dp x cp; `etp` tensor-parallel degree of experts (0: as tp).
        mb: sequences per microbatch.
        accum: microbatches per step and replica.
        schedule: pipeline schedule.
        recompute: activation checkpointing of the blocks.
        offload: what lives in host memory.
        precision: compute dtype, "" means as captured.
        order: axes, innermost first, joined by "-".

    Raises:
        LayoutError: a degree is not positive, or degrees contradict each other.
    """

    dp: int = 1
    zero: int = 0
    shard: int = 0
    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: str = "ring"
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 0
    mb: int = 1
    accum: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    offload: str = "none"
    precision: str = ""
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        for key in ("dp", "tp", "cp", "pp", "vpp", "ep", "mb", "accum"):
            _check_positive(key, getattr(self, key))
        for key, allowed in _CHOICES.items():
            if getattr(self, key) not in allowed:
                raise LayoutError(
                    f"{key}={getattr(self, key)} is not known",
                    hint=f"use one of {', '.join(map(str, allowed))}",
                )
        if sorted(self.order.split("-")) != sorted(AXES):
            raise LayoutError(
                f"order={self.order} does not name each axis once", hint="for example tp-cp-ep-dp-pp"
            )
        self._check_degrees()

    def _check_degrees(self) -> None:
        if self.shard < 0 or self.etp < 0:
            raise LayoutError("shard and etp must not be negative", hint="leave them out for the default")
        if self.shard > 1 and self.zero == 0:
            raise LayoutError(f"shard={self.shard} has no meaning with zero=0", hint="set zero=1, 2 or 3")
        if self.shard and self.dp % self.shard:
            raise LayoutError(
                f"shard={self.shard} does not divide dp={self.dp} ({self.dp} / {self.shard} = "
                f"{self.dp / self.shard:.2f})",
                hint="choose a divisor of dp",
            )
        if (self.dp * self.cp) % self.ep:
            raise LayoutError(
                f"ep={self.ep} does not divide dp x cp = {self.dp} x {self.cp} = {self.dp * self.cp}",
                hint="choose a divisor of dp x cp",
            )
        if self.sp and self.tp == 1:
            raise LayoutError(
                "sp needs tp > 1: it shards activations over the tensor-parallel group", hint="set tp=2"
            )
        if self.vpp > 1 and self.schedule not in VIRTUAL:
            raise LayoutError(
                f"vpp={self.vpp} needs a schedule with virtual stages ({', '.join(VIRTUAL)}), not {self.schedule}",
                hint="set schedule=interleaved",
            )
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"vpp={self.vpp} needs pp > 1: virtual stages are parts of a pipeline stage",
                hint="set pp=2 or more, or leave vpp out",
            )

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.dp * self.mb * self.accum

    @property
    def dp_shard(self) -> int:
        """Ranks over which state is sharded."""
        if self.zero == 0:
            return 1
        return self.shard or self.dp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters and see other tokens: gradients are summed over them."""
        return self.dp * self.cp

    @property
    def state_shards(self) -> int:
        """Ranks over which state is divided: the shard group and, since they hold the same, its context-parallel ranks."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.replicas // self.ep

    @property
    def expert_shards(self) -> int:
        """Ranks over which the state of experts is divided: those of a shard group that hold the same ones."""
        return self.state_shards // self.ep if self.state_shards % self.ep == 0 else 1

    @property
    def dp_replicate(self) -> int:
        """Replicas of the sharded state."""
        return self.dp // self.dp_shard

    def __str__(self) -> str:
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            kept = field.name == "dp" or (field.name == "cp" and self.cp_kind != "ring")
            if field.name == "cp_kind" or (value == field.default and not kept):
                continue
            if field.name == "cp":
                parts.append(f"cp={value}:{self.cp_kind}")
            else:
                parts.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout string such as `dp=8,zero=3,tp=8`.

        Raises:
            LayoutError: an unknown key, a value that is not what the key takes, or a contradiction.
        """
        values: dict[str, object] = {}
        for part in filter(None, (p.strip() for p in text.replace(" ", ",").split(","))):
            key, _, raw = part.partition("=")
            key = key.strip().lower()
            if key not in _KEYS:
                raise LayoutError(
                    f"unknown key {key!r} in layout {text!r}", hint=f"known keys: {', '.join(_KEYS)}"
                )
            if key in values:
                raise LayoutError(f"{key} is given twice in layout {text!r}", hint="give each key once")
            values.update(_parse_value(key, raw.strip().lower(), text))
        if not values:
            raise LayoutError("the layout is empty", hint="for example dp=8,tp=8")
        return cls(**values)  # type: ignore[arg-type]


_CHOICES: dict[str, tuple[object, ...]] = {
    "zero": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
    "offload": OFFLOAD,
    "cp_kind": CP_KINDS,
    "precision": ("", *PRECISIONS),
}
_KEYS = tuple(f.name for f in fields(Layout) if f.name != "cp_kind")
_TEXT_KEYS = ("schedule", "recompute", "offload", "order")


def _check_positive(key: str, value: int) -> None:
    if value < 1:
        raise LayoutError(f"{key}={value} is not a positive whole number", hint=f"set {key}=1 or more")


def _parse_value(key: str, raw: str, text: str) -> dict[str, object]:
    if key == "sp":
        if raw not in _FLAG:
            raise LayoutError(
                f"sp={raw!r} in layout {text!r} is not a flag", hint="write sp=1 or leave it out"
            )
        return {key: _FLAG[raw]}
    if key == "precision":
        return {key: _PRECISION_ALIASES.get(raw, raw)}
    if key in _TEXT_KEYS:
        return {key: raw}
    kind = ""
    if key == "cp":
        raw, _, kind = raw.partition(":")
    if not (raw.isascii() and raw.isdigit()) or len(raw) > 7:
        raise LayoutError(
            f"{key}={raw!r} in layout {text!r} is not a whole number", hint=f"for example {key}=2"
        )
    return {key: int(raw), **({"cp_kind": kind} if kind else {})}


def divisors(number: int, *, at_most: int | None = None) -> list[int]:
    """Divisors of a positive number, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    found = sorted({*small, *(number // n for n in small)})
    return [n for n in found if at_most is None or n <= at_most]
