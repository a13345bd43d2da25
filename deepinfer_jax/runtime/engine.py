"""`LLM`: prompts in, texts out.

    llm = LLM("path/to/checkpoint")
    for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(out.outputs[0].text)

Requests are independent: one that cannot be served ends with `finish_reason="error"` and its
message, the others go on. Results come in the order of the prompts, always one per prompt. What a
request gives depends on the weights, the prompt, its parameters and its seed alone.
"""

import dataclasses
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax import demo, structured
from deepinfer_jax.config import Numerics
from deepinfer_jax.layout import Layout
from deepinfer_jax.model.capture import ROW_NAMES
from deepinfer_jax.runtime import ahead, build, checkpoint, groups, noise, remote, reply, warmup
from deepinfer_jax.runtime.admission import Prompt, check, paired, token_ids
from deepinfer_jax.runtime.build import Shapes
from deepinfer_jax.runtime.delivery import deliver
from deepinfer_jax.runtime.grammars import table_cells
from deepinfer_jax.runtime.handover import Group, Split
from deepinfer_jax.runtime.loop import Loop
from deepinfer_jax.runtime.model import Model, load
from deepinfer_jax.runtime.outputs import PromptScore, RequestOutput
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from deepinfer_jax.runtime.replicas import Replicas
from deepinfer_jax.runtime.requests import Sample
from deepinfer_jax.runtime.sampling_params import SamplingParams
from deepinfer_jax.runtime.step_types import Options
from deepinfer_jax.runtime.text import Tokenizer, conversation_ids
from pallas_kernels import Kernels

ACCEPT = ("coupled", "rejection")


