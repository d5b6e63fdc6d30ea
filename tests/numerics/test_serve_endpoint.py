"""The endpoint over a real socket: answers, streams, refusals, and pages of clients that leave."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import uvicorn
from generation import complete
from mlflow_server import free_port

from plait.adapters.peft_folder import export_adapter
from plait.adapters.variants import attach
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.load import load_model
from plait.models.targets import resolve_targets
from plait.serve.cells import BankAdapters
from plait.serve.driver import Driver, Pace
from plait.serve.engine import Engine
from plait.serve.folders import FolderAdapters
from plait.serve.requests import Completion, Request, Sampling, Update
from plait.serve.server import Connection, Endpoint, Models, make_app
from plait_kernels import Bank

KEY = "a secret"


class Served:
    """A server in a thread, for a tiny model with one adapter."""

    def __init__(self, folder: Path) -> None:
        settings = ModelSettings(kind="tiny", family="llama", dtype="float32", seed=2)
        self.base = load_model(settings, cache=folder)
        self.bank = Bank(self.base.sites, device="cpu", compute_dtype=torch.float32)
        spec = AdapterSpec(4, target_modules="all-linear")
        sites = resolve_targets(spec.target_modules, self.base.linears)
        attach(self.bank, "trial-0000", spec, sites, seed=1, weight_of=self.base.frozen_weight)
        for _, b in self.bank.weights("trial-0000").values():
            b.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.2)
        self.bank.refresh()
        self.root = folder / "adapters"
        export_adapter(
            self.root / "trial-0000",
            spec,
            self.bank.weights("trial-0000"),
            base="tiny-llama",
            linears=self.base.linears,
        )
        adapters = FolderAdapters(self.base, {"trial-0000": self.root / "trial-0000"}, most=2)
        engine = Engine(self.base, adapters, pool_tokens=176)
        self.driver = Driver(engine, most_waiting=8, most_seconds=100)
        models = Models({"base": None, "best": "trial-0000"}, adapters, self.root)
        endpoint = Endpoint(self.driver, self.base, models, 160)
        app = make_app(endpoint, self.driver, key=KEY, local=True, body_bytes=4096)
        self.port = free_port()
        config = uvicorn.Config(app, http=Connection, port=self.port, log_level="warning")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(
        self,
        path: str,
        body: Any = None,
        *,
        key: str = KEY,
        host: str = "localhost",
        kind: str = "application/json",
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Host": host, "Content-Type": kind}
        connection.request("GET" if body is None else "POST", path, data, headers)
        return connection, connection.getresponse()

    def ask(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        connection, response = self.send(path, body, **more)
        text = response.read().decode()
        connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def free(self) -> bool:
        """Whether all pages become free within a while."""
        pool = self.driver.engine.scheduler.pool
        for _ in range(500):
            if pool.unused == pool.pages:
                return True
            time.sleep(0.01)
        return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("endpoint"))
    yield made
    made.server.should_exit = True
    made.thread.join(30)
    assert not made.thread.is_alive()


def rounded(value: Any) -> Any:
    """Values whose numbers need only be near: whole answers run apart from streamed ones."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


