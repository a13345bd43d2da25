"""Generated text of the demo's corpus: short stories, questions and answers, JSON, code.

Everything is drawn from the word lists below by a seeded generator, so it is free of other people's
rights and can be made again. A document is text, or a conversation in the prompt format of the
official encoding (BOS and EOS are added by the corpus):

    story          one hero, one wish, one trouble, one helper; names and pronouns stay consistent
    conversation   <User> question <Assistant></think> answer, one to three turns
    record         a JSON object, alone or asked for in words
    code           a small Python function and a call with its result
"""

import json
from collections.abc import Callable

import numpy as np

USER, ASSISTANT, NO_THINKING = "<｜User｜>", "<｜Assistant｜>", "</think>"
TURN_END = "<｜end▁of▁sentence｜>"


def _words(text: str, between: str | None = None) -> list[str]:
    return text.split(between)


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split())


GIRLS = _words("Anna Clara Ella Emma Ida Julia Lily Lucy Mary Nora Rosa Sarah Sophie Tessa")
BOYS = _words("Adam Ben David Felix Hugo Jack Leo Max Noah Oscar Paul Peter Sam Tom")
ANIMALS = _words(
    "bear cat crow dog duck fox frog goat hen horse mouse owl rabbit sheep turtle wolf"
)
ADJECTIVES = _words(
    "big brave clever gentle happy kind little old quiet small strong tired wise young"
)
COLOURS = _words("black blue brown green grey orange pink purple red white yellow")
THINGS = _words("ball basket bell book boat box cake candle clock cup drum hat kite lamp map ring")
PLACES = _words(
    "the forest|the garden|the harbour|the hill|the lake|the market|the meadow|the mill|"
    "the old bridge|the river|the school|the tower|the village|the wood",
    "|",
)
WEATHER = _words("sunny rainy windy snowy cloudy cold warm foggy")
FOODS = _words("apple bread cheese egg honey milk nut pear plum rice soup tea")
TRAITS = _words("kind brave patient honest helpful careful generous thankful")
CAPITALS = _pairs(
    "France:Paris Spain:Madrid Italy:Rome Germany:Berlin Austria:Vienna Poland:Warsaw "
    "Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin "
    "Portugal:Lisbon Greece:Athens Hungary:Budapest Egypt:Cairo Kenya:Nairobi Japan:Tokyo "
    "China:Beijing Korea:Seoul Canada:Ottawa Cuba:Havana Peru:Lima Chile:Santiago"
)
OPPOSITES = _pairs(
    "hot:cold big:small fast:slow early:late light:dark high:low open:closed full:empty "
    "old:young wet:dry hard:soft near:far long:short happy:sad loud:quiet rich:poor"
)
SOUNDS = _pairs(
    "dog:barks cat:meows duck:quacks horse:neighs sheep:bleats owl:hoots frog:croaks wolf:howls "
    "mouse:squeaks hen:clucks"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve")


class Writer:
    """Draws documents; the same seed gives the same documents."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def document(self) -> str:
        """One document of a kind drawn by weight."""
        kinds: tuple[Callable[[], str], ...] = (
            self.story,
            self.conversation,
            self.record,
            self.code,
        )
        return kinds[int(self._rng.choice(4, p=(0.5, 0.26, 0.14, 0.10)))]()

    def pick(self, items):
        return items[int(self._rng.integers(len(items)))]

    def maybe(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    # Stories.

    def hero(self) -> dict[str, str]:
        """A child or an animal with its pronouns."""
        if self.maybe(0.65):
            girl = self.maybe(0.5)
            name = self.pick(GIRLS if girl else BOYS)
            kind = "girl" if girl else "boy"
            words = ("she", "her", "her") if girl else ("he", "him", "his")
        else:
            kind, girl = self.pick(ANIMALS), self.maybe(0.5)
            name = self.pick(GIRLS if girl else BOYS)
            words = ("she", "her", "her") if girl else ("he", "him", "his")
        return {"name": name, "kind": kind, "he": words[0], "him": words[1], "his": words[2]}

    def story(self) -> str:
        """Beginning, wish, trouble, help, end, moral."""
        h, friend = self.hero(), self.pick(ANIMALS)
        adj, friend_adj = self.pick(ADJECTIVES), self.pick(ADJECTIVES)
        place, other = self.pick(PLACES), self.pick(PLACES)
        colour, thing, weather = self.pick(COLOURS), self.pick(THINGS), self.pick(WEATHER)
        food, trait = self.pick(FOODS), self.pick(TRAITS)
        he, him, his, name = h["he"], h["him"], h["his"], h["name"]
        He = he.capitalize()
        lines = [
            self.pick(
                (
                    f"Once upon a time there was {a(adj)} {h['kind']} named {name}.",
                    f"Once there lived {a(adj)} {h['kind']} whose name was {name}.",
                    f"There was once {a(adj)} {h['kind']} called {name}.",
                )
            ),
            self.pick(
                (
                    f"{name} lived in a {self.pick(('small', 'white', 'little', 'stone'))} "
                    f"house near {place}.",
                    f"{He} lived near {place} with {his} "
                    f"{self.pick(('mother', 'father', 'grandmother', 'grandfather'))}.",
                    f"{His(his)} home was beside {place}.",
                )
            ),
            self.pick(
                (
                    f"{name} had {a(colour)} {thing} and loved it very much.",
                    f"More than anything else, {name} loved {his} {colour} {thing}.",
                    f"Every day {he} played with {a(colour)} {thing}.",
                )
            ),
        ]
        day = f"One {weather} {self.pick(('morning', 'day', 'afternoon', 'evening'))}"
        lines += self.pick(
            (
                [
                    f"{day}, {name} went to {other} and lost the {thing}.",
                    f"{He} looked under the {self.pick(('trees', 'stones', 'leaves', 'bushes'))}, "
                    f"but the {thing} was not there.",
                    f"{name} sat down and began to cry.",
                ],
                [
                    f"{day}, the {thing} fell into the water near {other}.",
                    f"{name} could not reach it, and {he} was very sad.",
                ],
                [
                    f"{day}, the wind carried the {thing} away to {other}.",
                    f"{name} ran after it, but the wind was too fast.",
                    f'"Oh no," said {name}. "My {thing} is gone!"',
                ],
            )
        )
        lines += [
            self.pick(
                (
                    f"Then {a(friend_adj)} {friend} came by and saw {him}.",
                    f"Just then {a(friend_adj)} {friend} came along the road.",
                    f"After a while {he} met {a(friend_adj)} {friend}.",
                )
            ),
            f'"Why are you so sad?" asked the {friend}.',
            f'"I have lost my {colour} {thing}," said {name}.',
            self.pick(
                (
                    f'"Do not cry," said the {friend}. "I will help you."',
                    f'"Let us look for it together," said the {friend}.',
                    f'"If you give me some {food}, I will find it," said the {friend}.',
                )
            ),
        ]
        if "give me" in lines[-1]:
            lines.append(f"{name} gave the {friend} some {food}, and the {friend} ate it all.")
        lines += self.pick(
            (
                [f"They walked to {other} and looked for a long time."],
                [f"The {friend} looked here and there and everywhere."],
                [f"So {name} and the {friend} went to {other} hand in hand."],
            )
        )
        lines += [
            self.pick(
                (
                    f"At last the {friend} found the {thing} behind a "
                    f"{self.pick(('tree', 'wall', 'rock', 'door', 'fence'))}.",
                    f"In the end they saw something {colour} in the grass. It was the {thing}!",
                    f"Soon the {friend} came back with the {colour} {thing}.",
                )
            ),
            self.pick(
                (
                    f'{name} was so happy that {he} danced. "Thank you!" {he} said.',
                    f'"Thank you, dear {friend}," said {name}. "You are very {trait}."',
                    f"{name} thanked the {friend} and gave {a(food)} cake to {his} new friend."
                    if food in ("apple", "honey", "nut", "pear", "plum", "rice", "egg")
                    else f"{name} thanked the {friend} and shared {his} {food}.",
                )
            ),
            self.pick(
                (
                    f"From that day on, {name} and the {friend} were good friends.",
                    f"After that, {name} and the {friend} played together every day.",
                    "They went home together and were friends for ever.",
                )
            ),
        ]
        if self.maybe(0.5):
            lines.append(f"And {name} learned that it is good to be {trait}.")
        return " ".join(lines)

    # Conversations.

    def question(self) -> tuple[str, str]:
        """A question and its answer."""
        kinds = (
            self._capital,
            self._sum,
            self._opposite,
            self._sound,
            self._day,
            self._colour,
            self._story_request,
            self._number,
            self._month,
            self._greeting,
        )
        return self.pick(kinds)()

    def conversation(self) -> str:
        """One to three turns."""
        turns = []
        for _ in range(int(self._rng.integers(1, 4))):
            asked, answered = self.question()
            turns.append(f"{USER}{asked}{ASSISTANT}{NO_THINKING}{answered}")
        return TURN_END.join(turns)

    def _capital(self) -> tuple[str, str]:
        land = self.pick(list(CAPITALS))
        city = CAPITALS[land]
        return self.pick(
            (
                (f"What is the capital of {land}?", f"The capital of {land} is {city}."),
                (f"Which city is the capital of {land}?", f"The capital of {land} is {city}."),
                (f"In which country is {city}?", f"{city} is the capital of {land}."),
            )
        )

    def _sum(self) -> tuple[str, str]:
        x, y = (int(n) for n in self._rng.integers(0, 13, 2))
        if self.maybe(0.6):
            return self.pick((f"What is {x} plus {y}?", f"What is {x} + {y}?")), (
                f"{x} plus {y} is {x + y}."
            )
        x, y = max(x, y), min(x, y)
        return f"What is {x} minus {y}?", f"{x} minus {y} is {x - y}."

    def _opposite(self) -> tuple[str, str]:
        word = self.pick(list(OPPOSITES))
        return f"What is the opposite of {word}?", f"The opposite of {word} is {OPPOSITES[word]}."

    def _sound(self) -> tuple[str, str]:
        animal = self.pick(list(SOUNDS))
        return f"What sound does a {animal} make?", f"{a(animal).capitalize()} {SOUNDS[animal]}."

    def _day(self) -> tuple[str, str]:
        at = int(self._rng.integers(7))
        return f"Which day comes after {DAYS[at]}?", f"After {DAYS[at]} comes {DAYS[(at + 1) % 7]}."

    def _month(self) -> tuple[str, str]:
        at = int(self._rng.integers(12))
        return (
            f"Which month comes after {MONTHS[at]}?",
            f"After {MONTHS[at]} comes {MONTHS[(at + 1) % 12]}.",
        )

    def _colour(self) -> tuple[str, str]:
        name, thing, colour = self.pick(GIRLS + BOYS), self.pick(THINGS), self.pick(COLOURS)
        return (
            f"{name} has {a(colour)} {thing}. What colour is the {thing}?",
            f"The {thing} is {colour}.",
        )

    def _number(self) -> tuple[str, str]:
        at = int(self._rng.integers(13))
        return f"How do you write {at} in words?", f"The number {at} is written {NUMBERS[at]}."

    def _greeting(self) -> tuple[str, str]:
        return self.pick(
            (
                ("Hello!", "Hello! How can I help you?"),
                ("Hi, how are you?", "I am well, thank you. How can I help you?"),
                ("Thank you.", "You are welcome."),
                ("Who are you?", "I am a very small language model that runs on your computer."),
                ("Good morning.", "Good morning! What would you like to know?"),
            )
        )

    def _story_request(self) -> tuple[str, str]:
        asked = self.pick(("Tell me a story.", "Please tell me a short story.", "Tell a story."))
        return asked, self.story()

    # Records and code.

    def _person(self) -> dict[str, object]:
        return {
            "name": self.pick(GIRLS + BOYS),
            "age": int(self._rng.integers(3, 90)),
            "city": self.pick(list(CAPITALS.values())),
            "likes": [self.pick(FOODS), self.pick(THINGS)],
        }

    def _item(self) -> dict[str, object]:
        return {
            "item": self.pick(THINGS),
            "colour": self.pick(COLOURS),
            "price": int(self._rng.integers(1, 100)),
            "in_stock": self.maybe(0.5),
        }

    def record(self) -> str:
        """A JSON object, alone or as the answer to a request."""
        if self.maybe(0.5):
            found = self._person()
            asked = (
                f"Write a JSON object for {found['name']}, who is {found['age']} years old and "
                f"lives in {found['city']}."
            )
        else:
            found = self._item()
            asked = f"Write a JSON object for {a(str(found['colour']))} {found['item']}."
        text = json.dumps(found)
        if self.maybe(0.5):
            return f"{USER}{asked}{ASSISTANT}{NO_THINKING}{text}"
        return text if self.maybe(0.7) else json.dumps(found, indent=2)

    def code(self) -> str:
        """A Python function and one call with its result."""
        name, x, y = self.pick(("ab", "xy", "mn", "pq")), *map(int, self._rng.integers(0, 10, 2))
        p, q = name
        larger, smaller = f"{p} if {p} > {q} else {q}", f"{p} if {p} < {q} else {q}"
        verb, what, body, value = self.pick(
            (
                ("add", "sum", f"{p} + {q}", x + y),
                ("subtract", "difference", f"{p} - {q}", x - y),
                ("multiply", "product", f"{p} * {q}", x * y),
                ("larger", "larger one", larger, max(x, y)),
                ("smaller", "smaller one", smaller, min(x, y)),
            )
        )
        return (
            f"def {verb}({p}, {q}):\n"
            f'    """Return the {what} of {p} and {q}."""\n'
            f"    return {body}\n\n\n"
            f"print({verb}({x}, {y}))  # {value}\n"
        )


def a(word: str) -> str:
    """The word with its indefinite article."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def His(word: str) -> str:
    """A possessive at the start of a sentence."""
    return word.capitalize()
