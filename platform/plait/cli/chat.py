"""`plait chat`: talk to a search's adapters in the terminal, and switch between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.cli.generate import BASE, POOL_TOKENS, fetched_adapters, load_base
from plait.cli.results import READING, store_parser, store_settings
from plait.core.errors import EXIT_DONE, ConfigError, InputError, PlaitError, SearchError, choices
from plait.utils.progress import say

if TYPE_CHECKING:
    from plait.models.base import BaseModel
    from plait.serve.engine import Engine
    from plait.serve.requests import Sampling

HELP = "/use NAME switches the adapter, /models lists them, /new begins a new conversation, /quit ends."


def main(arguments: Sequence[str]) -> int:
    """Talk to a search's adapters."""
    parser = store_parser("chat", "Talk to a search's adapters in the terminal, and switch between them.")
    add = parser.add_argument
    parser.epilog = HELP
    add("name", nargs="?", help="name of the search; default: the newest")
    add("--trial", type=int, metavar="N", help="the adapter to begin with; default: the best, else the first")
    parser.add_sampling(256)
    known = parser.parse_args(arguments)
    say(READING)
    from plait.serve.engine import Engine
    from plait.serve.requests import Sampling
    from plait.tracking.results import chosen, load_search, trained
    from plait.tracking.trained import base_model, own_template, recorded_config

    sampling = Sampling(known.max_new_tokens, known.temperature, known.top_p, known.seed)
    settings = store_settings(known)
    search = load_search(settings, known.name)
    records = trained(search)
    first = chosen(search, known.trial) if known.trial is not None else search.best or records[0]
    if first not in records:
        shown = f"{first.name} of search {search.name!r} has not finished"
        raise SearchError(shown, "Only finished trials have an adapter.")
    template = own_template(recorded_config(search, settings))
    folders = fetched_adapters(search, records, settings)
    base, adapters = load_base(base_model(search, settings), folders, template=template)
    if known.trial is not None and first.name not in adapters.names:
        raise SearchError(first.name, "Its adapter cannot be used; see above.", "Start with another adapter.")
    if not base.tokeniser.chat_template:
        raise ConfigError(
            "plait chat", "The model's tokeniser has no chat template.", "Use `plait generate --plain`."
        )
    models: dict[str, str | None] = {BASE: None} | {name: name for name in adapters.names}
    begins = first.name if first.name in models else adapters.names[0]
    chat = Chat(base, Engine(base, adapters, pool_tokens=POOL_TOKENS), models, begins, sampling)
    print(HELP)
    return chat.run(_line)


def _line(prompt: str) -> str | None:
    """A line of input; None at its end."""
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


@dataclass(slots=True)
class Chat:
    """A conversation; each answer is by the model that is current.

    Attributes:
        models: the adapter of each name; None: the base model.
    """

    base: BaseModel
    engine: Engine
    models: Mapping[str, str | None]
    current: str
    sampling: Sampling
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self, read: Callable[[str], str | None]) -> int:
        """Read lines and answer them, to the end of the input or /quit."""
        while (line := read(f"{self.current}> ")) is not None:
            word, _, rest = line.strip().partition(" ")
            if word == "/quit":
                break
            if word == "/new":
                self.messages.clear()
            elif word == "/models":
                print(*self.models, sep="\n")
            elif word == "/use" and rest.strip() in self.models:
                self.current = rest.strip()
            elif word.startswith("/"):
                wrong = f"There is no {word}."
                if word == "/use":
                    wrong = f"There is no model {rest.strip()!r}. Available: {choices(self.models)}."
                print(wrong, HELP, file=sys.stderr)
            elif word:
                self._answer(line)
        return EXIT_DONE

    def _answer(self, line: str) -> None:
        """Print an answer while it is generated; Ctrl-C ends it, and what there is of it stays."""
        from plait.data.tokenising import messages_text
        from plait.serve.requests import Request

        self.messages.append({"role": "user", "content": line})
        tokeniser = self.base.tokeniser
        number, pieces = None, []
        try:
            text = messages_text(tokeniser, self.messages)
            tokens = tuple(tokeniser(text, add_special_tokens=False)["input_ids"])
            number = self.engine.add(Request(tokens, self.models[self.current], self.sampling))
            for update in self.engine.run():
                print(update.text, end="", flush=True)
                pieces.append(update.text)
                if update.ended is not None and update.ended.reason == "not finite":
                    raise InputError(f"{self.current}: its logits are not finite", "It cannot answer.")
        except PlaitError as error:  # a conversation that is too long, say
            print(error, file=sys.stderr)
            self.messages.pop()
            return
        except KeyboardInterrupt:
            if number is not None:
                self.engine.cancel(number)
        print()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