def test_log_probabilities_in_the_openai_clients_streams(served: Served) -> None:
    """Of a text that ends by a stop text, and of one whose pieces are held back."""
    client = openai.OpenAI(base_url=f"http://localhost:{served.port}/v1", api_key=KEY, timeout=60)
    given: Any = {"model": "best", "prompt": "What?", "max_tokens": 30, "temperature": 0, "logprobs": 3}
    free = client.completions.create(**given).choices[0]
    for stop in (free.text[-3:], "~~~"):
        whole = client.completions.create(**given, stop=stop).choices[0]
        pieces = [each.choices[0] for each in client.completions.create(**given, stop=stop, stream=True)]
        assert "".join(each.text for each in pieces) == whole.text
        scored = [each.logprobs for each in pieces if each.logprobs is not None]
        assert whole.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [value for each in scored for value in getattr(each, name)]
            assert streamed == rounded(getattr(whole.logprobs, name))
    asked: Any = {"model": "best", "messages": HELLO, "max_tokens": 9, "temperature": 0, "seed": 1}
    asked |= {"logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**asked).choices[0].logprobs
    chunks = client.chat.completions.create(**asked, stream=True)
    logs = [each.choices[0].logprobs for each in chunks]
    content = [each for log in logs if log is not None for each in log.content or ()]
    assert answer is not None
    assert answer.content
    assert [each.model_dump() for each in content] == rounded([each.model_dump() for each in answer.content])


def stream(served: Served, path: str, body: Any) -> list[Any]:
    connection, response = served.send(path, body | {"stream": True})
    assert response.status == 200
    lines = [line for line in response.read().decode().split("\n\n") if line]
    connection.close()
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_models_are_the_adapters_and_the_base(served: Served) -> None:
    status, found = served.ask("/v1/models")
    assert status == 200
    assert [each["id"] for each in found["data"]] == ["base", "best", "trial-0000"]
    assert served.ask("/v1/models/best")[0] == 200
    assert served.ask("/v1/models/../../etc/passwd")[0] == 404


@pytest.mark.parametrize("model", ["base", "best"])
def test_a_text_is_the_engines_own_streamed_or_not(served: Served, model: str) -> None:
    body = {"model": model, "prompt": "What is 2 + 2?", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    status, found = served.ask("/v1/completions", body)
    assert status == 200
    tokens = tuple(served.base.tokeniser(body["prompt"])["input_ids"])
    adapter = None if model == "base" else "trial-0000"
    wanted = complete(
        served.base, BankAdapters(served.bank), [Request(tokens, adapter, Sampling(12, log_probabilities=2))]
    )[0]
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (wanted.text, wanted.reason)
    new = len(wanted.tokens)
    assert found["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": new,
        "total_tokens": len(tokens) + new,
    }
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        [score.log_probability for score in wanted.scores], abs=1e-4
    )
    assert len(choice["logprobs"]["text_offset"]) == new
    chunks = stream(served, "/v1/completions", body)
    assert "".join(each["choices"][0]["text"] for each in chunks) == wanted.text
    assert chunks[-1]["choices"][0]["finish_reason"] == wanted.reason
    pieces = [each["choices"][0]["logprobs"] for each in chunks]
    for name, values in choice["logprobs"].items():
        streamed = [value for piece in pieces if piece is not None for value in piece[name]]
        assert streamed == rounded(values), name


def test_a_chat_goes_through_the_template_streamed_or_not(served: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    body = {"model": "best", "messages": messages, "max_completion_tokens": 8, "seed": 5, "n": 1}
    status, found = served.ask("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 1})
    assert status == 200
    (choice,) = found["choices"]
    assert choice["message"]["role"] == "assistant"
    prompt = served.base.tokeniser.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    tokens = served.base.tokeniser(prompt, add_special_tokens=False)["input_ids"]
    assert found["usage"]["prompt_tokens"] == len(tokens)
    assert len(choice["logprobs"]["content"]) == found["usage"]["completion_tokens"]
    for each in choice["logprobs"]["content"]:  # a part of a character has no bytes of its own text
        part = "\N{REPLACEMENT CHARACTER}" in each["token"]
        assert each["bytes"] == (None if part else list(each["token"].encode()))
    chunks = stream(served, "/v1/chat/completions", body)
    assert "".join(each["choices"][0]["delta"]["content"] for each in chunks) == choice["message"]["content"]


def test_a_template_that_loops_for_ever_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(served.base.tokeniser, "chat_template", loop)
    monkeypatch.setattr("plait.data.tokenising.TEMPLATE_SECONDS", 0.2)
    body = {"model": "best", "messages": [{"role": "user", "content": "Hello"}]}
    status, found = served.ask("/v1/chat/completions", body)
    assert status == 422
    assert "not done after 0.2 s of processor time" in str(found)


@pytest.mark.parametrize("streamed", [True, False])
def test_each_prompt_has_n_answers_as_if_asked_alone(served: Served, streamed: bool) -> None:
    """Prompts as texts or token ids; a prompt's answers have the seeds that follow each other."""
    texts = ["What is 2 + 2?", "Say"]
    tokens = [served.base.tokeniser(text)["input_ids"] for text in texts]
    asked = {"model": "best", "max_tokens": 6, "seed": 4}

    def one(text: str, seed: int) -> Any:
        return served.ask("/v1/completions", asked | {"prompt": text, "seed": seed})[1]

    alone = [one(text, seed) for text in texts for seed in (4, 5, 6)]
    assert len({each["choices"][0]["text"] for each in alone}) > 2
    for prompt in (texts, tokens):
        if streamed:
            more = {"prompt": prompt, "n": 3, "stream_options": {"include_usage": True}}
            *chunks, last = stream(served, "/v1/completions", asked | more)
            pieces = [each["choices"][0] for each in chunks]
            own = [[each for each in pieces if each["index"] == index] for index in range(6)]
            found = ["".join(each["text"] for each in choice) for choice in own]
            reasons = [choice[-1]["finish_reason"] for choice in own]
        else:
            last = served.ask("/v1/completions", asked | {"prompt": prompt, "n": 3})[1]
            assert [choice["index"] for choice in last["choices"]] == list(range(6))
            found = [choice["text"] for choice in last["choices"]]
            reasons = [choice["finish_reason"] for choice in last["choices"]]
        assert found == [each["choices"][0]["text"] for each in alone]
        assert reasons == [each["choices"][0]["finish_reason"] for each in alone]
        assert last["usage"]["prompt_tokens"] == sum(map(len, tokens))
        new = sum(each["usage"]["completion_tokens"] for each in alone)
        assert last["usage"]["completion_tokens"] == new


def test_a_chat_has_n_answers(served: Served) -> None:
    client = openai.OpenAI(base_url=f"http://localhost:{served.port}/v1", api_key=KEY, timeout=60)
    asked: Any = {"model": "best", "messages": HELLO, "max_tokens": 4}
    both = client.chat.completions.create(**asked, n=2, seed=7).choices
    alone = [client.chat.completions.create(**asked, seed=seed).choices[0] for seed in (7, 8)]
    assert [each.message.content for each in both] == [each.message.content for each in alone]
    assert [each.index for each in both] == [0, 1]


HELLO = [{"role": "user", "content": "Hello"}]
GOOD = {"model": "best", "prompt": "a", "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (GOOD | {"model": "other"}, 404),
        (GOOD | {"prompt": "a" * 5000}, 413),
        (GOOD | {"prompt": 3}, 422),
        (GOOD | {"temperature": -1}, 422),
        (GOOD | {"top_p": 0}, 422),
        (GOOD | {"max_tokens": 161}, 422),
        (GOOD | {"max_tokens": 0}, 422),
        (GOOD | {"max_tokens": True}, 422),
        (GOOD | {"temperature": False}, 422),
        (GOOD | {"prompt": []}, 422),
        (GOOD | {"prompt": ["a", 3]}, 422),
        (GOOD | {"prompt": [True]}, 422),
        (GOOD | {"prompt": [[1], []]}, 422),
        (GOOD | {"prompt": [1, 10**9]}, 422),
        (GOOD | {"prompt": [-1]}, 422),
        (GOOD | {"n": 0}, 422),
        (GOOD | {"n": 129}, 422),
        (GOOD | {"n": 9}, 422),  # eight may wait
        (GOOD | {"prompt": ["a"] * 3, "n": 43}, 422),
        (GOOD | {"stop": ["a"] * 5}, 422),
        (GOOD | {"unknown": True}, 422),
        (GOOD | {"prompt": ""}, 422),
        (GOOD | {"prompt": "a" * 1100}, 422),
        (GOOD | {"stream_options": {"include_usage": True}}, 422),
        (b'{"model": "best", "max_tokens": 1, "prompt": "\\ud800"}', 422),  # half of a surrogate pair
        (b'{"model": "best", "max_tokens": 1, "prompt": "a", "n": "\\ud800"}', 422),
        (b'{"model": "best", "max_tokens": 1, "prompt": "a", "\\ud800": 1}', 422),
        (b"{", 422),
        (b"[" * 2000, 400 if sys.version_info < (3, 12) else 422),  # newer ones read deeper
    ],
)
def test_bad_bodies_are_refused_in_openais_form(served: Served, body: Any, status: int) -> None:
    found, answer = served.ask("/v1/completions", body)
    assert found == status, answer
    assert answer["error"]["message"]
    assert served.free()


def test_a_body_that_is_nested_as_deep_as_can_be_read_is_refused(served: Served) -> None:
    """What reads it may go a few levels deeper than what looks through it."""
    found = set()
    for deep in range(800, 1000, 2):
        body = b'{"model": "best", "prompt": "a", "more": ' + b"[" * deep + b"]" * deep + b"}"
        found.add(served.ask("/v1/completions", body)[0])
    assert found <= {400, 422}


@pytest.mark.parametrize("late", [False, True])
def test_a_malformed_body_ends_the_connection_without_a_traceback(
    served: Served, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it comes with its request, or once the request is refused."""
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    wrong = b"no number\r\nhello\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(head if late else head + wrong)
        answer = client.recv(12)
        if late:
            client.sendall(wrong)
        while client.recv(4096):
            """To the end of the connection."""
    assert answer == (b"HTTP/1.1 401" if late else b"HTTP/1.1 400")
    assert served.ask("/v1/models")[0] == 200
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 161}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 161}),
    ],
)
def test_a_limit_is_named_as_the_client_names_it_with_the_way_out(
    served: Served, path: str, asked: dict[str, Any]
) -> None:
    status, answer = served.ask(path, {"model": "best"} | asked)
    name, value = list(asked.items())[-1]
    said = answer["error"]["message"]
    assert status == 422
    assert f"{name}={value}" in said
    assert "from 1 to 160 tokens" in said
    assert "--max-new-tokens" in said
    assert "max_new_tokens" not in said


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/v1/completions", {"prompt": "a", "temprature": 0}, "Did you mean temperature?"),
        ("/v1/completions", {"promt": "a"}, "Did you mean prompt?"),
        ("/v1/chat/completions", {"messages": HELLO, "max_token": 1}, "Did you mean max_tokens?"),
        ("/v1/completions", {"prompt": "a", "tools": [1]}, "tools=[1]\nThis server does not support it."),
        (
            "/v1/completions",
            {"prompt": "a", "stream": True, "stream_options": {"include_usge": True}},
            "Did you mean include_usage?",
        ),
    ],
)
def test_a_misspelled_name_is_refused_with_the_likely_one(
    served: Served, path: str, body: dict[str, Any], meant: str
) -> None:
    status, answer = served.ask(path, {"model": "best"} | body)
    assert status == 422
    assert meant in answer["error"]["message"]
    status, answer = served.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_pth": "b"})
    assert (status, "Did you mean lora_path?" in answer["error"]["message"]) == (422, True)


def test_what_a_client_gets_wrong_first_is_said(served: Served) -> None:
    """An address without /v1, an image, a name with a blank, a GET where a POST is meant, a cut-off body."""
    status, answer = served.ask("/models")
    assert status == 404
    assert "nothing at /models" in answer["error"]["message"]
    assert "/v1/models" in answer["error"]["message"]
    for content in ([{"type": "image_url", "image_url": {"url": "a"}}], [{"type": "text"}], ["a"], 3):
        body = {"model": "best", "messages": [{"role": "user", "content": content}]}
        status, answer = served.ask("/v1/chat/completions", body)
        assert status == 422
        assert answer["error"]["message"].startswith("messages.0.content: It is a text, or a list of parts")
    for name in ("a b", "", "a" * 129, "a\n", ".a"):
        status, answer = served.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "b"})
        assert status == 422
        assert answer["error"]["message"].startswith("lora_name: It has at most 128 letters")
    connection, response = served.send("/v1/completions")
    assert (response.status, response.headers["allow"]) == (405, "POST")
    assert "GET /v1/completions: It takes POST." in response.read().decode()
    connection.close()
    status, answer = served.ask("/v1/completions", b'{"model": "best"')
    assert status == 422
    assert "no JSON: Expecting ',' delimiter, at character 17." in answer["error"]["message"]


def test_the_key_s_scheme_is_written_in_any_case(served: Served) -> None:
    for scheme, status in (("bearer", 200), ("BEARER", 200), ("Basic", 401), ("", 401)):
        connection = served.connect()
        connection.request("GET", "/v1/models", headers={"Authorization": f"{scheme} {KEY}".strip()})
        assert connection.getresponse().status == status
        connection.close()


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}, 200),
        ({"modalities": ["text"], "tool_choice": "none"}, 200),
        ({"parallel_tool_calls": False, "service_tier": "auto", "prompt_cache_key": "a"}, 200),
        ({"stream": True, "stream_options": {"include_usage": None}}, 200),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "a", "tool_calls": None, "audio": None}]},
            200,
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, 422),
        ({"tools": [{"type": "function"}]}, 422),
        ({"tool_choice": "required"}, 422),
        ({"response_format": {"type": "json_object"}}, 422),
    ],
)
def test_options_are_taken_where_they_change_nothing(
    served: Served, options: dict[str, Any], status: int
) -> None:
    body = {"model": "best", "messages": HELLO, "max_tokens": 1}
    assert served.ask("/v1/chat/completions", body | options)[0] == status


def test_a_body_says_that_it_is_json(served: Served) -> None:
    """As `curl -d` does not by itself: what other programs may send without asking is no JSON."""
    status, answer = served.ask("/v1/completions", GOOD, kind="application/x-www-form-urlencoded")
    assert (status, "Content-Type: application/json" in answer["error"]["message"]) == (415, True)


def test_without_the_key_or_under_another_name_nothing_is_answered(served: Served) -> None:
    for path, body in (("/v1/models", None), ("/v1/completions", GOOD), ("/nothing", None)):
        assert served.ask(path, body, key="another")[0] == 401
        assert served.ask(path, body, host="evil.example")[0] == 400
    assert served.ask("/health", key="none") == (200, {"status": "ok"}), "a supervisor has no key"
    assert served.ask("/nothing")[0] == 404
    assert served.ask("/docs")[0] == 404


class Gate:
    """Lets the engine make one iteration for each permit."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.permits = threading.Semaphore(0)
        self.steps = 0
        step = served.driver.engine.step

        def one() -> Any:
            self.entered.set()
            self.permits.acquire(timeout=60)
            self.steps += 1
            return step()

        monkeypatch.setattr(served.driver.engine, "step", one)

    def open(self) -> None:
        self.permits.release(10_000)


LONG = {"model": "base", "prompt": "a", "max_tokens": 160, "temperature": 0}


@pytest.fixture(scope="module")
def long(served: Served) -> dict[str, Any]:
    """A request whose answer is as long as the server allows: greedy, since one that is drawn may stop at
    any token."""
    usage = served.ask("/v1/completions", LONG)[1]["usage"]
    assert usage["completion_tokens"] == LONG["max_tokens"], "the tests below need all of these tokens"
    return LONG


@pytest.mark.parametrize("answers", [1, 3])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_pages(
    served: Served, long: dict[str, Any], streamed: bool, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(served, monkeypatch)
    connection = served.connect()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "Host": "localhost"}
    connection.request(
        "POST", "/v1/completions", json.dumps(long | {"stream": streamed, "n": answers}), headers
    )
    assert gate.entered.wait(60)
    assert connection.sock is not None
    connection.sock.close()
    pool = served.driver.engine.scheduler.pool
    for _ in range(100):  # fewer than the tokens that it asked for
        gate.permits.release()
        time.sleep(0.02)
        if gate.steps > 1 and pool.unused == pool.pages:
            break
    assert pool.unused == pool.pages
    assert gate.steps < 100
    gate.open()
    assert served.ask("/v1/completions", GOOD)[0] == 200


def test_a_full_queue_is_refused_and_what_waits_is_answered(
    served: Served, long: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(served, monkeypatch)
    monkeypatch.setattr(served.driver, "_most_waiting", 2)
    found: list[int] = []
    clients = [
        threading.Thread(target=lambda: found.append(served.ask("/v1/completions", long)[0]), daemon=True)
        for _ in range(2)
    ]
    clients[0].start()
    assert gate.entered.wait(60)  # added, and not admitted before it has a permit
    clients[1].start()
    while not served.driver._new:
        time.sleep(0.001)
    status, answer = served.ask("/v1/completions", GOOD)
    assert (status, answer["error"]["type"]) == (503, "overloaded_error")

    monkeypatch.setattr(served.driver, "_most_waiting", 100)
    pace = Pace()
    pace.note(300.0, 4)  # seconds of an iteration, and how many requests left the queue in it
    monkeypatch.setattr(served.driver, "_pace", pace)
    connection, response = served.send("/v1/completions", GOOD)  # two are ahead: 225 s, and 100 are allowed
    assert (response.status, response.getheader("retry-after")) == (503, "125")
    connection.close()
    gate.open()
    for each in clients:
        each.join(60)
    assert found == [200, 200]
    assert served.free()


def test_adapters_come_and_go_while_the_server_runs(served: Served, tmp_path: Path) -> None:
    shutil.copytree(served.root / "trial-0000", tmp_path / "outside")
    (served.root / "link").symlink_to(tmp_path / "outside")
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    for path, status in (
        (str(tmp_path / "outside"), 403),
        ("../adapters", 403),
        (".", 403),
        ("link", 403),
        ("none", 422),
        ("no\0ne", 422),
        ("n" * 300, 422),
        (None, 422),
    ):
        assert served.ask(load, {"lora_name": "new", "lora_path": path})[0] == status
    for name in ("best", "../new", "trial-0000"):
        assert served.ask(load, {"lora_name": name, "lora_path": "trial-0000"})[0] == 422
    status, answer = served.ask("/v1/completions", GOOD | {"model": "trial-00000"})
    assert (status, "Did you mean trial-0000?" in answer["error"]["message"]) == (404, True)
    assert served.ask(load, {"lora_name": "new", "lora_path": "trial-0000"})[0] == 200
    body = {"prompt": "What is 2 + 2?", "max_tokens": 12, "temperature": 0}
    texts = [
        served.ask("/v1/completions", body | {"model": name})[1]["choices"][0]["text"]
        for name in ("best", "new")
    ]
    assert texts[0] == texts[1]
    status, answer = served.ask(load, {"lora_name": "third", "lora_path": "trial-0000"})
    assert (status, "--max-adapters" in answer["error"]["message"]) == (422, True)
    assert served.ask(unload, {"lora_name": "new"})[0] == 200
    assert served.ask(unload, {"lora_name": "new"})[0] == 404
    assert served.ask("/v1/completions", GOOD | {"model": "new"})[0] == 404


def test_an_adapter_that_goes_while_a_request_comes_is_not_found(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderAdapters, "__contains__", lambda *_: True)
    status, answer = served.ask("/v1/completions", GOOD | {"model": "gone"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")


def measured(served: Served) -> dict[str, float]:
    status, text = served.ask("/metrics")
    assert status == 200
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_count_requests_tokens_and_pages(served: Served) -> None:
    before = measured(served)
    status, answer = served.ask("/v1/completions", GOOD | {"max_tokens": 3})
    assert status == 200
    assert served.ask("/v1/completions", GOOD | {"prompt": "a" * 1100})[0] == 422
    after = measured(served)
    more = {name: value - before.get(name, 0.0) for name, value in after.items()}
    usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
    assert (usage["completion_tokens"], reason) == (3, "length")
    assert more[f'plait_requests_total{{how="{reason}"}}'] == 1
    assert more['plait_requests_total{how="failed"}'] == 1
    assert more["plait_prompt_tokens_total"] == usage["prompt_tokens"]
    assert more["plait_new_tokens_total"] == usage["completion_tokens"]
    assert more["plait_first_token_seconds_count"] == 1
    assert after["plait_pool_pages"] == after["plait_pool_pages_unused"]
    assert (after["plait_requests_running"], after["plait_adapters"]) == (0, 1)


def test_a_request_that_cannot_be_added_for_any_reason_ends_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Request) -> int:
        raise RuntimeError("of a folder")

    with monkeypatch.context() as broken:
        broken.setattr(served.driver.engine, "add", fail)
        status, answer = served.ask("/v1/completions", GOOD)
        assert (status, answer["error"]["type"]) == (500, "server_error")
    assert served.ask("/v1/completions", GOOD)[0] == 200


def test_a_request_that_has_waited_for_too_long_is_refused(
    served: Served, long: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--wait 0`, all that find no room at once; one that does is answered."""
    monkeypatch.setattr(served.driver, "_most_seconds", 0.0)
    monkeypatch.setattr(served.driver, "_pace", Pace())  # unknown: none is refused before it has waited
    gate = Gate(served, monkeypatch)
    found: dict[int, int] = {}

    def ask(number: int) -> None:
        found[number] = served.ask("/v1/completions", long)[0]

    clients = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(2)]
    clients[0].start()
    assert gate.entered.wait(60)
    clients[1].start()
    while not served.driver._new:
        time.sleep(0.001)
    gate.open()
    for each in clients:
        each.join(60)
    assert found == {0: 200, 1: 503}, "the pool has no room for both"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_the_queue_gives_up_its_place(
    served: Served, long: dict[str, Any], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(served, monkeypatch)
    found: list[int] = []
    client = threading.Thread(
        target=lambda: found.append(served.ask("/v1/completions", long)[0]), daemon=True
    )
    client.start()
    assert gate.entered.wait(60)
    connection = served.connect()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "Host": "localhost"}
    connection.request("POST", "/v1/completions", json.dumps(long | {"stream": streamed}), headers)
    scheduler = served.driver.engine.scheduler
    while not served.driver._new:
        time.sleep(0.001)
    gate.permits.release(2)
    while not (scheduler.running and scheduler.waiting == 1):
        time.sleep(0.001)
    assert connection.sock is not None
    connection.sock.close()
    for _ in range(100):  # fewer than the tokens of the one that runs: the pool has no room for both
        gate.permits.release()
        time.sleep(0.02)
        if scheduler.waiting == 0:
            break
    assert (scheduler.waiting, len(scheduler.running), gate.steps < 100) == (0, 1, True)
    gate.open()
    client.join(60)
    assert found == [200]
    assert served.free()


def test_a_stream_that_fails_halfway_says_so(
    served: Served, long: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = served.driver.engine.step, []

    def third_fails() -> Any:
        steps.append(step())
        if len(steps) == 3:
            raise RuntimeError("as of a device")
        return steps[-1]

    monkeypatch.setattr(served.driver.engine, "step", third_fails)
    connection, response = served.send("/v1/completions", long | {"stream": True})
    assert response.status == 200
    events = [json.loads(line[6:]) for line in response.read().decode().split("\n\n") if line]
    connection.close()
    assert [("choices" in each, "error" in each) for each in events] == [(True, False)] * 2 + [(False, True)]
    assert events[-1]["error"]["type"] == "server_error"
    assert served.free()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("pieces", [0, 2])
def test_logits_that_are_not_finite_are_an_error(
    served: Served, long: dict[str, Any], streamed: bool, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step, steps = served.driver.engine, served.driver.engine.step, []

    def not_finite() -> Any:
        steps.extend(step())
        if len(steps) <= pieces:
            return steps[-1:]
        engine.cancel(steps[-1].request)
        return [Update(steps[-1].request, "", Completion((), "", "not finite"))]

    monkeypatch.setattr(engine, "step", not_finite)
    connection, response = served.send("/v1/completions", long | {"stream": streamed})
    last = json.loads(response.read().decode().strip().rpartition("\n\n")[2].removeprefix("data: "))
    connection.close()
    assert response.status == (200 if streamed and pieces else 500)
    assert "not finite" in last["error"]["message"]


def test_null_is_an_options_default_and_a_stream_may_end_with_its_usage(served: Served) -> None:
    asked = GOOD | {"max_tokens": 5}
    nulls = dict.fromkeys(("top_p", "seed", "stop", "stream", "logprobs", "n", "stream_options", "made_up"))
    status, whole = served.ask("/v1/completions", asked | nulls)
    assert status == 200
    *chunks, last = stream(served, "/v1/completions", asked | {"stream_options": {"include_usage": True}})
    assert "".join(each["choices"][0]["text"] for each in chunks) == whole["choices"][0]["text"]
    assert {each["usage"] for each in chunks} == {None}
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    without = served.ask("/v1/completions", asked | {"max_tokens": None})[1]
    assert without["usage"]["completion_tokens"] == 16, "OpenAI's default"


def test_answers_without_a_seed_differ_and_with_one_they_do_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter((1, 2, 3))
    monkeypatch.setattr("plait.serve.bodies.secrets", SimpleNamespace(randbits=lambda _: next(draws)))
    asked = GOOD | {"max_tokens": 20, "temperature": 2}
    texts = [
        [served.ask("/v1/completions", asked | seed)[1]["choices"][0]["text"] for _ in range(3)]
        for seed in ({}, {"seed": 7})
    ]
    assert [len(set(each)) for each in texts] == [3, 1]


def test_a_long_prompt_does_not_keep_others_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, read = threading.Event(), threading.Event()
    tokenise = type(served.base.tokeniser).__call__

    def slow(*given: Any, **options: Any) -> Any:
        reading.set()
        assert read.wait(60)
        return tokenise(*given, **options)

    monkeypatch.setattr(type(served.base.tokeniser), "__call__", slow)
    found: list[int] = []
    client = threading.Thread(
        target=lambda: found.append(served.ask("/v1/completions", GOOD)[0]), daemon=True
    )
    client.start()
    assert reading.wait(60)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}", "Host": "localhost"})
    try:
        assert connection.getresponse().status == 200
    finally:
        read.set()
    client.join(60)
    assert found == [200]
    connection.close()
