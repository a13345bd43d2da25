"""Kernels of the model, one folder an operation, each with a plain reference beside the fast
versions.

An operation lists its implementations in order of preference; `call` tries them, and an
implementation declines a case by raising NotImplementedError("why"). Which one is taken depends on
the platform, the compute capability and the shapes alone, so one program always makes the same
choice. A program that wants to know what was chosen, and why the others were not, traces inside
`record()`:

    with pallas_kernels.record() as choices:
        step.lower(...)
    for choice in choices: print(choice)

Nothing here imports jax or a kernel until an operation is called.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NAMES = {
    "mla_attention": ("blackwell", "hopper", "xla", "reference"),
    "grouped_gemm": ("hopper", "hopper_fp8", "blackwell", "xla", "reference"),
    "index_topk": ("hopper", "reference"),
    "row_matmul": ("hopper", "blackwell", "xla", "reference"),
    "hyper_connections": ("hopper", "reference"),
    "quantise": ("hopper", "reference"),
    "grouping": ("hopper", "reference"),
    "router": ("hopper", "reference"),
}
"""Operation -> names of its implementations, as its IMPLEMENTATIONS has them: a wrong name is told
before a kernel, or a weight, is loaded."""
OPERATIONS = tuple(NAMES)


@dataclasses.dataclass(frozen=True)
class Kernels(Mapping[str, str]):
    """Operation -> implementation name, hashable; an operation that is not named is "auto".

    Attributes:
        named: sorted (operation, implementation) pairs.
    """

    named: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for op, name in self.named:
            if op not in OPERATIONS:
                raise ValueError(
                    f"kernels: no operation {op!r}; expected one of {', '.join(OPERATIONS)}"
                )
            if name != "auto" and name not in NAMES[op]:
                raise ValueError(
                    f"kernels.{op}: no implementation {name!r}; expected one of "
                    f"{', '.join(('auto', *NAMES[op]))}"
                )
        object.__setattr__(self, "named", tuple(sorted(self.named)))

    @classmethod
    def auto(cls) -> "Kernels":
        """Every operation chosen by platform and shape."""
        return cls()

    @classmethod
    def parse(cls, value: "str | Mapping[str, str] | Kernels") -> "Kernels":
        """ "auto", one name for every operation, {"op": "name"}, or that mapping as JSON.

        Raises:
            ValueError: an unknown operation, a name that the operation has no implementation of, or
                text that begins like JSON and is none.
        """
        if isinstance(value, Kernels):
            return value
        if isinstance(value, str):
            if value.lstrip().startswith("{"):
                try:
                    return cls.parse(json.loads(value))
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"kernels: {value!r} is not JSON ({error}); "
                        'expected {"operation": "implementation", ...}'
                    ) from None
            return cls() if value == "auto" else cls(tuple((op, value) for op in OPERATIONS))
        return cls(tuple(value.items()))

    def __getitem__(self, op: str) -> str:
        if op not in OPERATIONS:
            raise KeyError(op)
        return dict(self.named).get(op, "auto")

    def __iter__(self) -> Iterator[str]:
        return iter(OPERATIONS)

    def __len__(self) -> int:
        return len(OPERATIONS)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        name: one of the operation's NAMES.
        module: where its functions live, imported when first tried.
        platforms: jax platform names it runs on; empty means any.
        capability: least CUDA compute capability; None means any.
        below: compute capability from which on it does not run; None means no limit.
        by_name: platforms on which "auto" passes it over: it must be asked for.
    """

    name: str
    module: str
    platforms: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    below: tuple[int, int] | None = None
    by_name: tuple[str, ...] = ()

    def misfit(self, target: "Target", requested: str = "auto") -> str | None:
        """Why it is not taken on the target, or None."""
        if requested == "auto" and target.platform in self.by_name:
            return f"on {target.platform} only by name"
        if self.platforms and target.platform not in self.platforms:
            return f"needs platform {' or '.join(self.platforms)}, this is {target.platform}"
        if self.capability is None:
            return None
        if target.capability is None or target.capability < self.capability:
            least, here = _dotted(self.capability), _dotted(target.capability)
            return f"needs compute capability {least}, this is {here}"
        if self.below is not None and target.capability >= self.below:
            limit, here = _dotted(self.below), _dotted(target.capability)
            return f"made for compute capability below {limit}, this is {here}"
        return None


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is traced for: jax platform name and, on CUDA, the compute capability."""

    platform: str
    capability: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was taken for one call and why the ones before it were not."""

    op: str
    function: str
    shapes: str
    chosen: str | None
    declined: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.declined)
        return f"{self.op}.{self.function} {self.shapes} -> {self.chosen or 'none'}" + (
            f" ({reasons})" if reasons else ""
        )


