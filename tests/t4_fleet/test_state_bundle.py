"""Requests that go on at another host: a decode that moves, and prefill here with decode there."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvfs import presets
from kvfs.errors import DamageError, FormatError, InputError
from kvfs.peers import bundle as bundles
from kvfs.peers.bundle import Bundle, hand_over, read, take_over
from kvfs.state.slot import Anchor
from kvfs.testing.peers import L1, SWA, Host, data_of, prompt

Hosts = Callable[..., Host]
SAMPLING = b"seed, temperature, penalties: the engine's own \x00\xff"


def made(host: Host, **how: object) -> Bundle:
    """A request whose prompt is stored, with its slot, that has gone on by 40 tokens."""
    host.put(prompt(1), L1)
    tokens = prompt(1)
    return hand_over(host.store, host.ns, tokens, pool=host.pool, sampling=SAMPLING,
                     prompt_tokens=960, deadline=20.0, **how)  # type: ignore[arg-type]  # fmt: skip


def test_round_trip(host: Hosts) -> None:
    a, b = host("a"), host("b")
    bundle = made(a)
    data = bundle.export()
    got = read(data, b.ns)
    assert got == bundle and got.export() == data
    assert (got.n_tokens, got.prompt_tokens, got.sampling) == (1000, 960, SAMPLING)
    assert struct.unpack("<1000I", got.tokens) == tuple(prompt(1))
    b.store.catch_up()
    loaded = take_over(got, b.store, b.ns)
    assert loaded.source == "bundle" and loaded.slot is not None
    assert (loaded.decision.hit_tokens, loaded.decision.compute_tokens) == (L1, 232)
    assert loaded.slot.data == bundle.slot.data  # type: ignore[union-attr]
    fetched = b.store.fetch(b.ns, got.plan, got.tokens, blocks=L1 // 128)
    assert fetched.reason is None, "the plan is good at the other host as it is"


def test_without_a_slot(host: Hosts) -> None:
    a = host("a")
    a.put(prompt(2))
    bundle = hand_over(a.store, a.ns, prompt(2), pool=a.pool)
    got = read(bundle.export(), a.ns)
    assert got.slot is None and got.prompt_tokens == 1000
    loaded = take_over(got, a.store, a.ns)
    assert loaded.slot is None and loaded.decision.replay_tokens == 128


def test_every_kind_of_damage(host: Hosts) -> None:
    """Never half a request: one flipped bit, one byte less, one more."""
    a = host("a")
    data = made(a).export()
    rng = random.Random(3)
    for at in [*range(64), *(rng.randrange(len(data)) for _ in range(300))]:
        bad = bytearray(data)
        bad[at] ^= 1 << rng.randrange(8)
        with pytest.raises((DamageError, FormatError)):
            read(bytes(bad), a.ns)
    for bad in (b"", data[:10], data[:-1], data + b"\0", data[: len(data) // 2], bytes(1000)):
        with pytest.raises((DamageError, FormatError)):
            read(bad, a.ns)


def resealed(data: bytes) -> bytes:
    body = data[:-32]
    return body + bundles._digest(body)


def test_other_versions_and_shapes_are_refused(host: Hosts) -> None:
    """With a right checksum: written by another version, or by somebody else."""
    a = host("a")
    data = made(a).export()
    for at, value, what in ((8, 2, "version 2"), (12, 9, "ends early"), (12, 1, "other sections")):
        bad = bytearray(data)
        struct.pack_into("<I", bad, at, value)
        with pytest.raises(FormatError, match=what):
            read(resealed(bytes(bad)), a.ns)
    for kind in (0, 2, 99):  # unknown, twice, unknown
        bad = bytearray(data)
        struct.pack_into("<I", bad, 16, kind)
        with pytest.raises(FormatError):
            read(resealed(bytes(bad)), a.ns)
    bad = bytearray(data)
    struct.pack_into("<Q", bad, 24, 1 << 62)
    with pytest.raises(FormatError, match="cannot be read"):
        read(resealed(bytes(bad)), a.ns)


def test_what_does_not_fit_together_is_refused(host: Hosts) -> None:
    a = host("a")
    bundle = made(a)
    other = a.store.create_namespace(presets.get("tiny-swa", weights="other", tokenizer="t"))
    with pytest.raises(InputError, match="not of"):
        read(bundle.export(), other)
    strange = replace(bundle, tokens=bundle.tokens[:-4] + b"\1\0\0\0")
    assert read(strange.export(), a.ns).slot is not None, "the change is behind the slot"
    strange = replace(bundle, tokens=b"\1\0\0\0" + bundle.tokens[4:])
    with pytest.raises(InputError, match="not of its tokens"):
        read(strange.export(), a.ns)
    for wrong in (replace(bundle, tokens=b"abc"), replace(bundle, prompt_tokens=1001),
                  replace(bundle, tokens=bundle.tokens[:400])):  # fmt: skip
        with pytest.raises(InputError):
            wrong.export()


def test_prefill_here_decode_there_pushed(host: Hosts) -> None:
    """The slot is at the decode host before the request is."""
    p, d = host("p"), host("d")
    bundle = made(p, to=d.service.address, client=p.client)
    assert bundle.slot is None and bundle.holder is not None
    got = read(bundle.export(), d.ns)
    assert len(bundle.export()) < 8192, "tokens and plan, no state"
    d.store.catch_up()
    loaded = take_over(got, d.store, d.ns, pool=d.pool, client=d.client, deadline=20.0)
    assert (loaded.source, loaded.decision.hit_tokens) == ("local", L1)


def test_prefill_here_decode_there_pulled(host: Hosts) -> None:
    p, d = host("p"), host("d")
    bundle = made(p, pulled_from=p.service.address)
    got = read(bundle.export(), d.ns)
    assert got.slot is None and got.holder == bundle.holder
    d.store.catch_up()
    loaded = take_over(got, d.store, d.ns, pool=d.pool, client=d.client, deadline=20.0)
    assert loaded.source == p.service.address and loaded.slot is not None
    assert loaded.slot.data == data_of(Anchor.of(p.ns.hasher(prompt(1)), L1), SWA)


def test_a_push_that_fails_lets_the_slot_go_along(host: Hosts) -> None:
    p, d = host("p"), host("d")
    address = d.service.address
    d.stop()
    bundle = made(p, to=address, client=p.client)
    assert bundle.slot is not None and bundle.holder is None
    d.start(address)


def test_the_slot_is_gone_before_it_is_pulled(host: Hosts) -> None:
    p, d = host("p"), host("d")
    bundle = made(p, pulled_from=p.service.address)
    p.slots.clear()
    d.store.catch_up()
    loaded = take_over(bundle, d.store, d.ns, pool=d.pool, client=d.client, deadline=20.0)
    assert loaded.slot is None and loaded.decision.replay_tokens == 128
    assert "not there" in loaded.reasons[0]
