"""The engine's loop: plan step n + 1 and dispatch it, then read the results of step n.

The host never waits for the step it has just dispatched: newest tokens, lengths and drafts stay on
the device, and the scheduler plans without them. What the host sends with a step are small numpy
arrays (slots, page tables, sampling options), made anew for each step so that a step in flight
never sees a later write.
"""

import collections
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import structured
from deepinfer_jax.runtime import sampling_state
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.pages import PAGE, Pages
from deepinfer_jax.runtime.programs import Programs
from deepinfer_jax.runtime.requests import Sample, entry
from deepinfer_jax.runtime.sampling_params import MAX_LOGPROBS
from deepinfer_jax.runtime.scheduler import Act, Chunk, Move, Outcome, Policy, Scheduler, Step
from deepinfer_jax.runtime.step_types import DecodeInput, Options, PrefillInput, StepOutput
from deepinfer_jax.structured import Grammar, GrammarError, HostMatcher, PoolFullError, PoolManager

SCORE = "score"


class Flight(NamedTuple):
    """A dispatched step, the samples of its groups and its results to come."""

    step: Step
    samples: tuple[Sample, ...]
    output: StepOutput | None


class Loop:
    """Samples in, tokens out; see `engine.LLM` for the public face.

    policy: shapes and fairness. context: most tokens of a request. budget: called before each
    decode step for the number of draft rows that all slots share; None: each slot's whole block.
    """

    def __init__(
        self,
        programs: Programs,
        policy: Policy,
        *,
        context: int,
        pages: int,
        compiler: structured.Compiler | None = None,
        budget: Any = None,
    ):
        cfg = programs.setup.cfg
        self.programs, self.policy, self.context = programs, policy, context
        self.pages = Pages(pages, policy.slots, -(-context // PAGE))
        self.scheduler = Scheduler(policy, self.pages)
        self.options = programs.options
        self.state = states.empty(
            cfg,
            programs.setup.numerics,
            slots=policy.slots,
            pages=pages,
            block=self.options.block,
            rejection=self.options.rejection,
        )
        self.params = sampling_state.neutral(policy.slots)
        self.limit = np.zeros(policy.slots, np.int32)
        self.grammars = PoolManager(
            cfg.vocab_size, cells=1 << 16 if cfg.vocab_size < 4096 else 1 << 20
        )
        self.pool = self.grammars.empty()
        self.compiler, self.budget = compiler, budget
        self.capture: tuple[str, ...] = ()
        self._samples: dict[int, Sample] = {}
        self._slots: dict[int, Sample] = {}
        self._saved: dict[int, Any] = {}
        self._compiling: list[tuple[Sample, Future[Grammar]]] = []
        self._grammar: dict[int, Grammar] = {}
        self._flights: collections.deque[Flight] = collections.deque()
        self._forced: np.ndarray | None = None

    def __len__(self) -> int:
        """Samples that have not ended."""
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        """Enters a sample; one that cannot be served ends at once with its error."""
        self._samples[sample.number] = sample
        if sample.params.structured is not None:
            if self.compiler is None:
                self._drop(sample, "structured: this checkpoint has no tokenizer.json")
                return
            self._compiling.append((sample, self.compiler.submit(sample.params.structured)))
            return
        self._enqueue(sample)

    def abort(self, sample: Sample) -> None:
        """Ends a sample wherever it is."""
        if sample.number in self._samples:
            self.scheduler.abort(sample.number)
            sample.end("abort")
            self._forget(sample)

    def turn(self) -> None:
        """One round: dispatch what can be planned, then read the step before it."""
        self._compiled()
        step = self.scheduler.plan(self._granted())
        if step is not None:
            self._flights.append(self._dispatch(step))
        if self._flights and (len(self._flights) > 1 or step is None):
            self._consume(self._flights.popleft())
        elif step is None and self._compiling:
            self._compiling[0][1].exception()  # nothing else to do: wait for a grammar

    def drain(self) -> None:
        """Reads every step in flight."""
        while self._flights:
            flight = self._flights.popleft()
            self._consume(flight)

    def _enqueue(self, sample: Sample) -> None:
        kind = SCORE if sample.params.prompt_logprobs is not None else ""
        new = sample.limit - len(sample.prompt)
        try:
            self.scheduler.add(
                sample.number, len(sample.prompt), new, kind, alone=sample.matcher is not None
            )
        except ValueError as error:
            self._drop(sample, str(error))

    def _compiled(self) -> None:
        waiting = []
        for sample, future in self._compiling:
            if not future.done():
                waiting.append((sample, future))
            elif sample.number in self._samples:
                error = future.exception()
                if error is not None:
                    self._drop(sample, str(error))
                    continue
                grammar = future.result()
                try:
                    self.pool, sample.grammar_row = self.grammars.acquire(self.pool, grammar)
                except PoolFullError as full:
                    if not any(other.grammar_row >= 0 for other in self._samples.values()):
                        self._drop(sample, str(full))
                    else:
                        waiting.append((sample, future))  # until another grammar is released
                    continue
                except GrammarError as unfit:
                    self._drop(sample, str(unfit))
                    continue
                self._grammar[sample.number] = grammar
                if grammar.host is not None and self.compiler is not None:
                    sample.matcher = HostMatcher(grammar, self.compiler.vocabulary)
                self._enqueue(sample)
        self._compiling = waiting

    def _granted(self) -> int | None:
        """Draft rows of the next decode step, or None for whole blocks."""
        return None if self.budget is None else self.budget(self)

    def _dispatch(self, step: Step) -> Flight:
        for move in step.moves:
            self._move(move)
        samples = tuple(self._samples[item.request] for item in step.work)
        if not samples:
            return Flight(step, (), None)
        now = time.monotonic()
        for sample in samples:
            if sample.metrics.first_scheduled is None:
                sample.metrics.first_scheduled = now
        most = max(
            max(sample.params.logprobs or 0, sample.params.prompt_logprobs or 0)
            for sample in samples
        )
        vocab = self.programs.setup.cfg.vocab_size
        options = self.options._replace(
            top=min(MAX_LOGPROBS, vocab) if most else 0, capture=self.capture
        )
        self._host_masks(samples)
        if step.prefill:
            output = self._prefill(step, samples, options)
        else:
            output = self._decode(step, options)
        jax.tree.map(lambda leaf: leaf.copy_to_host_async(), output)
        return Flight(step, samples, output)

    def _move(self, move: Move) -> None:
        sample = self._samples[move.request]
        pages = np.full(self.pages.per_slot, -1, np.int32)
        pages[: len(move.pages)] = move.pages
        if move.act is Act.ADMIT:
            self._admit(sample, move.slot)
        elif move.act is Act.OFFLOAD:
            self._saved[sample.number] = self.programs.take(self.state, move.slot, pages)
            sample.metrics.preemptions += 1
        elif move.act is Act.RESTORE:
            saved = jax.device_get(self._saved.pop(sample.number))
            self.state = self.programs.put(self.state, move.slot, pages, saved)
            self._occupy(sample, move.slot)
        else:
            sample.metrics.preemptions += 1

    def _occupy(self, sample: Sample, slot: int) -> None:
        """Host-side options of a slot's new owner, in arrays that no step in flight reads."""
        self.params = jax.tree.map(np.copy, self.params)
        self.limit = self.limit.copy()
        sampling_state.write(self.params, slot, sample.params, sample.key, len(sample.prompt))
        self.limit[slot] = sample.limit
        self._slots[slot] = sample
        if self._forced is not None or sample.forced:
            old = self._forced
            shape = (self.policy.slots, self.context)
            self._forced = np.full(shape, -1, np.int32) if old is None else old.copy()
            self._forced[slot] = -1
            begin = len(sample.prompt)
            room = self.context - begin
            self._forced[slot, begin : begin + len(sample.forced)] = sample.forced[:room]

    def _admit(self, sample: Sample, slot: int) -> None:
        vocab = self.programs.setup.cfg.vocab_size
        stop = np.zeros(vocab, np.bool_)
        stop[list(sample.stops)] = True
        grammar = self._grammar.get(sample.number)
        trigger = bool(grammar is not None and grammar.trigger and grammar.host is None)
        begin = structured.start(sample.grammar_row, levels=states.GRAMMAR_LEVELS, trigger=trigger)
        for token in sample.output.token_ids:  # a request computed again
            begin = structured.advance(self.pool, begin, jnp.int32(token))
        bias = sampling_state.bias_row(sample.params, vocab)
        self.state = self.programs.admit(self.state, slot, bias, stop, begin)
        self._occupy(sample, slot)

    def _host_masks(self, samples: tuple[Sample, ...]) -> None:
        for sample in samples:
            if sample.matcher is not None:
                packed = sample.matcher.mask()
                self.pool = self.grammars.write_mask(self.pool, sample.grammar_row, packed)

    def _prefill(self, step: Step, samples: tuple[Sample, ...], options: Options) -> StepOutput:
        groups, width = step.shape
        blank = np.zeros(groups, np.int32)
        given = PrefillInput(
            token=np.zeros((groups, width), np.int32),
            slot=np.full(groups, -1, np.int32),
            start=blank.copy(),
            count=blank.copy(),
            total=blank.copy(),
            last=np.zeros(groups, np.bool_),
            output_from=np.full(groups, np.iinfo(np.int32).max, np.int32),
            following=np.full((groups, width), -1, np.int32),
            pages=np.full((groups, self.pages.per_slot), -1, np.int32),
            forced=np.full(groups, -1, np.int32),
            params=self.params,
            limit=self.limit,
        )
        keep, tail, score = self.programs.setup.cfg.replay_keep, False, False
        table = self.pages.snapshot()
        for place, (chunk, sample) in enumerate(zip(step.work, samples, strict=True)):
            assert isinstance(chunk, Chunk)
            tokens = sample.tokens
            end = chunk.start + chunk.count
            given.token[place, : chunk.count] = tokens[chunk.start : end]
            after = tokens[chunk.start + 1 : end + 1]
            given.following[place, : len(after)] = after
            given.slot[place], given.start[place] = chunk.slot, chunk.start
            given.count[place], given.last[place] = chunk.count, chunk.last
            given.total[place], given.output_from[place] = len(tokens), len(sample.prompt)
            given.pages[place] = table[chunk.slot]
            done = len(tokens) - len(sample.prompt)
            if chunk.last and done < len(sample.forced):
                given.forced[place] = sample.forced[done]
            tail = tail or end > len(tokens) - keep
            score = score or sample.params.prompt_logprobs is not None
        tail = tail or self.programs.setup.numerics.replay != "compact"
        self.state, output = self.programs.prefill(
            tail or score, score, options, self.state, self.pool, given
        )
        return output

    def _decode(self, step: Step, options: Options) -> StepOutput:
        groups, size = self.bucket(len(step.work), self._granted())
        table = self.pages.snapshot()
        slot = np.full(groups, -1, np.int32)
        pages = np.full((groups, self.pages.per_slot), -1, np.int32)
        room = np.zeros(groups, np.int32)
        for place, item in enumerate(step.work):
            slot[place], pages[place] = item.slot, table[item.slot]
            alone = self._samples[item.request].matcher is not None
            room[place] = 0 if alone else options.block
        given = DecodeInput(
            slot=slot,
            pages=pages,
            room=room,
            budget=np.int32(size - len(step.work)),
            forced=self._forced,
            params=self.params,
            limit=self.limit,
        )
        self.state, output = self.programs.decode(size, options, self.state, self.pool, given)
        return output

    def bucket(self, turns: int, draft_rows: int | None) -> tuple[int, int]:
        """(groups, rows) of the decode program for so many slots and draft rows."""
        sizes = sorted({min(8, self.policy.slots), self.policy.slots})
        groups = next(size for size in sizes if size >= turns)
        block = self.options.block
        if draft_rows is None or block == 0:
            return groups, groups * (1 + block)
        steps = sorted({groups * (1 + drafts) for drafts in (0, (block + 1) // 2, block)})
        return groups, next((size for size in steps if size >= turns + draft_rows), steps[-1])

    def _consume(self, flight: Flight) -> None:
        outcomes: dict[int, Outcome] = {}
        if flight.output is not None:
            found = jax.device_get(flight.output)
            for place, (item, sample) in enumerate(
                zip(flight.step.work, flight.samples, strict=True)
            ):
                if sample.number not in self._samples:
                    continue
                if isinstance(item, Chunk):
                    self._read_prompt(sample, item, found, place)
                    if not item.last:
                        continue
                else:
                    sample.metrics.decode_steps += 1
                    sample.metrics.verified_rows += int(found.verified[place])
                    sample.metrics.accepted_rows += max(int(found.count[place]) - 1, 0)
                outcomes[sample.number] = self._read_tokens(sample, found, place)
        self.scheduler.commit(flight.step, outcomes)
        for number, outcome in outcomes.items():
            if outcome.finished:
                self._forget(self._samples[number])

    def _read_tokens(self, sample: Sample, found: StepOutput, place: int) -> Outcome:
        count, finished = int(found.count[place]), False
        for at in range(count):
            token = int(found.tokens[place, at])
            wanted = sample.params.logprobs
            logprobs = None
            if wanted is not None:
                logprobs = entry(
                    token,
                    float(found.logprob[place, at]),
                    found.top_ids[place, at],
                    found.top_logprobs[place, at],
                    wanted,
                )
            self._read_capture(sample, found, place, at)
            if sample.matcher is not None:
                sample.matcher.accept(token)
            if sample.push(token, logprobs):
                finished = True
                break
        if bool(found.failed[place]) and not finished:
            sample.fail("the model's logits are not finite, or no token is allowed here")
            finished = True
        return Outcome(count, finished)

    def _read_prompt(self, sample: Sample, chunk: Chunk, found: StepOutput, place: int) -> None:
        wanted = sample.params.prompt_logprobs
        if wanted is None or found.prompt is None:
            return
        listed = sample.request.prompt_logprobs
        if listed is None:
            listed = sample.request.prompt_logprobs = [None for _ in sample.prompt]
        logprob, ids, values = (leaf[place] for leaf in found.prompt)
        for at in range(chunk.count):
            position = chunk.start + at + 1
            if position < len(sample.prompt):
                listed[position] = entry(
                    sample.prompt[position], float(logprob[at]), ids[at], values[at], wanted
                )

    def _read_capture(self, sample: Sample, found: StepOutput, place: int, at: int) -> None:
        for name, layers in found.captured.items():
            rows = sample.output.captured.setdefault(name, [])
            rows.append({layer: value[place, at] for layer, value in layers.items()})

    def _drop(self, sample: Sample, message: str) -> None:
        sample.fail(message)
        self._forget(sample)

    def _forget(self, sample: Sample) -> None:
        del self._samples[sample.number]
        self._saved.pop(sample.number, None)
        self._grammar.pop(sample.number, None)
        if sample.grammar_row >= 0:
            self.grammars.release(sample.grammar_row)