_recorder: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "choices", default=None
)


@contextlib.contextmanager
def record() -> Iterator[list[Choice]]:
    """Collects the choice of every kernel call traced inside the block (a cached jit does not trace
    again)."""
    choices: list[Choice] = []
    token = _recorder.set(choices)
    try:
        yield choices
    finally:
        _recorder.reset(token)


_stand_in: contextvars.ContextVar[Callable[[str, str, tuple, dict[str, Any]], Any] | None] = (
    contextvars.ContextVar("stand_in", default=None)
)


@contextlib.contextmanager
def stand_in(function: Callable[[str, str, tuple, dict[str, Any]], Any]) -> Iterator[None]:
    """Kernel calls traced inside the block become `function(op, name, args, kwargs)`: for pricing a
    program by what its kernels are known to cost."""
    token = _stand_in.set(function)
    try:
        yield
    finally:
        _stand_in.reset(token)


def observed() -> bool:
    """Whether calls are recorded or replaced: then every one of them has to be traced."""
    return _recorder.get() is not None or _stand_in.get() is not None


def target() -> Target:
    """The device that the current trace is for: the abstract mesh's, else the default device."""
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or not getattr(device, "compute_capability", None):
        device = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(device, str):
            device = jax.devices(device)[0]
    platform = getattr(device, "platform", "cpu")
    capability = (
        getattr(device, "compute_capability", None) if platform in ("gpu", "cuda") else None
    )
    if capability is None:
        return Target(platform)
    major, _, minor = str(capability).partition(".")
    return Target("gpu", (int(major), int(minor or 0)))


def call(
    op: str,
    function: str,
    implementations: Sequence[Implementation],
    requested: str,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Runs `function` of the first implementation that fits and does not decline.

    Args:
        requested: "auto", or the one implementation that may be used.

    Raises:
        ValueError: no such implementation of this operation.
        NotImplementedError: every candidate declined; the message lists the reasons.
    """
    candidates = [i for i in implementations if requested in ("auto", i.name)]
    if not candidates:
        known = ", ".join(i.name for i in implementations)
        raise ValueError(f"{op}: no implementation {requested!r}; expected auto, {known}")
    if (replacement := _stand_in.get()) is not None:
        return replacement(op, function, args, kwargs)
    here = target()
    declined: list[tuple[str, str]] = []
    choices = _recorder.get()
    for candidate in candidates:
        reason = candidate.misfit(here, requested)
        if reason is None:
            try:
                out = getattr(importlib.import_module(candidate.module), function)(*args, **kwargs)
            except NotImplementedError as error:
                reason = str(error) or "not implemented"
            else:
                if choices is not None:
                    choices.append(
                        Choice(op, function, _shapes(args), candidate.name, tuple(declined))
                    )
                return out
        declined.append((candidate.name, reason))
    if choices is not None:
        choices.append(Choice(op, function, _shapes(args), None, tuple(declined)))
    reasons = "; ".join(f"{name}: {why}" for name, why in declined)
    raise NotImplementedError(
        f"{op}.{function} {_shapes(args)}: no implementation takes it ({reasons})"
    )


def choose(
    op: str, function: str, *args: Any, implementation: str = "auto", **kwargs: Any
) -> Choice:
    """What `op.function` would use for these arguments (arrays or jax.ShapeDtypeStruct), without
    running it."""
    import jax

    package = importlib.import_module(f"{__name__}.{op}")
    with record() as choices:
        try:
            jax.eval_shape(
                lambda *a: getattr(package, function)(*a, implementation=implementation, **kwargs),
                *args,
            )
        except NotImplementedError:
            if not choices:
                raise
    return choices[-1]


def _dotted(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else ".".join(map(str, capability))


def _shapes(args: tuple) -> str:
    def one(x: Any) -> str:
        if isinstance(x, tuple):
            return "(" + ", ".join(map(one, x)) + ")"
        return (
            "-"
            if x is None
            else f"{x.dtype}[{','.join(map(str, x.shape))}]"
            if hasattr(x, "dtype")
            else str(x)
        )

    return " ".join(map(one, args))
