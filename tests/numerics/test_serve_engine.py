"""Generation: each request's tokens are those it has alone, whatever joins and leaves beside it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generation import complete
from peft import PeftModel
from safetensors.torch import load_file, save_file

from plait.adapters.peft_folder import export_adapter, locate_adapter
from plait.adapters.variants import attach
from plait.cli.chat import Chat
from plait.core.errors import InputError, StorageError
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.base import BaseModel
from plait.models.load import load_model, transformers_model
from plait.models.targets import resolve_targets
from plait.models.tiny import FAMILIES
from plait.serve.cells import BankAdapters, CellLayout
from plait.serve.engine import Engine
from plait.serve.folders import FolderAdapters
from plait.serve.requests import Completion, GrowingText, Request, Sampling, Update
from plait.serve.scheduler import Demand
from plait_kernels import Bank, Site, triton_backend
from plait_kernels.launching import noted
from plait_kernels.pooled import AdapterPool, PooledAdapter

LENGTHS = (3, 11, 1, 20)
NEW = 12
FREE = Sampling(NEW, stop_tokens=frozenset())


def settings_of(family: str) -> ModelSettings:
    return ModelSettings(kind="tiny", family=family, dtype="float32", seed=2)


def prompts_of(
    base: BaseModel,
    adapters: Sequence[str | None],
    sampling: Sampling = FREE,
    lengths: Sequence[int] = LENGTHS,
) -> list[Request]:
    generator = torch.Generator().manual_seed(8)
    tokens = [torch.randint(3, base.vocabulary, (length,), generator=generator) for length in lengths]
    return [
        Request(tuple(own.tolist()), adapter, sampling) for own, adapter in zip(tokens, adapters, strict=True)
    ]


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [each.tokens for each in completions]


class Served:
    """A tiny Llama with an adapter of each rank, written to folders too."""

    RANKS = (1, 2, 5, 8, 16, 33, 64)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = load_model(settings_of("llama"), cache=folder)
        self.bank = Bank(self.base.sites, device="cpu", compute_dtype=torch.float32)
        targets: tuple[tuple[str, ...] | str, ...] = ("all-linear", ("q_proj", "v_proj"), ("down_proj",))
        for number, rank in enumerate(self.RANKS):
            name, spec = f"rank{rank}", AdapterSpec(rank, dropout=0.5, target_modules=targets[number % 3])
            sites = resolve_targets(spec.target_modules, self.base.linears)
            attach(self.bank, name, spec, sites, seed=number, weight_of=self.base.frozen_weight)
            for _, b in self.bank.weights(name).values():
                b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(number)) * 0.2)
            self.bank.refresh([name])
            weights = self.bank.weights(name)
            export_adapter(folder / name, spec, weights, base="tiny", linears=self.base.linears)

    def requests(self, count: int, sampling: Sampling = FREE) -> list[Request]:
        chance = random.Random(4)
        names: list[str | None] = [None, *self.bank.blocks]
        adapters = [names[number % len(names)] for number in range(count)]
        lengths = [chance.randint(1, 40) for _ in range(count)]
        found = prompts_of(self.base, adapters, sampling, lengths)
        return [
            replace(each, sampling=replace(sampling, max_new_tokens=chance.randint(1, NEW), seed=number))
            for number, each in enumerate(found)
        ]

    def engine(self, pool_tokens: int = 256) -> Engine:
        adapters = BankAdapters(self.bank)
        return Engine(self.base, adapters, pool_tokens=pool_tokens, most_prompt_tokens=64)

    def from_folders(self, pool_tokens: int = 256) -> Engine:
        adapters = FolderAdapters(self.base, {name: self.folder / name for name in self.bank.blocks})
        return Engine(self.base, adapters, pool_tokens=pool_tokens, most_prompt_tokens=64, host_bytes=1)

    def alone(self, request: Request) -> Completion:
        return complete(self.base, BankAdapters(self.bank), [request])[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


def join_at_random(engine: Engine, requests: Sequence[Request]) -> dict[int, list[Update]]:
    """Updates by request; one or none joins in each iteration, so that the pool fills."""
    chance = random.Random(7)
    updates: dict[int, list[Update]] = {}
    left = list(enumerate(requests))
    numbers: dict[int, int] = {}
    while left or not engine.idle:
        for _ in range(chance.choice((0, 1, 6))):
            if left:
                index, request = left.pop(0)
                numbers[engine.add(request)] = index
        for update in engine.step():
            updates.setdefault(numbers[update.request], []).append(update)
    return updates


def ended(updates: Sequence[Update]) -> Completion:
    assert updates[-1].ended is not None
    assert not any(each.ended for each in updates[:-1])
    return updates[-1].ended


def pefts(model: Any, tokens: Sequence[int], count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """PEFT's greedy tokens with their log-probabilities, each from the whole sequence."""
    sequence = list(tokens)
    for _ in range(count):
        logits = model(torch.tensor([sequence]), use_cache=False).logits[0, -1]
        sequence.append(int(logits.argmax()))
        yield sequence[-1], torch.log_softmax(logits, dim=-1)


