"""A process that generates with SGLang on a CPU, for tests.

Run as a script it reads requests, one JSON object a line: the first says which engine to make, each
other one is a prompt, or {"flush": true} to forget what is in memory. An answer is a line that
begins with RESULT, since SGLang writes to standard output as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PAGE = 128


def environment(base: dict[str, str]) -> dict[str, str]:
    """For a child, and for the processes that SGLang starts: what this module says of a CPU."""
    here = Path(__file__).parent
    paths = [str(here / "sglang_cpu"), str(here), base.get("PYTHONPATH", "")]
    return {
        **base, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def engine(model: str, storage: dict[str, Any] | None, **more: Any) -> Any:
    """An engine; storage: the settings of a dynamic storage backend, None for none."""
    import sglang

    if storage is not None:
        more = {
            "enable_hierarchical_cache": True, "hicache_ratio": 2.0,
            "hicache_write_policy": "write_through", "hicache_mem_layout": "page_first",
            "hicache_io_backend": "kernel", "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(storage), **more,
        }  # fmt: skip
    return sglang.Engine(
        model_path=model, device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", skip_tokenizer_init=True, dtype="float32",
        disable_cuda_graph=True, page_size=PAGE, max_total_tokens=8192, max_running_requests=2,
        mem_fraction_static=0.3, log_level="info", disable_overlap_schedule=True, random_seed=0,
        **more,
    )  # fmt: skip


def main() -> None:
    made = json.loads(sys.stdin.readline())
    own = engine(made["model"], made["storage"], **made.get("more", {}))
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "flush" in request:
            answer({"flushed": flushed(own)})
            continue
        out = own.generate(
            input_ids=request["ids"],
            sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        )
        info = out["meta_info"]
        answer({
            "ids": out["output_ids"], "cached": info["cached_tokens"],
            "details": info.get("cached_tokens_details"),
        })  # fmt: skip
    own.shutdown()


def flushed(engine: Any) -> bool:
    """Has the engine forget its cache: it does so only once its last request is all over, which is
    after its answer."""
    until = time.monotonic() + 60
    while not engine.flush_cache().success:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def answer(what: dict[str, Any]) -> None:
    print("RESULT", json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
