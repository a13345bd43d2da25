"""The same schemas through this package, llguidance and xgrammar: compile time, masks, coverage.

    python tests/structured/bench_side_by_side.py TOKENIZER_JSON [CASES.json ...]
    python tests/structured/bench_side_by_side.py TOKENIZER_JSON --dump FILE       # for xgrammar:
    OTHER/bin/python tests/structured/bench_side_by_side.py --xgrammar FILE [CASES.json ...]

A schema is right if all its valid instances (JSON without escapes) are accepted with the end after
them and no invalid one is; "over": something invalid accepted; "under": something valid not;
refused: an error. Times are processor time with the real vocabulary: compilation up to and with the
first mask, then a mask a token along the instances. Our masks are computed for 32 sequences in one
compiled call, whose time is divided by 32; our verdicts are those of the tests' small vocabulary.
xgrammar imports torch and transformers, which it does not need for this: stubs stand in for them,
so it runs in an environment that has neither.
"""

import argparse
import importlib.machinery
import json
import pickle
import statistics
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent / "cases" / "schemas_authored.json"
WIDTH, EOS = 129_280, 1
Verdict = tuple[bool, list[float]]  # accepted with the end after it; seconds of each mask


def tokenise(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """Longest pieces first."""
    out, at = [], 0
    while at < len(text):
        size = next(n for n in range(min(128, len(text) - at), 0, -1) if text[at : at + n] in ids)
        out.append(ids[text[at : at + size]])
        at += size
    return out


class Llguidance:
    def __init__(self, texts: list[bytes]):
        import llguidance

        from deepinfer_jax.structured import host

        vocabulary = types.SimpleNamespace(texts=texts, eos=(EOS,), width=WIDTH)
        self.library = llguidance.LLMatcher
        wrapper = llguidance.TokenizerWrapper(host._Tokenizer(vocabulary))  # type: ignore
        self.tokenizer = llguidance.LLTokenizer(wrapper)

    def compile(self, schema: str) -> Any:
        text = self.library.grammar_from_json_schema(schema)
        if message := self.library.validate_grammar(text, self.tokenizer):
            raise ValueError(message)
        self.library(self.tokenizer, text).compute_bitmask()
        return text

    def run(self, grammar: Any, tokens: list[int]) -> Verdict:
        matcher, seconds = self.library(self.tokenizer, grammar), []
        for token in tokens:
            begin = time.thread_time()
            matcher.compute_bitmask()
            seconds.append(time.thread_time() - begin)
            if matcher.try_consume_tokens([token]) != 1:
                return False, seconds
        return matcher.is_accepting(), seconds


class Xgrammar:
    def __init__(self, texts: list[bytes]):
        import numpy as np
        import tvm_ffi  # before the stubs: it looks for a real torch

        assert tvm_ffi
        for name in ("torch", "transformers", "triton"):
            stub = types.ModuleType(name)
            stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
            stub.__getattr__ = lambda _: _Anything  # type: ignore
            sys.modules[name] = stub
        import xgrammar

        self.library = xgrammar
        special = [text or b"<no text %d>" % i for i, text in enumerate(texts)]
        info = xgrammar.TokenizerInfo(special, vocab_size=WIDTH, stop_token_ids=[EOS])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.bits = np.zeros((1, -(-WIDTH // 32)), np.int32)

    def compile(self, schema: str) -> Any:
        found = self.compiler.compile_json_schema(schema, strict_mode=False)
        self._fill(self.library.GrammarMatcher(found))
        return found

    def _fill(self, matcher: Any) -> None:
        matcher._handle.fill_next_token_bitmask(self.bits, 0, False)

    def run(self, grammar: Any, tokens: list[int]) -> Verdict:
        matcher, seconds = self.library.GrammarMatcher(grammar), []
        for token in [*tokens, EOS]:
            begin = time.thread_time()
            self._fill(matcher)
            seconds.append(time.thread_time() - begin)
            if not matcher.accept_token(token):
                return False, seconds
        return True, seconds


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Anything(metaclass=_Attributes):
    """A class that has every attribute, takes every argument and can be derived from."""

    def __init__(self, *_: Any, **__: Any):
        pass


class Ours:
    """Compiles for the real vocabulary; judges with the tests' small one."""

    def __init__(self, tokenizer: str):
        import tempfile

        from deepinfer_jax import structured
        from tests.structured.grammar_walk import EOS as END
        from tests.structured.grammar_walk import WIDTH as SMALL
        from tests.structured.grammar_walk import Walker, write_tokenizer

        self.vocabulary = structured.Vocabulary.load(tokenizer, width=WIDTH, eos=[EOS])
        self.texts = [bytes(text) for text in self.vocabulary.texts]
        self._compile = structured.compile
        with tempfile.TemporaryDirectory() as folder:
            path = write_tokenizer(Path(folder))
            self.walker = Walker(structured.Vocabulary.load(path, width=SMALL, eos=[END]))
        self.large = Walker(self.vocabulary)

    def compile(self, schema: str) -> Any:
        return self._compile({"json_schema": schema}, self.vocabulary), schema

    def accepts(self, grammar: Any, texts: list[str]) -> list[bool]:
        return self.walker.accepts(self.walker.compile({"json_schema": grammar[1]}), texts)

    def mask_seconds(self, grammar: Any) -> float:
        """A mask of one of 32 sequences, waiting for the result."""
        from tests.structured.grammar_walk import mask

        row = self.large.load(grammar[0])
        state, best = self.large.state(grammar[0], row, 32), 1e9
        for _ in range(3):
            begin = time.process_time()
            mask(self.large.pool, state)
            best = min(best, time.process_time() - begin)
        self.large.manager.release(row)
        return best / 32


def cases(paths: list[Path]) -> Iterator[tuple[str, list[str], list[str]]]:
    for path in paths:
        for case in json.loads(path.read_text())["cases"]:
            texts = [
                [json.dumps(value, ensure_ascii=False) for value in case[kind]]
                for kind in ("valid", "invalid")
            ]
            yield json.dumps(case["schema"]), texts[0], texts[1]


def measure(name: str, library: Any, judge: Callable[..., Any], paths: list[Path]) -> None:
    counts: Counter[str] = Counter()
    compiled, masks = [], []
    for schema, valid, invalid in cases(paths):
        begin = time.process_time()  # a library may compile on a thread of its own
        try:
            grammar = library.compile(schema)
        except (ValueError, RuntimeError):
            counts["refused"] += 1
            continue
        compiled.append(time.process_time() - begin)
        verdicts, seconds = judge(library, grammar, [*valid, *invalid])
        masks += seconds
        under, over = not all(verdicts[: len(valid)]), any(verdicts[len(valid) :])
        counts["over"] += over
        counts["under"] += under
        counts["right"] += not (over or under)
    row = [counts[key] for key in ("right", "refused", "over", "under")]
    row += [f"{1e3 * at(compiled):.2f}" for at in (statistics.median, _p90, max)]
    row += [f"{1e3 * at(masks):.3f}" for at in (statistics.median, _p90, max)]
    print(f"| {name} | " + " | ".join(map(str, row)) + " |", flush=True)


def _p90(values: list[float]) -> float:
    return sorted(values)[int(0.9 * len(values))]


def walk(texts: list[bytes]) -> Callable[..., Any]:
    ids = {text: token for token, text in enumerate(texts) if text}

    def judge(library: Any, grammar: Any, instances: list[str]) -> tuple[list[bool], list[float]]:
        found = [library.run(grammar, tokenise(text.encode(), ids)) for text in instances]
        return [ok for ok, _ in found], [s for _, seconds in found for s in seconds]

    return judge


def judge_ours(library: Ours, grammar: Any, instances: list[str]) -> tuple[list[bool], list[float]]:
    return library.accepts(grammar, instances), [library.mask_seconds(grammar)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tokenizer", nargs="?", help="tokenizer.json of the real vocabulary")
    parser.add_argument("cases", nargs="*", type=Path, default=[CASES], help="files of schemas")
    parser.add_argument("--dump", type=Path, help="write the vocabulary for --xgrammar, and stop")
    parser.add_argument("--xgrammar", type=Path, metavar="FILE", help="measure xgrammar only")
    options = parser.parse_args()
    head = "right | refused | over | under | compile ms, median | p90 | max | mask ms, median | p90"
    if options.xgrammar:
        texts = pickle.loads(options.xgrammar.read_bytes())
        paths = [Path(options.tokenizer)] if options.tokenizer else []
        paths = [*paths, *(path for path in options.cases if path != CASES)] or [CASES]
        print(f"| | {head} | max |\n|---|" + "---|" * 10)
        measure("xgrammar", Xgrammar(texts), walk(texts), paths)
        return
    ours = Ours(options.tokenizer)
    if options.dump:
        options.dump.write_bytes(pickle.dumps(ours.texts))
        return
    print(f"| | {head} | max |\n|---|" + "---|" * 10)
    measure("this package", ours, judge_ours, options.cases)
    measure("llguidance", Llguidance(ours.texts), walk(ours.texts), options.cases)


if __name__ == "__main__":
    main()