@torch.no_grad()
def test_forty_requests_in_a_pool_for_fewer_are_each_as_alone_and_as_pefts(served: Served) -> None:
    requests = served.requests(40, replace(FREE, log_probabilities=5))
    engine = served.from_folders()
    waited = 0
    pool = engine.scheduler.pool

    def watched() -> list[Update]:
        nonlocal waited
        found = Engine.step(engine)
        waited = max(waited, engine.scheduler.waiting)
        owned = [page for pages in pool.owned.values() for page in pages]
        shared = [page for each in pool.shared.values() for page in each.pages]
        assert sorted([*owned, *shared, *pool._free]) == list(range(pool.pages))
        return found

    engine.step = watched  # type: ignore[method-assign]
    demands: list[Demand] = []
    add = engine.scheduler.add
    engine.scheduler.add = lambda each: (demands.append(each), add(each))  # type: ignore[method-assign, assignment, func-returns-value, return-value]
    found = join_at_random(engine, requests)
    assert waited > 0, "the pool is too small for all"
    assert pool.unused == pool.pages
    shared_pages = {need.key: need.pages for each in demands for need in each.needs}
    assert pool.pages < (sum(each.pages for each in demands) + sum(shared_pages.values())) / 2
    assert engine.store.loads > len(served.RANKS), "adapters came again after they had made room"
    plain = transformers_model(settings_of("llama"), cache=served.folder)
    plain.set_attn_implementation("eager")
    model = PeftModel.from_pretrained(plain, served.folder / "rank1", adapter_name="rank1")
    for name in list(served.bank.blocks)[1:]:
        model.load_adapter(served.folder / name, adapter_name=name)
    model.eval()
    for index, request in enumerate(requests):
        completion, alone = ended(found[index]), served.alone(request)
        assert completion.tokens == alone.tokens
        if request.adapter is None:
            with model.disable_adapter():
                expected = list(pefts(model, request.tokens, request.sampling.max_new_tokens))
        else:
            model.set_adapter(request.adapter)
            expected = list(pefts(model, request.tokens, request.sampling.max_new_tokens))
        assert completion.tokens == tuple(token for token, _ in expected)
        assert len(completion.scores) == len(expected)
        for score, (token, logs) in zip(completion.scores, expected, strict=True):
            assert score.top[0][0] == token
            assert score.log_probability == pytest.approx(float(logs[token]), abs=1e-4)
            assert all(value == pytest.approx(float(logs[each]), abs=1e-4) for each, value in score.top)


@pytest.fixture
def by_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The same with Triton's kernels, in its interpreter; of two layers, as every one is launched alike."""
    monkeypatch.setitem(FAMILIES, "llama", {"num_hidden_layers": 2})
    served = Served(tmp_path)
    if not triton_backend.available(served.base.device):
        pytest.skip("Triton runs on a CPU only in its interpreter, which is off where there is a GPU")
    served.base.install(backend="triton")
    return served


def test_no_request_has_no_completion(served: Served) -> None:
    assert complete(served.base, BankAdapters(served.bank), []) == []


