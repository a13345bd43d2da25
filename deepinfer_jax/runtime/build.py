"""What an engine is made of: its shapes, a loop for a group of devices, the model beside it."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax import structured
from deepinfer_jax.layout import Layout
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.runtime import checkpoint
from deepinfer_jax.runtime.handover import Group
from deepinfer_jax.runtime.loop import Loop
from deepinfer_jax.runtime.model import Model, load
from deepinfer_jax.runtime.pages import PAGE
from deepinfer_jax.runtime.plans import Policy
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from deepinfer_jax.runtime.programs import Programs
from deepinfer_jax.runtime.step_types import Options


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Compiled shapes of the engine's programs.

    prefill: (sequences, width) rectangles of prompt chunks. pages: pages of 128 tokens in all
    (None: enough for every slot's whole context). host_pages: room for preempted requests.
    """

    prefill: tuple[tuple[int, int], ...] = ((8, 32), (4, 128), (1, 512))
    pages: int | None = None
    host_pages: int = 4096


@dataclasses.dataclass(frozen=True)
class Parts:
    """What all loops of an engine have in common. context: most tokens of a request."""

    options: Options
    shapes: Shapes
    context: int
    compiler: structured.Compiler | None

    def loop(
        self,
        model: Model,
        slots: int,
        pages: int | None,
        *,
        decodes: bool = True,
        prefix: PrefixPolicy | None = None,
        **given: Any,
    ) -> Loop:
        """The loop of a model's devices. pages: None, enough for every slot's whole context.

        Raises ValueError for a layout that its programs cannot follow.
        """
        programs, options = Programs(model.setup, model.weights, self.options), self.options
        if prefix is not None and prefix.folder is not None and programs.everywhere:
            raise ValueError(
                "prefix_cache: no folder over several processes, which could find different files "
                "in it and would then compute different steps"
            )
        slots, shapes = programs.divided(slots), self.shapes.prefill
        fit = tuple(shape for shape in shapes if shape[1] <= max(self.context, 32))
        policy = Policy(
            slots=slots,
            decode_rows=(slots * (1 + options.block),),
            prefill=programs.rectangles(fit or shapes),
            block=options.block,
            host_pages=self.shapes.host_pages,
            decodes=decodes,
        )
        return Loop(
            programs,
            policy,
            context=self.context,
            pages=programs.divided(pages or slots * -(-self.context // PAGE)),
            compiler=self.compiler,
            prefix=prefix,
            **given,
        )

    def loops(
        self,
        model: Model,
        there: Sequence[Sequence[Any] | None],
        slots: int,
        *,
        prefix: PrefixPolicy | None,
        **given: Any,
    ) -> list[Loop]:
        """A loop for each group of devices (None: where the model is), with its weights there."""
        found = []
        for number, devices in enumerate(there):
            here = model if devices is None else model.on(devices)
            cached = None if prefix is None else prefix.of_replica(number)
            found.append(self.loop(here, slots, self.shapes.pages, prefix=cached, **given))
        return found


def beside(model: Model, group: Group, path: str | Path | None) -> Model:
    """The model on a prefill group; path: of its checkpoint, None for a model in memory.

    Raises ValueError for another layout of a model in memory, and as `load` does.
    """
    setup = model.setup
    if (group.layout or Layout.single()) == setup.layout:
        return model if group.devices is None else model.on(group.devices)
    if path is None:
        raise ValueError("prefill: a loaded model has its layout; give the checkpoint's path")
    return load(path, group.layout, setup.kernels, setup.numerics, group.devices)


def identity(path: str | Path, setup: Setup, options: Options) -> dict[str, str]:
    """What a request's state depends on besides its prompt, by name."""
    return {
        "weights": checkpoint.fingerprint(path),
        "config": hashlib.blake2b(repr(setup.cfg).encode(), digest_size=16).hexdigest(),
        "numerics": repr(setup.numerics),
        "drafts": f"{options.block}, rejection {options.rejection}",
    }


def block_of(speculate: int | str | None, cfg: Any) -> int:
    """Draft tokens a step. Raises ValueError for more than the drafter was trained for."""
    trained = cfg.dspark_block_size if cfg.has_draft else 0
    if speculate is None or speculate == "adaptive":
        return trained
    if isinstance(speculate, bool) or not isinstance(speculate, int) or speculate < 0:
        raise ValueError(f"speculate = {speculate!r}; expected None, 'adaptive' or 0..{trained}")
    if speculate > trained:
        raise ValueError(
            f"speculate = {speculate}; this checkpoint's drafter was trained for {trained} tokens"
        )
    return speculate
