"""What shapes a KV cache besides its layout: weights, tokenizers, adapters, the configuration.

A name is never enough of an identity: the same directory may hold other weights tomorrow. A digest
is computed once for a file and kept, beside the index, until the file's size, times or inode
change. Reads the files and the directory of kept digests; safe to use from several processes.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import xxhash

from kvfs.errors import InputError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
"""Names of files that hold weights."""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""What a revision on a model hub is when it cannot move."""
# Of the configuration, what says where it came from or how it is run, not what is computed.
_NO_PART = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "use_cache", "return_dict",
     "output_attentions", "output_hidden_states", "torch_dtype", "dtype"}
)  # fmt: skip
# RoPE that is stretched by how long a prompt is; "su" is an older name of longrope.
_STRETCHED = frozenset({"dynamic", "longrope", "su"})
_CHUNK = 8 << 20
_THREADS = 4
# A file changed within its clock's grain may change again without a trace.
_RACY_SECONDS = 2.0


def digest_files(path: Path, patterns: tuple[str, ...], cache: str | os.PathLike[str]) -> str:
    """A digest over the names and bytes of a directory's files, or of one file; "" for none.

    Raises InputError if one cannot be read.
    """
    files = [path] if path.is_file() else sorted({f for p in patterns for f in path.glob(p)})
    if not files:
        return ""
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(lambda f: _digest_file(f, Path(cache)), files))
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
    names = json.dumps([[f.name, d] for f, d in zip(files, digests, strict=True)])
    return f"xxh3:{xxhash.xxh3_128(names.encode()).hexdigest()}"


def _digest_file(path: Path, cache: Path) -> str:
    real = path.resolve()
    stat = real.stat()
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
    note = cache / f"{blake2b(os.fsencode(real), digest_size=16).hexdigest()}.json"
    try:
        kept = json.loads(note.read_text())
        if kept["state"] == state:
            return str(kept["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = xxhash.xxh3_128()
    for chunk in _chunks(real):
        digest.update(chunk)
    if time.time() - stat.st_mtime > _RACY_SECONDS:
        _keep(note, {"state": state, "digest": digest.hexdigest()})
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            yield buffer[:n]


def _keep(note: Path, data: dict[str, Any]) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        scratch = note.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(data))
        scratch.replace(note)
    except OSError:
        pass  # computed again the next time


def stretches(value: Any) -> frozenset[str]:
    """The kinds of RoPE of a model's configuration that are stretched by the longest prompt, so
    that its KV depends on what the engine was started for, or on the whole prompt."""
    if not isinstance(value, Mapping):
        return frozenset()
    kinds = (v for v in (value.get("rope_type"), value.get("type")) if isinstance(v, str))
    return _STRETCHED.intersection(kinds).union(*map(stretches, value.values()))


def shaping(value: Any, without: frozenset[str] = frozenset()) -> Any:
    """What of a model's configuration (`to_dict`) may shape its KV; without: more keys, at any
    depth, that do not."""
    if isinstance(value, Mapping):
        left = (k for k in value if k not in _NO_PART and k not in without)
        return {str(k): shaping(value[k], without) for k in left}
    return [shaping(v, without) for v in value] if isinstance(value, list | tuple) else value
