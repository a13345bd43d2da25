"""An independent pushdown walk: what the device's masks and moves must equal, byte by byte."""

import numpy as np

from deepinfer_jax import structured
from deepinfer_jax.structured import ebnf, network
from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.pushdown import pushdown
from tests.structured.grammar_walk import WIDTH


class Simulation:
    """A pushdown automaton run byte by byte, with an explicit stack of bounded depth."""

    def __init__(self, text: str, vocabulary, levels: int):
        self.machine = pushdown(network.build(ebnf.parse(text), Budget(structured.Limits())))
        self.vocabulary, self.levels = vocabulary, levels
        self.end = self.machine.action.shape[1] - 1

    def token(self, config, token):
        """(state, stack) after a token, or None."""
        symbols = self.machine.byte_class[list(self.vocabulary.texts[token])].tolist()
        if token in self.vocabulary.eos:
            symbols = [self.end]
        if not symbols:
            return None
        for symbol in symbols:
            config = self.move(*config, symbol)
            if config is None:
                return None
        return self.settle(*config)

    def settle(self, state, stack):
        while stack and self.machine.pure[state]:
            state = int(self.machine.goto[stack[-1], self.machine.final[state] - 1])
            stack = stack[:-1]
        return (state, stack) if len(stack) <= self.levels else None

    def move(self, state, stack, symbol):
        machine = self.machine
        while not machine.action[state, symbol]:
            if not machine.final[state] or not stack:
                return None
            state = int(machine.goto[stack[-1], machine.final[state] - 1])
            stack = stack[:-1]
        stack = stack + machine.pushes[machine.push[state, symbol]]
        return int(machine.action[state, symbol]), stack

    def mask(self, config):
        return np.array([self.token(config, t) is not None for t in range(WIDTH)])
