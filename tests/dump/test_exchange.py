"""All ranks get the same decision; every rank's part reaches the writer, each byte once; what goes wrong leaves nobody
waiting."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_instrument._dump import exchange
from slime_instrument._dump.agree import Agreement, CallId
from slime_instrument._dump.contribute import contribute
from slime_instrument._dump.exchange import Receiver, _close
from slime_instrument._dump.payload import build_payload, put_together
from slime_instrument._errors import DumpError

from .ranks import sharded, topology
from .threads import together

WORLD = 4
CALL = CallId(0, 0, 0)


def quiet(text: str) -> None:
    pass


FIELDS = ("log_probs", "values")


def rollout(dp: int, big: int = 0) -> list[dict[str, Any]]:
    """Uneven shards, rank 1 with one sample, rank 2 with none. ``big``: elements of a tensor on each."""
    sizes = [3, 1, 0][:dp]
    data, position = [], 0
    for rank, size in enumerate(sizes):
        totals = [7 + 3 * i + rank for i in range(size)]
        responses = [(5 * i + rank) % 6 for i in range(size)]
        data.append(
            {
                "total_lengths": totals,
                "response_lengths": responses,
                "partition": [sum(sizes) - 1 - position - i for i in range(size)],
                "tokens": [torch.arange(total) + 100 * rank for total in totals],
                "log_probs": [torch.randn(response) for response in responses],
                "values": [torch.randn(response).bfloat16() for response in responses],
                "big": {"x": torch.full((big,), float(rank))},
            }
        )
        position += size
    return data


def take_part(store: Any, data: list[dict[str, Any]], cp: int, rank: int, bucket: int, timeout_s: float) -> Any:
    """One rank's whole part in one dump."""
    dp = len(data)
    place = topology(cp, rank % cp, dp, rank // cp)
    held = sharded(data[place.data_rank], cp, place.context_rank, FIELDS)
    contribution = contribute(held, place, FIELDS, provenance={"dp": place.data_rank})
    mine = Agreement(store, CALL, place, timeout_s, {}, quiet)
    mine.arrive("path")
    if not place.is_writer:
        return exchange.send(contribution, mine.wait_for_go(), mine, bucket)
    with Receiver(mine, mine.wait_for_all()) as receiver:
        mine.go(receiver.address)
        return put_together(receiver.receive(contribution), cp, FIELDS)


def receiver(store: Any, timeout_s: float = 5.0) -> Receiver:
    """The writer's of two ranks."""
    return Receiver(Agreement(store, CALL, topology(1, 0, 2, 0), timeout_s, {}, quiet), [1])


def check(data: list[dict[str, Any]], parts: Any) -> None:
    payload = build_payload(parts, rollout_id=0, writer_rank=0)
    wanted = {
        position: (one["tokens"][i], one["log_probs"][i], one["values"][i])
        for one in data
        for i, position in enumerate(one["partition"])
    }
    assert [sample["rollout_position"] for sample in payload["samples"]] == sorted(wanted)
    for sample in payload["samples"]:
        tokens, log_probs, values = wanted[sample["rollout_position"]]
        assert torch.equal(sample["tokens"], tokens)
        assert torch.equal(sample["log_probs"], log_probs)
        assert torch.equal(sample["values"], values)
    assert [layout["provenance"]["dp"] for layout in payload["dp_shards"]] == list(range(len(data)))
    for one, layout in zip(data, payload["dp_shards"], strict=True):
        assert torch.equal(layout["big"]["x"], one["big"]["x"])


@pytest.mark.parametrize("bucket", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(("cp", "dp"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)])
def test_the_writer_has_the_whole_rollout_and_the_others_sent_their_part(
    store: Any, cp: int, dp: int, bucket: int
) -> None:
    data = rollout(dp, big=5)
    writer, *others = together(
        [lambda rank=rank: take_part(store, data, cp, rank, bucket, 10.0) for rank in range(cp * dp)]
    )
    assert all(isinstance(sent, int) for sent in others), others
    check(data, writer)


def test_bytes_beyond_all_buffers_arrive(store: Any) -> None:
    data = rollout(2, big=3_000_000)
    writer, *others = together([lambda rank=rank: take_part(store, data, 2, rank, 1 << 20, 20.0) for rank in range(4)])
    check(data, writer)
    assert others[1] > 12_000_000


def test_a_stranger_on_the_port_neither_ends_nor_delays_the_dump(store: Any) -> None:
    data = rollout(2, big=5)
    strangers: list[socket.socket] = []

    def strange(receiver: Receiver) -> None:
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, bytes(28)):
            one = socket.create_connection(("127.0.0.1", receiver.address["port"]))
            one.sendall(sent)
            strangers.append(one)

    real = Receiver.__init__

    def __init__(self: Receiver, *args: Any) -> None:
        real(self, *args)
        strange(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Receiver, "__init__", __init__)
        began = time.monotonic()
        writer, other = together([lambda rank=rank: take_part(store, data, 1, rank, 64, 10.0) for rank in range(2)])
    assert isinstance(other, int), other
    check(data, writer)
    assert time.monotonic() - began < 8.0
    for one in strangers:
        one.close()


