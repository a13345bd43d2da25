"""The traffic simulator: nothing lost, times that can be computed by hand, policies that differ."""

import dataclasses
import json

import pytest

from deepinfer_jax import cli, shipped
from deepinfer_jax.bench import traffic
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.lab import devices
from deepinfer_jax.runtime.plans import Policy
from deepinfer_jax.runtime.prefix_types import PrefixPolicy

CFG = ModelConfig.from_json(shipped.find("models", "v41-tiny"))
CLOCK = traffic.Clock(CFG, devices.parse("h200")[0])
POLICY = Policy(8, (8,), ((1, 128), (4, 128)))


def run(trace, policy=POLICY, clock=CLOCK, **options):
    return traffic.simulate(trace, policy, clock, pages=256, context=2048, **options)


def test_one_request_by_hand():
    """A prefill, then a decode step for every token but the first."""
    found = run([traffic.Request(3.0, 100, 5)])
    first = CLOCK.prefill(1, 128, 0, draft=False)
    step = CLOCK.decode(1, 1, 0, draft=False)
    assert found.tokens == 5 and found.computed == 100
    assert found.first == pytest.approx([first]) and found.between == pytest.approx([step] * 4)
    assert found.seconds == pytest.approx(3.0 + first + 4 * step, abs=1e-12)


def test_every_token_is_made_whatever_the_policy():
    trace = traffic.poisson(60, 2e4, prompt=100, new=150, texts=3, shared=400, seed=1)
    wanted = sum(request.new for request in trace)
    several = {
        "plain": run(trace),
        "few pages": traffic.simulate(trace, POLICY, CLOCK, pages=24, context=2048),
        "drafts": run(
            trace,
            dataclasses.replace(POLICY, block=3, decode_rows=(32,)),
            acceptance=(0.9, 0.8, 0.7),
        ),
        "prefix": run(trace, prefix=PrefixPolicy(every=1)),
    }
    assert all(result.tokens == wanted for result in several.values())
    assert all(len(result.first) == 60 for result in several.values())
    assert several["few pages"].preemptions > 0 == several["plain"].preemptions
    assert several["plain"].computed == several["plain"].prompt_tokens
    assert several["prefix"].computed < 0.6 * several["plain"].computed
    assert several["prefix"].seconds < several["plain"].seconds


def test_two_replicas_by_hand():
    """Each serves one of two requests as if alone; a third waits for the shorter queue."""
    alone = run([traffic.Request(3.0, 100, 5)])
    pair = [traffic.Request(3.0, 100, 5), traffic.Request(3.0, 100, 5)]
    both = run(pair, replicas=2)
    assert both.given == [1, 1] and both.first == alone.first * 2
    assert both.seconds == alone.seconds and sorted(both.between) == sorted(alone.between * 2)
    uneven = [traffic.Request(3.0, 100, 50), traffic.Request(3.0, 100, 5)]
    late = traffic.Request(3.0 + 1e-9, 100, 5)
    assert run([*uneven, late], replicas=2).given == [1, 2]


def test_warm_routing_computes_less():
    trace = traffic.poisson(60, 2e3, prompt=60, new=5, texts=6, shared=640, seed=3)
    found = {
        route: run(trace, replicas=3, prefix=PrefixPolicy(), route=route)
        for route in ("warm", "turns")
    }
    assert all(one.tokens == sum(request.new for request in trace) for one in found.values())
    assert all(sum(one.given) == 60 and min(one.given) > 5 for one in found.values())
    assert found["turns"].given == [20, 20, 20]
    assert found["warm"].computed < 0.8 * found["turns"].computed


def test_prefill_first_serves_first_tokens_sooner_and_others_later():
    trace = traffic.poisson(80, 5e4, prompt=400, new=30, seed=2)
    eager = run(trace, dataclasses.replace(POLICY, prefill_burst=16, decode_burst=1)).summary()
    steady = run(trace, dataclasses.replace(POLICY, prefill_burst=1, decode_burst=16)).summary()
    assert eager["first_p50_ms"] < steady["first_p50_ms"]
    assert eager["between_p99_ms"] > steady["between_p99_ms"]


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot'")
    found = run(traffic.poisson(20, 1e4, prompt=100, new=10))
    traffic.draw({"plain": found}, str(tmp_path / "times.png"))
    assert (tmp_path / "times.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command(capsys):
    command = "bench traffic --model v41-tiny --ranks 1 --requests 20 --rate 1e4 --prompt 200"
    command += " --new 10 --texts 2 --shared 512 --slots 4 --policy 4:4 --policy 4:4:prefix --json"
    assert cli.main(command.split()) == 0
    plain, cached = map(json.loads, capsys.readouterr().out.splitlines())
    assert plain["computed"] == 1 > cached["computed"] and cached["policy"] == "4:4:prefix"
    assert cli.main([*command.split(), "--policy", "4"]) == 2
    assert "policy '4': expected P:D or P:D:prefix" in capsys.readouterr().err
    spread = "--replicas 2 --policy 4:4:prefix:turns"
    assert cli.main([*command.split()[:-5], *spread.split(), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["replicas"] == 2 and record["uneven"] == 1


def test_a_request_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="need 17 pages"):
        run([traffic.Request(0.0, 2100, 5)])
