"""What the tests of vLLM share: engine processes, the place they work in, damage on disk."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import vllm_tiny

from kvfs import Store
from kvfs.fetcher import launch

BLOCK = 128
START_SECONDS = 240
CONNECTOR = {
    "kv_connector": "KvfsConnector", "kv_connector_module_path": "kvfs.connectors.vllm",
}  # fmt: skip


class Place:
    """A store, an index and the fetch process of a few engines."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.store = base / "store"
        self.index = base / "index"
        (base / "run").mkdir()
        self.environment = {
            **os.environ, "KVFS_RUNTIME": str(base / "run"), "KVFS_INDEX": str(self.index),
        }  # fmt: skip
        with Store.init(self.store, index=str(base / "index-of-test")) as store:
            self.uuid = store.uuid

    def settings(self, **more: Any) -> dict[str, Any]:
        """kv_connector_extra_config of the connector."""
        return {
            "store": str(self.store), "index": str(self.index), "arena_bytes": 64 << 20, **more,
        }  # fmt: skip

    def transfer(self, **more: Any) -> dict[str, Any]:
        """The connector, as fields of KVTransferConfig."""
        return {**CONNECTOR, "kv_connector_extra_config": self.settings(**more)}

    def open(self) -> Store:
        """The store, with an index of the test's own."""
        return Store.open(self.store, index=str(self.base / "index-of-test"))

    def segments(self) -> list[Path]:
        return sorted(self.store.rglob("*.seg"))

    def _client(self) -> Any:
        before = os.environ.get("KVFS_RUNTIME")
        os.environ["KVFS_RUNTIME"] = str(self.base / "run")
        try:
            return launch.find(self.uuid)
        finally:
            del os.environ["KVFS_RUNTIME"]
            if before is not None:
                os.environ["KVFS_RUNTIME"] = before

    def evict(self) -> None:
        """Lets the fetch process forget what it has in memory."""
        with self._client() as client:
            client.evict()

    def close(self, *, again: bool = False) -> None:
        """Ends the fetch process. again: one that the engine starts anew."""
        until = time.monotonic() + 20
        while (client := self._client()) is None:
            if not again:
                return
            assert time.monotonic() < until, "no new fetch process was started"
            time.sleep(0.05)
        with client:
            fd = os.pidfd_open(client.fetcher_pid)
            os.kill(client.fetcher_pid, signal.SIGTERM)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(10_000), "the fetch process does not end"
        os.close(fd)


class Vllm:
    """An engine in a process of its own: see vllm_tiny.py."""

    def __init__(
        self, model: Path, transfer: dict[str, Any] | None = None, *,
        environment: dict[str, str] | None = None, watch: bool = False, **engine: Any,
    ) -> None:  # fmt: skip
        """watch: measure how long vLLM waits for the connector; engine: arguments of LLM."""
        self.process = subprocess.Popen(
            [sys.executable, vllm_tiny.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip
        self.metrics: dict[str, float] = {}
        self.connector_seconds = 0.0
        start = {"model": str(model), "transfer": transfer or {}, "engine": engine}
        self._ask({**start, "watch": watch})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return answer
        raise AssertionError(f"vLLM ended with {self.process.wait()}")

    def generate(self, *prompts: list[int], tokens: int = 8, **fields: Any) -> list[dict[str, Any]]:
        """Output of prompts that are given together; fields: of all of them, like cache_salt.

        vLLM's own prefix cache is emptied before.
        """
        given = [{"prompt_token_ids": ids, **fields} for ids in prompts]
        answer = self._ask({"prompts": given, "tokens": tokens})
        self.connector_seconds = answer["connector_seconds"]
        before, self.metrics = self.metrics, answer["metrics"]
        self.news = {
            name.removeprefix("vllm:kvfs_"): n - before.get(name, 0)
            for name, n in self.metrics.items()
            if n != before.get(name, 0)
        }
        answers: list[dict[str, Any]] = answer["answers"]
        return answers

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def said(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """What must not depend on kvfs: tokens and their log-probabilities."""
    return answer["tokens"], answer["logprobs"]
