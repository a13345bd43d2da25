"""`jit` with the compiler options this model's numerics depend on.

Everywhere: XLA may keep a value in float32 where the program rounds it to bfloat16 and widens it
again ("excess precision"); whether it does depends on what it fuses. The rounding points are part
of the model's numerics and of the promise of equal bits, so it may not.

On a CUDA device: kernels that do not wait for each other's results may run side by side. A decode
step is one graph of thousands of kernels, most of them too small to fill the device; one after the
other they leave it idle between them (docs/benchmarks.md). No bits depend on it, so a compiler that
does not know the option does without.

On a CPU: XLA hands some sums and chains of elementwise operations to the YNNPACK library, by their
size, and that library sums in another order than XLA's own loops. A row's bits would then depend
on how many rows are computed (seen in the mHC write-back: 8 rows against 15). It is left out; the
other loops keep one order for every size. A plugin's backend may be XLA's CPU under any name, so
every backend but jax's own GPU and TPU ones is given that option too, if its compiler takes it.

XLA compiles without Python's lock, so `Program.ahead` compiles in threads what will be called soon.
Tracing holds that lock anyway and goes one program after the other, so that what programs have in
common is traced once: layers are of few kinds, and a function that is `shared` is traced for each
kind and not for each layer. XLA inlines its calls first of all, so it compiles the same program.
"""

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import backend

import pallas_kernels

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
CUDA_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}


def compiler_options() -> dict[str, bool | str]:
    """The options for the default backend; asks jax for it, so devices must be settled."""
    client = jax.devices()[0].client
    name = next(name for name, one in backend.backends().items() if one is client)
    if name in ("rocm", "tpu"):
        return dict(COMPILER_OPTIONS)
    wanted = COMPILER_OPTIONS | (CUDA_OPTIONS if name == "cuda" else CPU_OPTIONS)
    if name == "cpu":
        return wanted
    return {key: value for key, value in wanted.items() if takes(key, value)}


@functools.cache
def takes(key: str, value: bool | str) -> bool:
    """Whether the default backend's compiler knows an option; a plugin's need not be XLA."""
    try:
        jax.jit(lambda: 0, compiler_options={key: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error) and "UNIMPLEMENTED" not in str(error):
            raise
        return False
    return True


_tracing = threading.RLock()


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1), "compile")


class Program:
    """A jitted function whose options are settled at its first call, so that a module may hold
    programs without starting a backend."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        @functools.wraps(function)
        def traced(*args: Any, **keywords: Any) -> Any:
            with _tracing:
                return function(*args, **keywords)

        self._function, self._options = traced, options
        self._coming: list[concurrent.futures.Future[Any]] = []

    @functools.cached_property
    def _jitted(self) -> Any:
        options = compiler_options()
        return jax.jit(self._function, compiler_options=options, **self._options)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._coming:
            # One that failed is compiled again by the call that needs it, which gets the error.
            concurrent.futures.wait(self._coming)
            self._coming.clear()
        return self._jitted(*args, **keywords)

    def lower(self, *args: Any) -> Any:
        """`jax.jit(...).lower` for arrays or their shapes."""
        return self._jitted.lower(*args)

    def ahead(self, *args: Any) -> None:
        """Begins to compile for arguments like these in another thread; the next call waits for it
        and finds the program compiled. The arrays are not kept: they may be donated meanwhile."""
        described = jax.tree.map(_described, args)
        self._coming.append(_threads().submit(lambda: self.lower(*described).compile()))

    def variants(self) -> int:
        """How many shapes and static arguments it has been compiled for."""
        return self._jitted._cache_size()


def jit(function: Callable[..., Any], **options: Any) -> Program:
    """`jax.jit` of a model function; options as there."""
    return Program(function, options)


def _described(leaf: Any) -> Any:
    """An array's shape, dtype and place, by which jax finds again what it compiled."""
    if not isinstance(leaf, jax.Array):
        return leaf
    place = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=leaf.weak_type)


def shared[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function that is traced once for equal shapes and equal `static` arguments.

    static: names of its arguments that are no arrays; they are hashed. Outside of a trace the
    function is called as it is, and so it is while somebody watches what kernels it calls.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        once = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((args, keywords)))
            run = once if traced and not pallas_kernels.observed() else function
            return run(*args, **keywords)

        return call

    return wrap