def test_requests_by_triton_are_each_as_alone_by_compiled_code(by_triton: Served) -> None:
    launched: set[str] = set()
    sampled = replace(FREE, max_new_tokens=4, temperature=0.9, top_p=0.8)
    requests = [
        Request(
            each.tokens[:12],
            each.adapter,
            replace(FREE if number % 3 else sampled, max_new_tokens=1 + number % 4, seed=number),
        )
        for number, each in enumerate(by_triton.requests(12))
    ]
    begun = requests[1].tokens * 40  # two of one prompt, of several pages and one token
    requests[8:10] = [Request(begun[:33], "rank8", sampled)] * 2
    engine = by_triton.engine()
    with noted(lambda kernel, _: launched.add(kernel.__name__)):
        found = join_at_random(engine, requests)
    assert engine.scheduler.pool.unused == engine.scheduler.pool.pages
    assert launched >= {"store", "attend", "down", "up"}
    by_triton.base.install(backend="reference")
    for index, request in enumerate(requests):
        assert ended(found[index]).tokens == by_triton.alone(request).tokens


def test_heads_wider_than_triton_s_kernel_takes_go_through_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of 512 features in Gemma 4: programs would need more memory than small devices have."""
    monkeypatch.setitem(FAMILIES, "llama", {"head_dim": 264})
    base = load_model(settings_of("llama"), cache=tmp_path)
    if not triton_backend.available(base.device):
        pytest.skip("Triton runs on a CPU only in its interpreter, which is off where there is a GPU")
    requests = prompts_of(base, [None] * len(LENGTHS), replace(FREE, max_new_tokens=3))
    expected = tokens_of(complete(base, FolderAdapters(base), requests))
    base.install(backend="triton")
    launched: set[str] = set()
    with noted(lambda kernel, _: launched.add(kernel.__name__)):
        assert tokens_of(complete(base, FolderAdapters(base), requests)) == expected
    assert "rotate" in launched
    assert "attend" not in launched


def test_sampled_answers_do_not_depend_on_the_batch(served: Served) -> None:
    requests = served.requests(24, replace(FREE, temperature=0.9, top_p=0.8))
    found = join_at_random(served.engine(), requests)
    for index, request in enumerate(requests):
        assert ended(found[index]).tokens == served.alone(request).tokens
    other = [replace(each, sampling=replace(each.sampling, seed=1000)) for each in requests]
    changed = [served.alone(each).tokens != ended(found[index]).tokens for index, each in enumerate(other)]
    assert sum(changed) > len(changed) / 2, "the seed matters"


def test_cancelled_requests_free_their_pages_at_once_and_change_no_other(served: Served) -> None:
    requests = served.requests(12)
    engine = served.engine()
    numbers = [engine.add(each) for each in requests]
    engine.step()
    running, waiting = engine.running[0], numbers[-1]
    free = engine.scheduler.pool.unused
    pages = len(engine.scheduler.pool.owned[running])
    engine.cancel(running)
    engine.cancel(waiting)
    engine.cancel(running)
    assert engine.scheduler.pool.unused >= free + pages
    found = {update.request: update.ended for update in engine.run() if update.ended is not None}
    assert not {running, waiting} & set(found)
    for number, request in zip(numbers, requests, strict=True):
        if number in found:
            assert found[number].tokens == served.alone(request).tokens
    assert engine.scheduler.pool.unused == engine.scheduler.pool.pages


def test_completions_do_not_mind_what_others_left_in_the_engine(served: Served) -> None:
    left, *own = served.requests(5)
    engine = served.engine()
    engine.add(left)
    found = engine.complete(own)
    assert [each.tokens for each in found] == [served.alone(each).tokens for each in own]
    for _ in engine.fed(enumerate(own)):
        break  # as where an error ends the caller
    assert engine.idle, "what nobody waits for is cancelled"


def test_pieces_of_a_text_are_the_whole_of_it(served: Served) -> None:
    requests = served.requests(16)
    for updates in join_at_random(served.engine(), requests).values():
        assert "".join(each.text for each in updates) == ended(updates).text


def test_a_stop_text_ends_a_text_and_none_of_it_is_given_out(served: Served) -> None:
    request = replace(served.requests(40)[2], sampling=FREE)
    free = served.alone(request)
    stop = free.text[3:5]
    engine = served.engine()
    engine.add(replace(request, sampling=replace(FREE, stop=("never there", stop))))
    updates = list(engine.run())
    completion = ended(updates)
    assert completion.text == free.text[: free.text.index(stop)] == "".join(each.text for each in updates)
    assert completion.reason == "stop"
    assert completion.tokens == free.tokens[: len(completion.tokens)]


def test_the_same_prompt_is_run_once_for_each_adapter_and_every_answer_is_as_alone(served: Served) -> None:
    engine = Engine(served.base, BankAdapters(served.bank), pool_tokens=1000)
    length = 2 * engine.page_tokens + 3
    tokens = served.requests(1)[0].tokens * length
    requests = [
        Request(tokens[:length], adapter, replace(FREE, temperature=1.0, seed=seed))
        for seed in range(3)
        for adapter in (None, "rank8", "rank33")
    ]
    rows: list[int] = []
    place = engine._cache.placed
    engine._cache.placed = lambda *told, **width: (rows.append(sum(told[2])), place(*told, **width))[1]  # type: ignore[func-returns-value, method-assign]
    numbers = [engine.add(each) for each in requests]
    updates = list(engine.step())
    numbers.append(engine.add(requests[0]))
    updates += engine.run()
    assert rows[:2] == [3 * length + 6 * 3, 9 + 3]
    found = {update.request: update.ended for update in updates if update.ended is not None}
    for number, request in zip(numbers, [*requests, requests[0]], strict=True):
        completion = found[number]
        assert completion is not None
        assert completion.tokens == served.alone(request).tokens


def test_an_adapter_that_cannot_be_read_any_more_ends_its_own_requests(
    served: Served, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("rank1", "rank2", "rank5")}
    for name, folder in folders.items():
        shutil.copytree(served.folder / name, folder)
    adapters = FolderAdapters(served.base, folders)
    engine = Engine(served.base, adapters, pool_tokens=1000)
    (folders["rank2"] / "adapter_model.safetensors").unlink()
    (folders["rank5"] / "adapter_config.json").write_text("[" * 100_000)  # JSON raises RecursionError
    numbers = [engine.add(Request((5, 6, 7), name, FREE)) for name in folders]
    updates = []
    while not engine.idle:
        updates += engine.step()
    errors = {update.request: update.error for update in updates if update.error is not None}
    assert set(errors) == set(numbers[1:])
    assert isinstance(errors[numbers[1]], StorageError)
    assert "has changed" in str(errors[numbers[2]]), (
        "what it was is known, so its settings are not read again"
    )
    adapters.remove("rank2")
    adapters.add("rank2", served.folder / "rank1")  # a name may be used again
    for name in ("rank1", "rank2"):
        engine.add(Request((5, 6, 7), name, FREE))
    one, two = (update.ended for update in engine.run() if update.ended is not None)
    assert one is not None
    assert two is not None
    assert one.tokens == two.tokens
    config = folders["rank1"] / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))
    with pytest.raises(InputError, match="has changed"):
        adapters.find("rank1").weights()
    weights = tmp_path / "rank1" / "adapter_model.safetensors"
    adapters.remove("rank1")
    adapters.add("rank1", folders["rank1"])
    tensors = {name: tensor + 1 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)  # of the same settings; the pool may have keys and values of the old ones
    with pytest.raises(InputError, match="has changed"):
        adapters.find("rank1").weights()


def test_a_folder_that_changes_while_it_is_added_is_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else tensors that were checked would be read at the places of others."""
    folder = shutil.copytree(served.folder / "rank5", tmp_path / "rank5")

    def located_late(*given: Any) -> Any:
        file = served.folder / "rank1" / "adapter_model.safetensors"
        (folder / file.name).write_bytes(file.read_bytes())
        return locate_adapter(*given)

    monkeypatch.setattr("plait.serve.folders.locate_adapter", located_late)
    with pytest.raises(InputError, match=r"has changed(.|\n)*Add it again"):
        FolderAdapters(served.base, {"rank5": folder})