def test_addresses_that_lead_nowhere_or_to_somebody_else_are_passed_over(store: Any) -> None:
    with socket.create_server(("127.0.0.2", 0)) as somebody:
        with receiver(store) as writer:
            address = {**writer.address, "machine": "another", "hosts": ["127.0.0.3", "name.invalid", "127.0.0.1"]}
            line = exchange._connect  # the writer's side is answered by a thread below

            def answer() -> None:
                writer._listener.setblocking(True)
                accepted, _ = writer._listener.accept()
                accepted.recv(1000)
                accepted.sendall(b"somebody else!!!")
                accepted.close()
                accepted, _ = writer._listener.accept()
                accepted.recv(1000)
                accepted.sendall(writer._answer)
                accepted.close()

            results = together([answer, lambda: line(address, topology(1, 0, 2, 1), 5, 2.0)])
            assert isinstance(results[1], socket.socket), results[1]
            results[1].close()
        nowhere = {**writer.address, "machine": "another", "port": somebody.getsockname()[1], "hosts": ["127.0.0.9"]}
        with pytest.raises(
            DumpError, match=r"rank 0 cannot be reached at port \d+ \(127\.0\.0\.9: .*GLOO_SOCKET_IFNAME"
        ):
            exchange._connect(nowhere, topology(1, 0, 2, 1), 5, 1.0)


def test_an_interface_that_the_user_names_comes_first(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert exchange._hosts(store)[0] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^docker0,nosuch0")
    assert "127.0.0.1" not in exchange._hosts(store)[:1] or len(exchange._hosts(store)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Real processes: one that stops, dies or is slow while bytes travel

BIG = 4_000_000  # elements: more than all socket buffers hold
TIMEOUT_S = 2.0


def _process(port: int, rank: int, behaviour: str, out: Any) -> None:
    torch.set_num_threads(1)  # threads of the parent are not there after a fork
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    sends = exchange._send_piece
    takes = Receiver._take_parts
    sent = [0]

    def misbehave(*args: Any) -> None:
        sent[0] += 1
        if sent[0] == 3:
            if behaviour == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if behaviour == "stalls":
                time.sleep(60)
            if behaviour == "raises":
                raise MemoryError("no memory")
        if behaviour == "is slow":
            time.sleep(0.5)
        sends(*args)

    def misbehaving_writer(*args: Any) -> None:
        out.send("bytes travel")
        if behaviour == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)
        takes(*args)

    if behaviour and rank:
        exchange._send_piece = misbehave
    elif behaviour:
        Receiver._take_parts = misbehaving_writer  # type: ignore[method-assign]
    torch.manual_seed(0)
    data = rollout(2, big=BIG)
    began = time.monotonic()
    try:
        parts = take_part(store, data, 1, rank, 1 << 20, TIMEOUT_S)
        if rank == 0:
            check(data, parts)
        result = "whole"
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    out.send((result, time.monotonic() - began))


@pytest.mark.parametrize(
    ("who", "behaviour", "others", "at_least", "at_most"),
    [
        (1, "", "whole", 0.0, 30.0),
        (1, "is slow", "whole", 2 * TIMEOUT_S, 60.0),
        (1, "dies", "rank 1 ended with", 0.0, TIMEOUT_S + 3),
        (1, "raises", "rank 1 ended with", 0.0, TIMEOUT_S + 3),
        (1, "stalls", "rank 1 stood still: no byte for 2 s", TIMEOUT_S, TIMEOUT_S + 6),
        (1, "stops", "rank 1 stood still: no byte for 2 s", TIMEOUT_S, TIMEOUT_S + 6),
        (0, "dies", "rank 0 took no", 0.0, TIMEOUT_S + 3),
        (0, "stops", "rank 0 took no byte for 2 s", TIMEOUT_S, TIMEOUT_S + 6),
    ],
)
def test_a_process_that_misbehaves_while_bytes_travel(
    who: int, behaviour: str, others: str, at_least: float, at_most: float
) -> None:
    """What counts is that the other one is back in time, with the reason, or has everything."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("fork")
    processes, pipes = [], []
    for rank in range(2):
        reader, writer_end = context.Pipe(duplex=False)
        process = context.Process(
            target=_process, args=(store.port, rank, behaviour if rank == who else "", writer_end), daemon=True
        )
        process.start()
        processes.append(process)
        pipes.append(reader)
    try:
        assert pipes[1 - who].poll(90), "the other rank hangs"
        result, seconds = pipes[1 - who].recv()
        assert others in result
        assert at_least <= seconds
        assert seconds <= at_most
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def test_a_connection_ends_for_the_other_side_though_a_forked_child_holds_it() -> None:
    mine, theirs = socket.socketpair()
    held = mine.dup()  # as a child has it
    theirs.settimeout(5.0)
    _close(mine)
    assert theirs.recv(1) == b""
    held.close()
    theirs.close()


def test_a_connection_that_cannot_be_taken_ends_the_wait_on_time(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = receiver(store, 1.0)
    caller = socket.create_connection(("127.0.0.1", writer.address["port"]))

    class NoDescriptors:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def accept(self) -> Any:
            raise OSError(24, "Too many open files")

    real = writer._listener
    monkeypatch.setattr(writer, "_listener", NoDescriptors())
    began = time.monotonic()
    with pytest.raises(DumpError, match=r"did not connect within 1 s"):
        writer._take_descriptions()
    assert time.monotonic() - began < 5.0
    caller.close()
    real.close()


def test_without_a_listener_nothing_stays_open(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    receiver(store).__exit__()
    before = set(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        monkeypatch.setattr(socket, "create_server", no_descriptors)
        for _ in range(5):
            with pytest.raises(DumpError, match="no socket can be had"):
                receiver(store)
        assert set(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()
