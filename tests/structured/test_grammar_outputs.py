"""What the golden checkpoint writes under every authored schema and regex, through `LLM`.

Its weights are random, so that it tries all that a mask allows. All texts are judged by
`jsonschema` and `re`. One engine and two programs for all cases: the pool takes grammars as they
come, and a hundred samples of different grammars share every step.
"""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import deepinfer_jax as dj
from deepinfer_jax.runtime.engine import Shapes
from tests.structured.grammar_walk import read_cases

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
SLOTS = 128
SCHEMAS = {case["id"]: case["schema"] for case in read_cases("schemas_authored.json")["cases"]}
REGEXES = [case["regex"] for case in read_cases("regex.json")["accept_reject"]]


@pytest.fixture(scope="module")
def llm() -> dj.LLM:
    numerics = dj.Numerics.preset("float32", cache_qdq=False)
    shapes = Shapes(prefill=((SLOTS, 1),))
    made = dj.LLM(
        GOLDEN,
        numerics=numerics,
        max_slots=SLOTS,
        max_context=512,
        speculate=0,
        shapes=shapes,
        seed=2,
    )
    loop: Any = made._loop
    loop.buckets = lambda: {SLOTS: (SLOTS,)}  # the last few share the program of the many
    return made


def wrong(llm: dj.LLM, samples: int, spare: int) -> list[tuple[str, str, str]]:
    """(case, text, why) of every output that is not valid or did not end."""
    compiler: Any = llm._loop.grammars._compiler
    specs = [
        *({"json_schema": s} for s in SCHEMAS.values()),
        *({"regex": r} for r in REGEXES),
    ]
    params = [
        dj.SamplingParams(
            n=samples,
            max_tokens=compiler.submit(spec).result().report.min_tokens + spare,
            structured=spec,
        )
        for spec in specs
    ]
    found = llm.generate([[0]] * len(specs), params, strict=True)
    failed = []
    for name, spec, request in zip([*SCHEMAS, *REGEXES], specs, found, strict=True):
        assert len(request.outputs) == samples
        for output in request.outputs:
            if output.finish_reason != "stop":
                failed.append((name, output.text, output.finish_reason))
            elif "regex" in spec:
                if not re.fullmatch(spec["regex"], output.text, re.ASCII):
                    failed.append((name, output.text, "no match"))
            else:
                try:
                    _validator(spec["json_schema"]).validate(json.loads(output.text))
                except (ValueError, jsonschema.ValidationError) as error:
                    failed.append((name, output.text, str(error)))
    return failed


def _validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())


def test_all_outputs_are_valid(llm: dj.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample a case, with a few tokens to spare; the pool has room for all of them at once."""
    loop: Any = llm._loop
    together, dispatch = [], loop._dispatch
    monkeypatch.setattr(
        loop, "_dispatch", lambda step: together.append(len(step.work)) or dispatch(step)
    )
    assert wrong(llm, samples=1, spare=8) == []
    assert max(together) == len(SCHEMAS) + len(REGEXES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
def test_many_longer_outputs_are_valid(llm: dj.LLM, part: int) -> None:
    """200 samples a case, 20 at a time: the running number of a request is its seed."""
    assert wrong(llm, samples=20, spare=40) == []