class LLM:
    """Offline inference with a checkpoint on one device or a layout of them.

    path: official or converted folder, None: the embedded demo; or a loaded `Model`, which keeps
    its layout, kernels and numerics (else as of `load`). max_slots: requests computed at once,
    rounded up to what the layout's data shards divide; max_context: most tokens of a request,
    prompt included. speculate: draft tokens verified a step (None: the trained block if the
    checkpoint has a drafter; 0: off), or "adaptive". accept: "coupled" (tokens equal to decoding
    without speculation) or "rejection" (equal in distribution). seed: of requests that bring none.
    cache: folder where step times measured for "adaptive" are kept (None: the user's cache).
    prefix_cache: prompts that begin alike share pages (see `prefix_types.PrefixPolicy`); results
    are those of an engine without it, to the bit with `Numerics.invariant`, unless rings are
    rebuilt by replay. devices: those of the layout's mesh, in its order (default: jax's first);
    engines on different devices work at once, a `Model` that lies elsewhere is copied there.
    prefill: other devices, or another layout of the same ones, that prompts are computed on (see
    `handover`); layout and devices are then those of decoding. replicas: so many groups of devices,
    one after another, with all weights each; calls and results are those of one group (see
    `replicas`). Raises ValueError naming the option.
    """

    def __init__(
        self,
        path: str | Path | Model | None = None,
        layout: Layout | None = None,
        kernels: str | dict[str, str] | Kernels = "auto",
        numerics: str | Numerics = "reference",
        max_slots: int = 32,
        max_context: int = 4096,
        speculate: int | str | None = None,
        accept: str = "coupled",
        seed: int = 0,
        shapes: Shapes | None = None,
        cache: str | Path | None = None,
        prefix_cache: bool | PrefixPolicy = False,
        devices: Sequence[Any] | None = None,
        prefill: Group | None = None,
        replicas: int = 1,
    ):
        path = demo.checkpoint() if path is None else path
        for name, value in (("max_slots", max_slots), ("max_context", max_context)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r}; expected a positive integer")
        if accept not in ACCEPT:
            raise ValueError(f"accept = {accept!r}; expected {' or '.join(map(repr, ACCEPT))}")
        if prefill is not None and replicas != 1:
            raise ValueError("replicas: not together with prefill")
        under = path.setup.layout if isinstance(path, Model) else layout or Layout.single()
        there = groups.divided(devices, under, replicas)
        self._devices = there[0]
        if isinstance(path, Model):
            self.model = path if there[0] is None else path.on(there[0])
        else:
            self.model = load(path, layout, kernels, numerics, there[0])
        cfg = self.model.cfg
        limit = cfg.max_position_embeddings
        if max_context > limit:
            raise ValueError(f"max_context = {max_context}; this model's positions end at {limit}")
        block = build.block_of(speculate, cfg)
        prefix = PrefixPolicy() if prefix_cache is True else prefix_cache or None
        window = cfg.sliding_window
        if prefix is not None and prefix.restore == "replay" and prefix.replay < window:
            raise ValueError(
                f"prefix_cache: replay = {prefix.replay}; expected at least this model's window, "
                f"{window}"
            )
        self.tokenizer, self._compiler = self._tokenizer(), None
        if self.tokenizer is not None:
            vocabulary = structured.Vocabulary.load(
                self.model.tokenizer, width=cfg.vocab_size, eos=(cfg.eos_token_id,)
            )
            limits = structured.Limits(table=table_cells(cfg.vocab_size))
            self._compiler = structured.Compiler(vocabulary, limits=limits)
        options = Options(block=block, rejection=accept == "rejection" and block > 0)
        parts = build.Parts(options, shapes or Shapes(), max_context, self._compiler)
        # Weights in memory are nobody else's.
        identity = uuid.uuid4().bytes
        if not isinstance(path, Model):
            identity = checkpoint.identity(path, self.model.setup, block > 0)
        self._path, self._group = None if isinstance(path, Model) else path, prefill
        self._loops = parts.loops(
            self.model,
            there,
            max_slots,
            prefix=prefix if prefill is None else None,
            adaptive=speculate == "adaptive",
            identity=identity,
        )
        if self._loops[0].adaptive:
            folder = warmup.default_folder() if cache is None else Path(cache)
            costs = warmup.step_seconds(self._loops[0], folder)
            for loop in self._loops:
                loop.costs = costs
        self._loop: Any = self._loops[0] if replicas == 1 else Replicas(self._loops)
        if prefill is not None:
            if self._loop.programs.everywhere:
                raise ValueError("prefill: not over several processes; give each its own engine")
            beside = build.beside(self.model, prefill, self._path)
            prompts = parts.loop(
                beside,
                prefill.slots,
                prefill.pages,
                decodes=False,
                prefix=prefix,
                identity=identity,
            )
            self._loop = Split(prompts, self._loop)
        self._seed, self._requests, self._numbers = seed, 0, 0

    def warm_up(self, *, logprobs: bool = True, scores: bool = True) -> None:
        """Compiles everything that requests can need, so that nothing compiles later.

        logprobs, scores: False leaves out the programs that report alternatives, or prompt
        log-probabilities. Captures and forced routes have programs of their own, which compile when
        first used. Raises ValueError while requests are in flight.
        """
        if len(self._loop):
            raise ValueError("warm_up: requests are in flight")
        for loop in self._every:
            warmup.compile_all(loop, logprobs=logprobs, scores=scores)

    def save_prefixes(self) -> None:
        """Writes the cached prompts to `PrefixPolicy.folder`, where a later engine finds them; not
        those of a replica that has failed. Raises ValueError while requests are in flight or
        without such a folder.
        """
        if len(self._loop):
            raise ValueError("save_prefixes: requests are in flight")
        loops = self._loop.groups if isinstance(self._loop, Replicas) else [self._loop]
        for prefix in [loop.prefix for loop in loops]:
            if prefix is None or prefix.policy.folder is None:
                raise ValueError("save_prefixes: prefix_cache has no folder")
            prefix.save()

    def swap_weights(self, path: str | Path) -> None:
        """Goes on with another checkpoint of the same model: nothing compiles, no cached prompt of
        the old weights is used again. Both are in memory for a moment.

        Raises ValueError while requests are in flight or where the model is another one.
        """
        if len(self._loop):
            raise ValueError("swap_weights: requests are in flight")
        setup = self.model.setup
        layout = None if setup.layout == Layout.single() else setup.layout
        fresh = load(path, layout, setup.kernels, setup.numerics, self._devices)
        if fresh.cfg != setup.cfg:
            raise ValueError(f"{path}: its config is not the one of the weights in use")
        self.model, self._path = dataclasses.replace(fresh, setup=setup), path
        beside = []
        if self._group is not None:
            beside = [build.beside(self.model, self._group, path).weights]
        drafts = self._loop.options.block > 0
        self._loop.swap(fresh.weights, checkpoint.identity(path, setup, drafts), *beside)

    @property
    def _every(self) -> Sequence[Loop]:
        """Its loops: one each replica, before it that of a prefill group."""
        return self._loop.each() if isinstance(self._loop, Split) else self._loops

    @property
    def replicas(self) -> Replicas:
        """Their reports; to stop and restart some. Raises ValueError for an engine of one."""
        if not isinstance(self._loop, Replicas):
            raise ValueError("replicas: this engine has one group of devices")
        return self._loop

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        capture: Sequence[str] = (),
        *,
        strict: bool = False,
    ) -> list[RequestOutput]:
        """Continues every prompt; results in the order of the prompts.

        prompts: text or token ids, or a list of them; sampling_params: one for all or one each;
        capture: names of `model.capture` recorded for each prompt row and each generated token (all
        but "compressed_kv" and "index_keys", which have no entry a row), not while other requests
        are in flight; strict: raise ValueError for the first request that fails instead of
        reporting it in its result.
        """
        unknown = sorted(set(capture) - ROW_NAMES)
        if unknown:
            known = ", ".join(sorted(ROW_NAMES))
            raise ValueError(f"capture: unknown name {unknown[0]!r}; expected {known}")
        if capture and len(self._loop):  # a step records the same of all its requests
            raise ValueError("capture: requests are in flight")
        work = paired(prompts, sampling_params)
        requests = [RequestOutput(None, []) for _ in work]
        self._loop.capture = tuple(capture)
        try:
            for number, request in self._run(iter(work), len(work)):
                requests[number] = request
        finally:
            self._loop.capture = ()
        if strict:
            for number, request in enumerate(requests):
                if request.error is not None:
                    raise ValueError(f"prompt {number}: {request.error}")
        return requests

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """The results as they grow: a request is given again whenever one of its samples has more
        tokens, the last time when it has finished. `.outputs[i].text` is the whole text so far."""
        work = paired(prompts, sampling_params)
        for _, request in self._run(iter(work), len(work), growing=True):
            yield request

    def chat(
        self,
        conversations: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | str | None = None,
    ) -> list[RequestOutput]:
        """The next assistant message of a conversation or of each of several; every output also has
        its parsed `reply`.

        conversations: messages {"role", "content", ..}, or a list of such lists; tools, thinking:
        of `text.conversation_ids`. Raises ValueError for what is no conversation.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.model.tokenizer}: no such file; chat needs it")
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        many = [conversations] if one else conversations
        prompts = [conversation_ids(self.tokenizer, some, tools, thinking) for some in many]
        requests = self.generate(prompts, sampling_params)
        for prompt, request in zip(prompts, requests, strict=True):
            for output in request.outputs:
                output.reply = reply.parse(self.tokenizer, prompt, output.token_ids)
        return requests

    def finished(
        self, work: Iterable[tuple[Prompt, SamplingParams]], window: int | None = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """(number, result) of an unbounded series of requests, in the order they finish.

        window: most requests taken from `work` and not yet finished (default: four a slot).
        """
        most = 4 * sum(one.policy.slots for one in self._loops) if window is None else window
        yield from self._run(iter(work), most)

    def prefilled(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[bytes]:
        """Computes prompts for another process: for each sample a frame of bytes, which `resumed`
        goes on from, as soon as it is done (see `remote`)."""
        return remote.prefilled(self, paired(prompts, sampling_params))

    def resumed(self, frames: Iterable[bytes]) -> Iterator[tuple[int, RequestOutput]]:
        """Goes on with frames of another process's `prefilled`: (number of the request there, its
        result), as they finish. Raises ValueError for a frame that does not belong here."""
        return remote.resumed(self, frames)

    @property
    def identity(self) -> dict[str, str]:
        """What a request's state depends on besides its prompt, for another process to compare.
        Raises ValueError for weights that came from no folder."""
        if self._path is None:
            raise ValueError("identity: a model in memory has none; give the checkpoint's path")
        return build.identity(self._path, self.model.setup, self._loop.options)

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[PromptScore]:
        """Log-probability of every prompt token given those before it: raw model, full replay.

        Raises ValueError for the first prompt that cannot be scored.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        scores = []
        for request in self.generate(prompts, params, strict=True):
            ids = request.prompt_token_ids
            found = request.prompt_logprobs or [None] * len(ids)
            values = [
                None if one is None else one[token] for token, one in zip(ids, found, strict=True)
            ]
            scores.append(PromptScore(ids, values))
        return scores

    def _run(
        self,
        work: Iterator[tuple[Prompt, SamplingParams]],
        window: int,
        *,
        growing: bool = False,
    ) -> Iterator[tuple[int, RequestOutput]]:
        return deliver(
            self._loop,
            self._enter,
            work,
            window,
            growing,
            lambda some: ahead.begin(self._loops, some),
        )

    def _enter(
        self,
        request: RequestOutput,
        prompt: Prompt,
        params: SamplingParams,
        grown: set[int] | None = None,
    ) -> list[Sample]:
        """Gives a request to the loop; grown: of its samples."""
        number, self._requests = self._requests, self._requests + 1
        request.metrics.arrival = time.monotonic()
        error, cfg, context = None, self.model.cfg, self._loop.context
        try:
            request.prompt_token_ids = ids = token_ids(prompt, self.tokenizer)
            check(ids, params, cfg, context, has_tokenizer=self.tokenizer is not None)
        except ValueError as found:
            error = str(found)
        request.metrics.prompt_tokens = len(request.prompt_token_ids)
        samples = []
        for index in range(params.n):
            key = noise.request_key(params.seed, self._seed, number, index)
            sample = self._sample(request, index, params, key)
            sample.grown = sample.grown if grown is None else grown
            samples.append(sample)
            if error is not None:
                sample.fail(error)
            else:
                self._loop.add(sample)
        return samples

    def _sample(
        self, request: RequestOutput, index: int, params: SamplingParams, key: Any
    ) -> Sample:
        sample = Sample.new(
            self._numbers,
            request,
            index,
            params,
            key,
            context=self._loop.context,
            eos=self.model.cfg.eos_token_id,
            tokenizer=self.tokenizer,
        )
        self._numbers += 1
        request.outputs.append(sample.output)
        return sample

    def _tokenizer(self) -> Tokenizer | None:
        cfg = self.model.cfg
        if not self.model.tokenizer.is_file():
            return None
        return Tokenizer(self.model.tokenizer.parent, cfg.bos_token_id, cfg.eos_token_id)