def test_what_was_removed_is_not_kept_in_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.serve.cells.places", lambda _: False)  # as on a GPU
    adapters = FolderAdapters(served.base, {"rank1": served.folder / "rank1"})
    engine = Engine(served.base, adapters, pool_tokens=1000, host_bytes=1 << 30)
    kept = []
    for _ in range(4):
        adapters.add("comes", served.folder / "rank5")
        engine.complete([Request((5, 6, 7), name, FREE) for name in ("rank1", "comes")])
        adapters.remove("comes")
        kept.append(engine.store.bytes)
    assert kept[0] > 0
    assert kept[1:] == kept[:-1], "the bytes of one at a time"
    assert engine.store.loads == 5, "what stays is read once"


def test_a_banks_adapter_is_known_until_it_changes_or_goes() -> None:
    class Blocks(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("for each adapter that is kept, all are looked at")

    bank: Any = SimpleNamespace(blocks=Blocks({name: SimpleNamespace(generation=3) for name in "ab"}))
    adapters = BankAdapters(bank)
    key = adapters.find("a").key
    assert adapters.knows(key)
    bank.blocks["a"].generation += 1
    assert not adapters.knows(key)
    assert adapters.knows(adapters.find("a").key)
    key = adapters.find("b").key
    del bank.blocks["b"]
    assert not adapters.knows(key)


def test_a_chat_is_answered_by_the_current_adapter_and_goes_on_when_it_changes(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    models: dict[str, str | None] = {"base": None, "rank8": "rank8"}
    chat = Chat(served.base, served.engine(2000), models, "rank8", FREE)
    lines = iter(["Hi", "/use base", "/use nobody", "And?", "/models", "/new", "Hi", "/quit", "never read"])
    prompts = []
    assert chat.run(lambda prompt: (prompts.append(prompt), next(lines))[1]) == 0  # type: ignore[func-returns-value]
    assert prompts == ["rank8> ", "rank8> ", *["base> "] * 6]
    told = capsys.readouterr()
    assert "Available: base, rank8." in told.err
    spoken: list[dict[str, str]] = []
    wanted = []
    for line, adapter in (("Hi", "rank8"), ("And?", None), ("Hi", None)):
        spoken = [*(spoken if line == "And?" else []), {"role": "user", "content": line}]
        text = served.base.tokeniser.apply_chat_template(spoken, tokenize=False, add_generation_prompt=True)
        tokens = tuple(served.base.tokeniser(text, add_special_tokens=False)["input_ids"])
        wanted.append(served.alone(Request(tokens, adapter, FREE)).text)
        spoken.append({"role": "assistant", "content": wanted[-1]})
    assert told.out == f"{wanted[0]}\n{wanted[1]}\nbase\nrank8\n{wanted[2]}\n"
    assert chat.messages == spoken


def test_a_message_that_cannot_be_answered_leaves_the_conversation(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(served.base, served.engine(2000), {"base": None}, "base", FREE)
    lines = iter(["Hi", None, "Hi", None])
    with monkeypatch.context() as broken:
        broken.setattr(served.base.tokeniser, "chat_template", "{{ raise_exception('not this') }}")
        assert chat.run(lambda _: next(lines)) == 0
    with monkeypatch.context() as broken:
        broken.setattr(
            BaseModel, "head", lambda base, hidden: torch.full((len(hidden), base.vocabulary), torch.nan)
        )
        assert chat.run(lambda _: next(lines)) == 0
    told = capsys.readouterr().err
    assert "messages: not this\nThe chat template refuses them." in told
    assert "base: its logits are not finite" in told
    assert chat.messages == []
    assert chat.engine.idle


def test_an_adapter_that_is_not_finite_ends_its_own_requests_alone(served: Served) -> None:
    drawn = Request((5, 6, 7), "rank8", Sampling(4, temperature=1.0))
    requests = [*served.requests(8), drawn]
    wanted = [served.alone(each).tokens for each in requests]
    _, b = next(iter(served.bank.weights("rank8").values()))
    kept = b.clone()
    try:
        b.fill_(torch.nan)
        served.bank.refresh(["rank8"])
        found = complete(served.base, BankAdapters(served.bank), requests)
        engine = served.engine()  # whose pages hold what is not finite before the others have them
        for number in range(2 * engine.scheduler.pool.pages):
            engine.add(Request((5,) * (engine.page_tokens + 1) + (number,), "rank8", FREE))
        list(engine.run())
        numbers = [engine.add(each) for each in requests]
        after = {update.request: update.ended for update in engine.run() if update.ended is not None}
        assert [after[number] for number in numbers] == found
    finally:
        b.copy_(kept)
        served.bank.refresh(["rank8"])
    for request, completion, tokens in zip(requests, found, wanted, strict=True):
        if request.adapter == "rank8":
            assert (completion.reason, completion.tokens) == ("not finite", ())
        else:
            assert completion.tokens == tokens


def test_growing_text_holds_back_what_may_become_a_stop_text_or_a_character() -> None:
    letters = ["a", "b", "<", "e", "n", "<", "\N{REPLACEMENT CHARACTER}", "c"]
    text = GrowingText(lambda tokens: "".join(letters[token] for token in tokens), ("<end>",))
    pieces = []
    for count in range(1, len(letters) + 1):
        assert not text.extend(range(count))
        pieces.append(text.piece(last=count == len(letters)))
    assert pieces == ["a", "b", "", "", "", "<en", "", "<\N{REPLACEMENT CHARACTER}c"]


def test_requests_that_never_fit_and_unknown_adapters_are_refused(served: Served) -> None:
    engine = served.engine()
    most = engine.scheduler.pool.pages * engine.page_tokens
    with pytest.raises(InputError, match=f"{most} tokens"):
        engine.add(Request((5,) * most, None, Sampling(20)))
    with pytest.raises(InputError, match="'nobody'"):
        served.engine().add(Request((5,), "nobody"))


def test_adapters_of_waiting_requests_are_read_before_they_have_room(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.serve.cells.places", lambda _: False)  # as on a GPU
    folders = {name: tmp_path / name for name in ("rank1", "rank2", "rank5")}
    for name, folder in folders.items():
        shutil.copytree(served.folder / name, folder)
    adapters = FolderAdapters(served.base, folders)
    engine = Engine(served.base, adapters, pool_tokens=1000, most=1, host_bytes=1)
    requests = [Request((5, 6, 7), name, FREE) for name in folders]
    numbers = [engine.add(each) for each in requests]
    updates = engine.step()
    for coming in list(engine.store._coming.values()):
        coming.result(60)
    shutil.rmtree(tmp_path / "rank2")  # it has been read
    engine.cancel(numbers[2])
    while not engine.idle:
        updates += engine.step()
    found = {update.request: update.ended for update in updates if update.ended is not None}
    assert set(found) == set(numbers[:2])
    for number, request in zip(numbers[:2], requests, strict=False):
        assert found[number].tokens == served.alone(request).tokens
    assert not engine.store._coming, "what nobody waits for is forgotten"


def test_on_a_cpu_the_system_is_told_which_files_are_needed_soon(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Path] = []
    monkeypatch.setattr("plait.serve.folders.expect_file", told.append)
    names = ("rank1", "rank2", "rank5")
    adapters = FolderAdapters(served.base, {name: served.folder / name for name in names})
    engine = Engine(served.base, adapters, pool_tokens=1000, most=1, host_bytes=1)
    for name in names:
        engine.add(Request((5, 6, 7), name, FREE))
    list(engine.run())
    assert [file.parent.name for file in told] == ["rank2", "rank5"], "each once, though many iterations ran"
    assert not engine.store._coming
    assert engine.store.bytes == 0


def vectors_of(pool: AdapterPool, placed: PooledAdapter) -> list[torch.Tensor]:
    """A and B of each site, as they lie in the pool."""
    found = []
    for number, site in enumerate(pool.sites):
        for side, size in enumerate((site.in_features, site.out_features)):
            if site.name in placed.sites:
                found.append(pool.vectors(number, placed.offsets[number, side], size))
    return found


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "mixed", "unaligned"])
def test_a_file_of_any_dtype_comes_into_its_pages_as_it_is_packed(
    served: Served, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly, as on a CPU, into memory that holds what is not finite, and by packing, as for a GPU."""
    monkeypatch.setattr("plait.adapters.tensor_file.PART_BYTES", 3000)  # some tensors are larger
    folder = shutil.copytree(served.folder / "rank5", tmp_path / "rank5")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    if form in ("bfloat16", "float16"):
        tensors = {name: each.to(getattr(torch, form)) for name, each in tensors.items()}
    if form == "mixed":
        first = next(iter(tensors))
        tensors[first] = tensors[first].bfloat16()
    save_file(tensors, file)
    if form == "unaligned":
        whole = file.read_bytes()
        length = int.from_bytes(whole[:8], "little") + 1
        file.write_bytes(length.to_bytes(8, "little") + whole[8 : 7 + length] + b" " + whole[7 + length :])
    found = []
    for direct in (True, False):
        if not direct:
            monkeypatch.setattr("plait.serve.cells.places", lambda _: False)
        adapters = FolderAdapters(served.base, {"rank5": folder})
        store = Engine(served.base, adapters, pool_tokens=1000).store
        adapter = adapters.find("rank5")
        in_parts = form in ("float32", "bfloat16")
        assert (adapter.parts() is not None) == in_parts
        for storage in store._sites.storage:
            storage.fill_(float("nan"))
        count = store.layout.placement(adapter).pages
        placed = store.place(adapter, [1, *range(3, 2 + count)])
        assert placed.offsets.shape[2] == 5
        found.append(vectors_of(store._sites, placed))
    assert len(found[0]) == 2 * len(adapter.sites)
    for one, two in zip(*found, strict=True):
        assert one.isfinite().all()
        assert one.any()
        assert torch.equal(one, two)


def offsets_of(layout: CellLayout, rank: int, sites: str, pages: Sequence[int], *, joined: bool) -> Any:
    placement = layout.placement(SimpleNamespace(rank=rank, sites=frozenset(sites)))  # type: ignore[arg-type]
    assert placement.pages == len(pages)
    return placement.offsets(pages, layout.elements, joined=joined)


def test_what_one_call_reads_lies_together_in_pages_that_follow_each_other() -> None:
    sites = [Site("q", 0, 8, 6), Site("k", 1, 8, 2), Site("o", 2, 6, 8)]
    layout = CellLayout([sites], 90, {"q": 0, "k": 0, "o": 1})  # a cell has 24 elements of q and k, 14 of o
    apart = offsets_of(layout, 5, "qko", (7, 4, 5), joined=False)
    assert apart[:, :, 0].tolist() == [[630, 646], [638, 652], [678, 684]]
    assert (apart[:, :, 1] - apart[:, :, 0]).tolist() == [[24, 24], [24, 24], [14, 14]]
    assert (apart[:, :, 2:4] - apart[:, :, :2] == 90 * (4 - 7)).all()
    assert (apart[:, :, 4] - apart[:, :, 2] == 90).all()
    joined = offsets_of(layout, 5, "qko", (7, 4, 5), joined=True)
    assert (joined[:, :, :2] == apart[:, :, :2]).all(), "page 7 stands alone"
    assert joined[:, :, 2].tolist() == [[360, 376], [368, 382], [456, 462]]
    assert (np.diff(joined[:, :, 2:]) == [[[24], [24]], [[24], [24]], [[14], [14]]]).all()
    without = offsets_of(layout, 1, "o", (1,), joined=True)
    assert without.flatten().tolist() == [-1, -1, -1, -1, 90, 96]


@pytest.mark.parametrize(
    ("sizes", "elements", "align"), [((64, 32), 320, 16), ((64, 32), 328, 8), ((9, 32), 32, 1)]
)
def test_kernels_are_told_what_divides_all_places(sizes: tuple[int, int], elements: int, align: int) -> None:
    assert CellLayout([[Site("q", 0, *sizes)]], elements, {"q": 0}).align == align


def test_placements_of_very_many_kinds_of_adapters_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.serve.cells.MOST_KINDS", 2)
    layout = CellLayout([[Site("q", 0, 8, 6)]], 90, {"q": 0})
    first, second, third = (
        layout.placement(SimpleNamespace(rank=rank, sites=frozenset("q")))  # type: ignore[arg-type]
        for rank in (1, 20, 3)
    )
    again = [layout.placement(SimpleNamespace(rank=rank, sites=frozenset("q"))) for rank in (3, 20, 1)]  # type: ignore[arg-type]
    assert again[0] is third
    assert again[1] is second
    assert again[2] is not first
    assert (again[2].offsets((5,), 90, joined=True) == first.offsets((5,), 90, joined=True)).all()


@pytest.mark.parametrize("rank", [1, 3, 64])
@pytest.mark.parametrize("elements", [12, 25, 40, 90, 1000])
def test_vectors_never_share_an_element_and_stay_in_their_pages(rank: int, elements: int) -> None:
    sites = [Site("q", 0, 8, 6), Site("k", 1, 8, 2), Site("o", 2, 6, 8), Site("down", 3, 12, 8)]
    layers = [sites, [Site(f"{site.name}2", 0, site.in_features, site.out_features) for site in sites[1:]]]
    inputs = {"q": 0, "k": 0, "o": 1, "down": 2, "k2": 3, "o2": 4, "down2": 5}
    layout = CellLayout(layers, elements, inputs)
    adapter: Any = SimpleNamespace(rank=rank, sites=frozenset(inputs) - {"o"})
    placement = layout.placement(adapter)
    chance = random.Random(rank)
    scattered = chance.sample(range(3 * placement.pages), placement.pages)
    begins = chance.sample(range(0, 200 * placement.pages, 100), placement.pages)
    halves = [page for start in begins for page in range(start, start + 3)][: placement.pages]
    for pages in (range(5, 5 + placement.pages), scattered, halves):
        for joined in (False, True):
            offsets = placement.offsets(pages, elements, joined=joined)
            assert not (offsets[offsets >= 0] % layout.align).any()
            number = 0
            for own in layers:
                used = [
                    element
                    for site in own
                    for side, size in enumerate((site.in_features, site.out_features))
                    for begin in offsets[number + own.index(site), side]
                    if begin >= 0
                    for element in range(begin, begin + size)
                ]
                number += len(own)
                expected = {site.name for site in own} & adapter.sites
                assert len(used) == rank * sum(
                    site.in_features + site.out_features for site in own if site.name in expected
                )
                assert len(set(used)) == len(used)
                assert {element // elements for element in used} <= set(pages)


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
        {"stop": ("",)},
        {"log_probabilities": 21},
    ],
)
def test_sampling_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        Sampling(**values)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_continuations_are_transformers_own(family: str, tmp_path: Path) -> None:
    base = load_model(settings_of(family), cache=tmp_path)
    prompts = prompts_of(base, [None] * len(LENGTHS))
    found = tokens_of(complete(base, FolderAdapters(base), prompts))
    plain = transformers_model(settings_of(family), cache=tmp_path)
    plain.set_attn_implementation("eager")
    for prompt, new in zip(prompts, found, strict=True):
        sequence = torch.tensor([prompt.tokens])
        with torch.no_grad():
            for _ in range(NEW):
                logits = plain(sequence, use_cache=False).logits[0, -1]
                sequence = torch.cat([sequence, logits.argmax().view(1, 1)], dim=1)
        assert list(new) == sequence[0, len(prompt.tokens) :].tolist()


def test_a_stop_token_ends_a_continuation_and_is_left_out(tmp_path: Path) -> None:
    base = load_model(settings_of("mistral"), cache=tmp_path)
    prompts = prompts_of(base, [None] * len(LENGTHS))
    free = tokens_of(complete(base, FolderAdapters(base), prompts))
    stop = free[1][4]
    ending = replace(FREE, stop_tokens=frozenset({stop}))
    stopped = tokens_of(
        complete(base, FolderAdapters(base), [replace(each, sampling=ending) for each in prompts])
    )
    for whole, cut in zip(free, stopped, strict=True):
        assert cut == (whole[: whole.index(stop)] if stop in whole else whole)
    assert len(stopped[1]) <= 4


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    base = load_model(settings_of("llama"), cache=tmp_path)
    with pytest.raises(InputError, match="0 tokens"):
        complete(base, FolderAdapters(base), [Request(())])
