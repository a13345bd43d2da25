"""The whole engine: how long the device waits between decode steps, and how fast prompts go in.

`idle_between_steps` serves as many requests as there are slots, lets every prompt pass, and
profiles decode steps while all of them decode: whatever the host does (planning, feeding, reading,
text) is in it. `prefill` times prompts through an engine whose prefill step has one shape.

`rank_model` is a model in memory with one rank's share of an expert-parallel group: here the router
knows the held experts only, so that every row's pairs stay (`slices.rank` keeps the whole router).
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.bench import drawn, idle, slices
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model import transformer
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.runtime import warmup
from deepinfer_jax.runtime.engine import LLM, Shapes
from deepinfer_jax.runtime.model import Model
from deepinfer_jax.runtime.pages import PAGE
from deepinfer_jax.runtime.sampling_params import SamplingParams
from pallas_kernels import Kernels

WARM = 4  # decode steps before the profile


def rank_model(
    cfg: ModelConfig, ranks: int, numerics: Numerics, kernels: Kernels | None = None
) -> Model:
    """A drawn model of the default device; no tokenizer, so prompts are token ids."""
    cfg, shared = slices.share(cfg, ranks)
    held = max(cfg.num_experts_per_tok, cfg.n_routed_experts // ranks)
    cfg = dataclasses.replace(cfg, n_routed_experts=held)
    weights = dataclasses.replace(transformer.abstract(cfg), token_map=shared.token_map)
    setup = Setup(cfg, kernels=kernels or Kernels.auto(), numerics=numerics)
    return Model(setup, drawn.materialise(weights), Path("synthetic weights have no tokenizer"))


def enough_pages(slots: int, context: int) -> int:
    """Pages with which every slot is in use at once: the scheduler keeps one free for each request
    that is in, beside those a request holds."""
    return slots * (-(-context // PAGE) + 1)


def idle_between_steps(llm: LLM, prompt: int, steps: int, folder: str | Path) -> dict[str, Any]:
    """Idle time of the device over about `steps` decode steps with every slot in use.

    Raises ValueError if max_context leaves no room for so many steps.
    """
    loop = llm._loops[0]
    slots, block = loop.policy.slots, loop.options.block
    # Whoever decodes first has to go on until the last prompt has passed and the profile is made.
    least = (WARM + steps + 4) * (1 + block) + prompt
    if least >= loop.context:
        raise ValueError(f"max_context = {loop.context}; expected {least + 1} or more")
    tokens = loop.context - prompt - 1
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(_prompts(llm, slots, prompt), dataclasses.replace(params, max_tokens=2 + block))
    counted = loop.dispatched
    begin, profiled = counted.copy(), counted
    decodes = seen = 0
    decoding: set[int] = set()
    profile, first = None, 0
    stream: Any = llm.stream(_prompts(llm, slots, prompt, seed=1), params)
    try:
        for request in stream:
            if request.outputs[0].finish_reason is not None:
                raise ValueError(f"max_context = {loop.context}; a request ended in the profile")
            decodes = _steps(counted - begin, "decode")
            if len(decoding) < slots:
                decoding.add(id(request))
                seen = decodes
            elif profile is None and decodes - seen >= WARM:
                profile, first, profiled = idle.recorded(folder), decodes, counted.copy()
                profile.__enter__()
            elif profile is not None and decodes - first >= steps:
                break
    finally:
        if profile is not None:
            profile.__exit__(None, None, None)
        stream.close()
    ops = idle.read(folder)
    module = idle.busiest(ops)
    return {
        "requests": slots,
        "groups": _groups(counted - profiled),
        "prefills": _steps(counted - profiled, "prefill"),
        "prompt": prompt,
        "context": loop.context,
        "draft_block": block,
        "steps": decodes - first,
        "module": module,
        "idle": dataclasses.asdict(idle.measure(ops, module)),
    }


def prefill(
    llm_of: Any, shapes: Sequence[tuple[int, int]], requests: int, runs: int
) -> Iterator[dict[str, Any]]:
    """For each prefill shape (sequences, width): prompt tokens a second of the engine, and of its
    prefill steps alone run one by one. llm_of: `LLM` with everything but slots and shapes."""
    for sequences, width in shapes:
        context = width + 8
        pages = enough_pages(sequences, context)
        shapes_of = Shapes(prefill=((sequences, width),), pages=pages)
        llm = llm_of(max_slots=sequences, max_context=context, shapes=shapes_of)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        work = _prompts(llm, max(requests // sequences, 1) * sequences, width)
        llm.generate(work[:sequences], params, strict=True)  # compiles
        before, seconds = llm._loops[0].dispatched.copy(), []
        for _ in range(runs):
            begin = time.perf_counter()
            llm.generate(work, params, strict=True)
            seconds.append(time.perf_counter() - begin)
        count = _steps(llm._loops[0].dispatched - before, "prefill") // runs
        step = warmup.measure_prefill(llm._loops[0])[sequences, width]
        wall = statistics.median(seconds)
        yield {
            "name": f"engine prefill, {sequences} prompts of {width}",
            "tokens_per_turn": sequences * width,
            "requests": len(work),
            "seconds": seconds,
            "steps": count,
            "step_seconds": step,
            "tokens_s": len(work) * width / wall,
            "step_tokens_s": sequences * width / step,
            "engine_device": wall / (count * step),
        }


def _groups(counted: Any) -> list[int]:
    """Sizes of the decode steps in a count of steps."""
    return sorted({groups for name, groups, _ in counted if name == "decode"})


def _prompts(llm: LLM, count: int, length: int, seed: int = 0) -> list[list[int]]:
    cfg = llm.model.cfg
    most = min(cfg.vocab_size, cfg.image_token_id)
    return np.random.default_rng(seed).integers(3, most, (count, length)).tolist()


def _steps(counted: Any, kind: str) -> int:
    return sum(number for (name, _, _), number in counted.items() if name == kind)
