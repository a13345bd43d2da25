"""The verification budget: optimal by brute force, near the best fixed width in a simulation."""

import itertools

import numpy as np
import pytest

from deepinfer_jax.runtime import speculation
from deepinfer_jax.runtime.outputs import DraftCounts


def _logit(p):
    p = np.clip(p, 1e-6, 1 - 1e-6)
    return np.log(p / (1 - p))


def _rate(widths, conditional, seconds):
    """Expected tokens a second if request i verifies widths[i] drafts."""
    chance = np.cumprod(conditional, axis=1)
    tokens = len(widths) + sum(chance[i, :w].sum() for i, w in enumerate(widths))
    rows = len(widths) + sum(widths)
    return tokens / min(s for r, s in seconds.items() if r >= rows)


@pytest.mark.parametrize("seed", range(40))
def test_budget_is_the_optimum(seed):
    rng = np.random.default_rng(seed)
    turns, block = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    conditional = rng.uniform(0.02, 0.98, (turns, block))
    chances = speculation.survival(_logit(conditional), np.ones(block, np.float32))
    rows = rng.integers(turns, turns * (1 + block) + 1, 3).tolist()
    base, slope = rng.uniform(0.5, 3), rng.uniform(0, 1)
    seconds = {r: base + slope * r for r in {turns, *rows}}
    best = speculation.best_rows(chances, turns, seconds)
    # The device gives the rows to the largest survivals, a prefix of every request.
    drafts = min(best - turns, chances.size)
    edge = np.sort(chances.reshape(-1))[::-1][drafts - 1] if drafts else np.inf
    granted = [int((row >= edge).sum()) for row in chances]
    every = itertools.product(range(block + 1), repeat=turns)
    possible = [w for w in every if turns + sum(w) <= max(seconds)]
    optimum = max(_rate(w, conditional, seconds) for w in possible)
    assert _rate(granted, conditional, seconds) == pytest.approx(optimum, rel=1e-5)


def test_too_many_turns():
    with pytest.raises(ValueError, match="5 turns; expected at most 4"):
        speculation.best_rows(np.zeros((5, 1)), 5, {2: 1.0, 4: 1.0})


PROFILES = {
    "even": lambda rng, block: rng.uniform(0.3, 0.9, block),
    "good": lambda rng, block: rng.uniform(0.85, 0.98, block),
    "bad": lambda rng, block: rng.uniform(0.02, 0.2, block),
    "falling": lambda rng, block: np.linspace(0.95, 0.2, block) * rng.uniform(0.8, 1.0),
    "two kinds": lambda rng, block: np.full(block, 0.95 if rng.random() < 0.5 else 0.1),
}
COSTS = {
    "flat": lambda rows: 1.0,
    "steep": lambda rows: 0.05 + rows,
    "knee": lambda rows: 1.0 + max(rows - 32, 0) / 16,
    "usual": lambda rows: 1.0 + rows / 40,
}


def _simulate(profile, cost, turns, block, fixed=None, rounds=300, noise=0.6):
    """Tokens a second of `turns` requests that draft a block a round; fixed: widths of all."""
    rng = np.random.default_rng(5)
    buckets = {turns * (1 + k): cost(turns * (1 + k)) for k in range(block + 1)}
    truth = [np.stack([profile(rng, block) for _ in range(turns)]) for _ in range(rounds)]
    seen = [_logit(chance) + rng.normal(0, noise, chance.shape) for chance in truth]
    stands = [rng.random(chance.shape) < chance for chance in truth]
    calibration = speculation.Calibration(block)
    tokens = seconds = 0.0
    for step in range(2, rounds):
        if fixed is None:
            old = speculation.survival(seen[step - 2], calibration.temperature)
            rows = speculation.best_rows(old, turns, buckets)
            new = speculation.survival(seen[step], calibration.temperature).reshape(-1)
            granted = np.zeros(new.size, bool)
            granted[np.argsort(-new, kind="stable")[: rows - turns]] = True
            widths = granted.reshape(turns, block).sum(1)
        else:
            rows, widths = turns * (1 + fixed), np.full(turns, fixed)
        for i, width in enumerate(widths):
            stood = int(np.cumprod(stands[step][i, :width]).sum())
            tokens += 1 + stood
            if fixed is None:
                judged = min(stood + 1, int(width))
                calibration.observe(seen[step][i].tolist(), judged, stood)
        seconds += buckets[rows]
    return tokens / seconds


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("profile", PROFILES)
def test_adaptive_is_never_far_below_the_best_fixed_width(profile, cost):
    turns, block = 8, 5
    given = PROFILES[profile], COSTS[cost], turns, block
    fixed = [_simulate(*given, k) for k in range(block + 1)]
    assert _simulate(*given) >= 0.98 * max(fixed)


def test_temperature_is_found_again():
    rng = np.random.default_rng(0)
    for true in (0.5, 1.0, 2.5):
        logits = rng.normal(0, 3, 6000)
        stood = rng.random(6000) < 1 / (1 + np.exp(-logits / true))
        assert speculation.fit_temperature(logits, stood) == pytest.approx(true, rel=0.1)


def test_temperature_of_little_evidence_stays_near_one():
    assert 0.7 < speculation.fit_temperature(np.array([3.0]), np.array([False])) < 2.5
    logits, stood = np.array([-1e9, 60.0, 0.0]), np.array([True, False, True])
    assert 1 / 8 <= speculation.fit_temperature(logits, stood) <= 8


def test_calibration_counts_places_apart_and_never_rewrites_what_was_sent():
    calibration = speculation.Calibration(2)
    sent = calibration.temperature
    rng = np.random.default_rng(1)
    for _ in range(600):
        logits = rng.normal(0, 2, 2)
        first = rng.random() < 1 / (1 + np.exp(-logits[0]))
        second = first and rng.random() < 1 / (1 + np.exp(-logits[1] / 4))
        calibration.observe(logits.tolist(), 2 if first else 1, int(first) + int(second))
    assert np.array_equal(sent, [1.0, 1.0])
    assert calibration.temperature[0] == pytest.approx(1.0, abs=0.3)
    assert calibration.temperature[1] > 2
    assert np.abs(calibration.expected()).max() < 1


def test_a_block_is_known_once_a_step_that_verifies_it_was_sent():
    found, (first, second) = speculation.Confidences(), np.eye(2)
    assert found.known(7) is None
    found.read(7, first, verified=False)  # of the prompt's last step; nothing was sent since
    assert found.known(7) is None
    found.sent(7)
    assert found.known(7) is first
    found.read(7, second, verified=True)  # the usual case: read while a later step runs
    assert found.known(7) is second
    found.read(7, first, verified=False)
    assert found.known(7) is second and found.known(8) is None
    found.forget(7)
    found.sent(7)
    assert found.known(7) is None


def test_draft_counts_add_up():
    counts = DraftCounts()
    counts.count(2, 1, [0.9, 0.5, 0.1])
    counts.count(1, 1, [0.7, 0.5, 0.1])
    counts.count(0, 0, [0.7, 0.5, 0.1])
    assert (counts.judged, counts.accepted) == ([2, 1], [2, 0])
    assert counts.acceptance == [1.0, 0.0]
    assert counts.calibration_error == pytest.approx((0.4 + 0.5) / 3)
    total = DraftCounts()
    total.add(counts)
    total.add(counts)
    assert total.judged == [4, 2]
    assert total.calibration_error == pytest.approx(counts.calibration_error)
    assert DraftCounts().calibration_error is None
