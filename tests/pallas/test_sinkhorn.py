"""Sinkhorn's normalisation: every implementation against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import sinkhorn, target
from pallas_kernels.cases import tagged
from pallas_kernels.sinkhorn import hopper, shapes
from tests.oracle import hyper

NAMES = [i.name for i in sinkhorn.IMPLEMENTATIONS if not i.misfit(target(), i.name)]


def float64(logits, *, iterations, eps):
    return np.stack([hyper.sinkhorn(one.astype(np.float64), iterations, eps) for one in logits])


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", tagged(shapes.CASES, "test"), ids=lambda case: case.name)
def test_against_float64(case, implementation):
    (logits,) = case.build(np.random.default_rng())
    call = functools.partial(sinkhorn.normalise, implementation=implementation, **case.keywords())
    got = np.asarray(jax.jit(call)(jnp.asarray(logits)))
    np.testing.assert_allclose(got, float64(logits, **case.keywords()), atol=1e-6)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_kernel_in_interpret_mode(iterations):
    logits = np.random.default_rng(iterations).standard_normal((140, 4, 4), dtype=np.float32) * 3
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = hopper.normalise(jnp.asarray(logits), iterations=iterations, eps=1e-6)
    np.testing.assert_allclose(got, float64(logits, iterations=iterations, eps=1e-6), atol=1e-6)


def test_squares_too_large_for_a_thread_are_declined():
    with pytest.raises(NotImplementedError, match="7 x 7 entries, a thread keeps 36"):
        hopper.normalise(jnp.zeros((3, 7, 7)), iterations=2, eps=1e-6)
