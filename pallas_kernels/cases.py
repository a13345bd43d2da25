"""One named shape case of a kernel: what tests, ahead-of-time compilation and benchmarks share.

Every operation lists its cases in `<op>/shapes.py` as `CASES: tuple[Case, ...]`. A case names the
public function of the operation, builds random inputs of one shape (so that every check draws fresh
ones), and states the floating point operations the mathematics needs and the fewest bytes that must
cross device memory (each input read once, each output written once). Times over these two numbers
are what `bench kernels` reports; instructions and registers are what the ahead-of-time test
asserts.

`tags` say where a case is used: "test" (small enough for the CPU and for interpret mode), "aot"
(compiled for every chip), "bench" (timed on a GPU). Released shapes carry "aot" and usually
"bench".
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TENSOR_CORE = {"hopper": r"HGMMA|QGMMA", "blackwell": r"UTC[HQO]MMA"}
"""Machine instructions that an implementation must contain, as regular expressions over SASS
opcodes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel call at one shape.

    Attributes:
        name: unique within the operation, e.g. "decode_64".
        function: the public function's name in the operation's package, e.g. "gate_up".
        build: random generator -> positional arguments (numpy or jax arrays, None or tuples of
            them).
        options: keyword arguments as sorted pairs (hashable), without `implementation`.
        flops: floating point operations on true rows.
        bytes: least bytes moved through device memory.
        tags: subset of {"test", "aot", "bench"}.
        tolerance: relative error in the Frobenius norm against the reference in float64.
        instructions: overrides TENSOR_CORE; an empty pattern asks for none.
        registers: most registers a thread may use; 255 is the hardware's limit.
        declines: implementation -> why it may decline this case, where that is intended.
    """

    name: str
    function: str
    build: Callable[[np.random.Generator], tuple[Any, ...]]
    options: tuple[tuple[str, Any], ...] = ()
    flops: int = 0
    bytes: int = 0
    tags: frozenset[str] = frozenset({"test"})
    tolerance: float = 1e-2
    instructions: tuple[tuple[str, str], ...] = tuple(TENSOR_CORE.items())
    registers: int = 255
    declines: tuple[tuple[str, str], ...] = ()

    def abstract(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the positional arguments, without keeping the arrays."""
        if self.shapes is not None:
            return self.shapes()
        built = self.build(np.random.default_rng(0))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), built)

    shapes: Callable[[], tuple[Any, ...]] | None = None
    """Abstract arguments without building any array; needed where the arrays are large."""

    small: Callable[[np.random.Generator], tuple[Any, ...]] | None = None
    """The arguments whose values matter (group sizes, indices), None where any numbers will do."""

    def on_device(self, seed: int) -> tuple[Any, ...]:
        """Arguments for a benchmark: drawn on the device wherever `small` gives no value."""
        if self.small is None:
            return jax.tree.map(jnp.asarray, self.build(np.random.default_rng(seed)))
        given = self.small(np.random.default_rng(seed))
        keys = jax.random.split(jax.random.key(seed), len(given))
        pairs = zip(given, self.abstract(), keys, strict=True)
        return tuple(
            draw(key, wanted) if value is None else jax.tree.map(jnp.asarray, value)
            for value, wanted, key in pairs
        )

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments as a fresh dict."""
        return dict(self.options)


def draw(key: Any, wanted: Any) -> Any:
    """Random values of a shape and dtype, made on the device: unit normal numbers, e8m0 scales
    around 2^-7, uniform bytes; for a tuple (values, scales) both."""
    if wanted is None:
        return None
    if isinstance(wanted, tuple):
        return tuple(
            draw(k, w) for k, w in zip(jax.random.split(key, len(wanted)), wanted, strict=True)
        )
    shape, dtype = wanted.shape, wanted.dtype
    if dtype == jnp.float8_e8m0fnu:
        raw = jax.jit(lambda: jax.random.bits(key, shape, jnp.uint8) % 6 + 117)()
        return raw.view(dtype)
    if dtype == jnp.uint8:
        return jax.jit(lambda: jax.random.bits(key, shape, jnp.uint8))()
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{dtype} arguments have a meaning: the case must give them")
    return jax.jit(lambda: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype))()


def tagged(cases: tuple[Case, ...], tag: str) -> tuple[Case, ...]:
    """The cases that carry `tag`, in order."""
    return tuple(case for case in cases if tag in case.tags)
