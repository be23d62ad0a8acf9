"""Tiny models with random weights for vLLM, and a process that generates with one of them.

Run as a script it reads requests, one JSON object a line: the first says which engine to make (see
`engine`), each other one is a batch of prompts (see `serve`). An answer is a line that begins with
RESULT, since vLLM writes to standard output as well.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = 1024
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    # Larger, so that to compute a prompt takes longer than to load it.
    "llama_bench": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 256},
    # Two groups: every other layer slides.
    "gpt_oss": {
        "model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 128, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": _YARN,
    },
}  # fmt: skip


def make(name: str, directory: Path, seed: int = 1234) -> Path:
    """Writes a model's configuration and weights; what is there already stays."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = directory / f"{name}-{seed}"
    if (path / "model.safetensors").exists():
        return path
    fields = {**_BASE, **MODELS[name]}
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, weights in model.named_parameters():
            if weights.ndim >= 2:  # so large that a wrong KV cache is another token
                weights.normal_(0, 0.08)
            elif "sinks" in key:
                weights.normal_(0, 1)
    model.save_pretrained(path)
    return path


def greedy(model: Path, prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
    """What transformers generates with a model that `make` has written."""
    import torch
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    out = []
    for ids in prompts:
        given = torch.tensor([ids])
        answer = own.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        out.append(answer[0, len(ids) :].tolist())
    return out


def prompt(length: int, seed: int = 7) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, VOCABULARY - 10) for _ in range(length)]


def environment() -> None:
    """What vLLM is told by environment variables. Before it is imported."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip


def let_vllm_look_at_llvmlite() -> None:
    """vLLM asks every object of every loaded module for attributes; llvmlite's library, which
    LMCache loads, answers with a function whatever the name, and that ends vLLM."""
    from llvmlite.binding import ffi

    wrapper = ffi._lib_wrapper
    answer = wrapper.__getattr__

    def named(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    wrapper.__getattr__ = named


def engine(request: dict[str, Any]) -> Any:
    """An engine. model: directory; transfer: fields of KVTransferConfig, {} for none; engine: more
    arguments of LLM."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    given = dict(request.get("engine", {}))
    if "lmcache" in request.get("transfer", {}).get("kv_connector_module_path", ""):
        let_vllm_look_at_llvmlite()
    if request.get("transfer"):
        given["kv_transfer_config"] = KVTransferConfig(kv_role="kv_both", **request["transfer"])
    return LLM(
        model=request["model"], skip_tokenizer_init=True, enforce_eager=True,
        disable_log_stats=False,
        **{"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 4, "seed": 0,
           "kv_cache_memory_bytes": 1 << 28, **given},
    )  # fmt: skip


def answers(llm: Any, prompts: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Greedy output of prompts that are given to the engine together."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=1
    )
    began = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - began
    return [
        {
            "cached": o.num_cached_tokens, "tokens": list(o.outputs[0].token_ids),
            "logprobs": [round(next(iter(d.values())).logprob, 6) for d in o.outputs[0].logprobs],
            "reason": o.outputs[0].finish_reason, "seconds": seconds,
        }
        for o in outputs
    ]  # fmt: skip


def metrics(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        name, value = metric.name, getattr(metric, "value", None)
        if value and ("kvfs" in name or "external_prefix" in name or "kv_offload" in name):
            found[name] = found.get(name, 0) + value
    return found


def serve(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Generates greedily for "prompts", a list of vLLM's prompts, "tokens" tokens each.

    "reset": forget vLLM's own prefix cache before. Also answers with all of kvfs's counters.
    """
    if request.get("reset", True):
        llm.reset_prefix_cache()
    spent.clear()
    out = answers(llm, request["prompts"], request.get("tokens", 8))
    connector = sum(spent.values())
    settle()
    return {"answers": out, "metrics": metrics(llm), "connector_seconds": connector}


CALLS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups", "take_events", "start_load_kv",
    "wait_for_save", "get_transfer_results", "build_connector_worker_meta",
    "get_kv_connector_stats",
)  # fmt: skip
spent: dict[str, float] = {}
"""Seconds in the connector's methods, which vLLM waits for."""


def watch(cls: Any) -> None:
    """Measures how long vLLM waits for a connector's methods."""

    def timed(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return call

    for name in CALLS:
        setattr(cls, name, timed(name, getattr(cls, name)))


def settle() -> None:
    """Waits until the connector has stored what it took, where it is in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if hasattr(connector, "flush"):
        assert connector.flush(20.0)


def main() -> None:
    environment()
    request = json.loads(sys.stdin.readline())
    if request.get("watch"):
        from kvfs.connectors.vllm import KvfsConnector

        watch(KvfsConnector)
    llm = engine(request)
    print("RESULT {}", flush=True)
    for line in sys.stdin:
        print("RESULT", json.dumps(serve(llm, json.loads(line))), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
