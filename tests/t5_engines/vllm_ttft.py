"""Time to first token of vLLM on this machine: a prompt that is stored beside one that is computed.

    python vllm_ttft.py [--tokens 4096 16384] [--model llama_bench] [--rounds 5]

For each length three engines, one after the other: without kvfs, with kvfs and an empty store, with
kvfs and what that one stored. Prints the best of each, since others use the machine as well, and
how long vLLM waited for the connector itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from vllm_support import Place, Vllm
from vllm_tiny import make, prompt


def run(model: Path, place: Place | None, tokens: int, rounds: int) -> dict[str, Any]:
    """The best of several prompts, of an engine that has warmed up with another one."""
    transfer = place.transfer(arena_bytes=512 << 20) if place else None
    sizes = {
        "max_model_len": tokens + 16, "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 1 << 30,
    }  # fmt: skip
    environment = place.environment if place else None
    with Vllm(model, transfer, environment=environment, watch=place is not None, **sizes) as engine:
        engine.generate(prompt(tokens, seed=99), tokens=1)
        seconds, waited, cached = [], [], []
        for seed in range(rounds):
            (answer,) = engine.generate(prompt(tokens, seed=seed), tokens=1)
            seconds.append(answer["seconds"])
            waited.append(engine.connector_seconds)
            cached.append(answer["cached"])
    return {
        "seconds": min(seconds), "waited": statistics.median(waited), "cached": min(cached),
    }  # fmt: skip


def compare(name: str, tokens: int, rounds: int) -> None:
    """Prints the figures of one length."""
    with tempfile.TemporaryDirectory() as base:
        model, place = make(name, Path(base)), Place(Path(base))
        plain = run(model, None, tokens, rounds)
        miss = run(model, place, tokens, rounds)
        hit = run(model, place, tokens, rounds)
        place.close()
    print(f"{name}, {tokens} tokens, best of {rounds}")
    for what, found in (("without kvfs", plain), ("miss", miss), ("hit", hit)):
        print(
            f"{what:>13}: {found['seconds'] * 1e3:8.1f} ms to the first token, "
            f"{found['cached']:.0f} tokens cached, {found['waited'] * 1e3:.2f} ms in the connector"
        )
    share = miss["waited"] / plain["seconds"]
    print(
        f"a hit is {plain['seconds'] / hit['seconds']:.1f} times as fast; "
        f"the connector takes {share:.2%} of a miss",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--model", default="llama_bench")
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    os.environ.setdefault("KVFS_INDEX_FORCE", "1")
    for tokens in a.tokens:
        compare(a.model, tokens, a.rounds)


if __name__ == "__main__":
    main()
